"""Everything that can be known before a process starts, checked in one place, told all at once.

Needs no GPU, imports no torch, creates nothing. `validate` returns what the planner needs or raises
`ConfigProblems` with every problem that was found.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from backends import machine
from backends.config import KvGroup, ModelConfig
from backends.errors import ConfigError, RegionError
from backends.layout import check_blocks, check_sharding, columns
from backends.region.space import check_node_space, headroom_bytes
from backends.region.spec import HEADER_BYTES, row_bytes_for
from backends.tier.object.settings import ObjectSettings
from backends.tier.registry import TierRegistry
from backends.tier.settings import SettingsError
from backends.units import format_size, parse_size
from orchestrator import object_store
from orchestrator.engine_vllm.settings import check as check_vllm
from orchestrator.engine_vllm.settings import process_bytes
from orchestrator.lower_tiers import lower_tiers, stack_settings
from orchestrator.model import check_model, resolve_model
from orchestrator.node_check import check_index_room, check_scope, check_windows
from orchestrator.plan import Geometry, cache_config, declared_blocks, geometry
from orchestrator.ports import check_free, check_ports, check_replay
from orchestrator.problems import ConfigProblems, Problem
from orchestrator.schema import Config
from orchestrator.simulate.check import check_simulation
from orchestrator.topology import Topology, check_topology
from orchestrator.values import ADDRESSES, CPU_KERNELS, CUDA_KERNELS, SIZES, check_values
from orchestrator.workload.check import check as check_workload
from orchestrator.workloads import workload_spec

WORKER_BYTES = 150 << 20
"""What a worker process needs beside its KV, measured: resident size that forks do not share."""
RUN_DIR_BYTES = 64 << 20
FILES_PER_WORKER = 6
FILES_OF_LAUNCHER = 64

_UNITS = ("engine.tokens_per", "region.blocks_per_chunk")
_SIMPLEST = Topology(1, 1, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Validated:
    """What is known of a configuration with which nothing is wrong."""

    topology: Topology
    model: ModelConfig
    groups: tuple[KvGroup, ...]


def validate(
    config: Config, run_dir: Path, environment: Mapping[str, str] | None = None
) -> Validated:
    """Check a configuration against itself and against this machine.

    `environment` is what workers will have, by default this process's own.
    Raises ConfigProblems with all that was found. A check that stands on values which are wrong
    themselves is left out, so that nothing is told twice.
    """
    problems = check_values(config)
    # What dead runs left may be why there is no room; removing it needs none. A doctor finds out by
    # itself, and has a verdict where a run is refused.
    elsewhere = ("clean", "simulate", "doctor")
    on_this_machine = config.spawn.check_machine and config.action not in elsewhere
    topology = None
    if _clear(problems, "parallel.", "spawn.nnodes"):
        topology, found = _topology(config)
        problems += found
    problems += _spawn(config, topology)
    problems += _settings(config)
    environment = os.environ if environment is None else environment
    problems += check_vllm(config, environment)
    problems += check_replay(config)
    object_given = _clear(problems, object_store.KEY)
    problems += _lower_tiers(config, object_given, on_this_machine, environment)
    if _clear(problems, "tiers"):
        problems += _edges(config)
    problems += _affinity(config, topology)
    problems += [] if topology is None else check_scope(config, topology)
    if _clear(problems, *_UNITS):
        problems += [] if topology is None else _units(config, topology)
        problems += _workload(config, topology or _SIMPLEST)
    if config.action == "simulate" and _clear(problems, "simulate."):
        problems += check_simulation(config.simulate)
    findings = check_model(config.model)
    problems += [Problem(*finding) for finding in findings]
    if on_this_machine:
        problems += _run_dir(run_dir)
        if topology is not None and _clear(problems, *ADDRESSES):
            problems += check_free(config, topology)
        problems += _devices(config, topology)
    resolved = None if findings else resolve_model(config.model)
    if topology is not None and resolved is not None:
        sizes_hold = _clear(problems, *_UNITS, *SIZES)
        problems += _shards(config, topology, *resolved, sizes_hold, on_this_machine)
    if topology is not None and on_this_machine and _clear(problems, "region.backing", *SIZES):
        problems += _memory(config, topology)
        problems += _files(config, topology)
    if problems or topology is None or resolved is None:
        raise ConfigProblems(problems)
    return Validated(topology, *resolved)


def _clear(problems: Iterable[Problem], *prefixes: str) -> bool:
    """Whether nothing is wrong with any key that begins so."""
    return not any(problem.key.startswith(prefixes) for problem in problems)


def _topology(config: Config) -> tuple[Topology | None, list[Problem]]:
    parallel, spawn = config.parallel, config.spawn
    topology, problems = check_topology(
        data_parallel_size=parallel.data_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        nnodes=spawn.nnodes,
        devices_per_node=spawn.devices_per_node,
    )
    if parallel.nodes != spawn.nnodes:
        problems.append(
            Problem(
                "parallel.nodes",
                parallel.nodes,
                f"differs from spawn.nnodes = {spawn.nnodes}",
                "set spawn.nnodes alone; parallel.nodes follows it",
            )
        )
    return topology, problems


def _spawn(config: Config, topology: Topology | None) -> Iterator[Problem]:
    spawn = config.spawn
    if spawn.nnodes > 1 and config.action == "run":
        yield Problem(
            "spawn.nnodes",
            spawn.nnodes,
            "running on several nodes is not there yet in this version of kvquay",
            "plan it with action=plan, or run on one node",
        )
    if 1 <= spawn.nnodes <= spawn.node_rank:
        limit = f"must be less than spawn.nnodes = {spawn.nnodes}"
        yield Problem("spawn.node_rank", spawn.node_rank, limit, "number nodes from 0")
    if topology is None:
        return
    workers = topology.workers_per_node
    devices = spawn.devices
    if devices is not None and len(devices) != workers:
        yield Problem(
            "spawn.devices",
            list(devices),
            f"must name one device for each of the {workers} workers on a node",
            f"name {workers} devices, or leave it out",
        )
    yield from check_ports(config, topology)


def _settings(config: Config) -> Iterator[Problem]:
    """Settings of one group that do not go together."""
    devices = config.spawn.devices
    if devices and (len(set(devices)) != len(devices) or min(devices) < 0):
        yield Problem(
            "spawn.devices",
            list(devices),
            "must be different numbers of at least 0",
            "give every worker a device of its own",
        )
    region = config.region
    if region.persist_name and region.backing == "memfd":
        yield Problem(
            "region.persist_name",
            True,
            "cannot hold with region.backing=memfd: such a region has no name to keep",
            "set region.backing=shm, or region.persist_name=false",
        )
    engine = config.engine
    kernels = CUDA_KERNELS if engine.device == "cuda" else CPU_KERNELS
    if engine.copy_kernel in CPU_KERNELS + CUDA_KERNELS and engine.copy_kernel not in kernels:
        yield Problem(
            "engine.copy_kernel",
            engine.copy_kernel,
            f"is not for engine.device={engine.device}, which has {', '.join(kernels)}",
            "set engine.copy_kernel=auto",
        )


def _devices(config: Config, topology: Topology | None) -> Iterator[Problem]:
    if config.engine.device != "cuda":
        return
    count = machine.cuda_device_count()
    named = config.spawn.devices
    if count == 0:
        limit = "this machine has no CUDA device"
        yield Problem("engine.device", "cuda", limit, "set engine.device=cpu")
    elif named and max(named) >= count:
        limit = f"this machine has {count} CUDA devices, numbered from 0"
        yield Problem("spawn.devices", list(named), limit, "name devices that exist")
    elif topology is not None and topology.workers_per_node > count:
        yield Problem(
            "engine.device",
            "cuda",
            f"this machine has {count} CUDA devices; {topology.data_parallel_size_local} replicas "
            f"x {topology.local_world_size} workers need {topology.workers_per_node}",
            "make an axis smaller, or set engine.device=cpu",
        )


def _units(config: Config, topology: Topology) -> Iterator[Problem]:
    engine = config.engine
    context = topology.pcp_size * topology.dcp_size
    blocks = declared_blocks(config)
    if min(blocks) < 1:
        return
    block = gcd(*blocks)
    logical = block * context
    unit = engine.tokens_per_hash
    if unit and unit > 0 and logical % unit:
        spread = f" x PCP x DCP = {context}" if context > 1 else ""
        named = "engine.tokens_per_block"
        if set(blocks) != {engine.tokens_per_block}:
            named = "what the blocks of all KV-cache groups have in common"
        yield Problem(
            "engine.tokens_per_hash",
            unit,
            f"must divide a logical block of {named} = {block}{spread} = {logical} tokens",
            f"leave it out for {logical}, or choose a divisor",
        )
    logical = max(blocks) * context
    chunk = logical * config.region.blocks_per_chunk
    if 0 < engine.max_tokens_per_step < chunk:
        yield Problem(
            "engine.max_tokens_per_step",
            engine.max_tokens_per_step,
            f"must hold at least one chunk of {chunk} tokens (region.blocks_per_chunk = "
            f"{config.region.blocks_per_chunk} blocks of {logical} tokens)",
            f"set engine.max_tokens_per_step={chunk} or make region.blocks_per_chunk smaller",
        )


def _workload(config: Config, topology: Topology) -> Iterator[Problem]:
    spec = workload_spec(config.workload, cache_config(config, topology))
    for name, message in check_workload(spec):
        key = "engine.tokens_per_hash" if name == "tokens_per_hash" else f"workload.{name}"
        limit, _, fix = message.partition("; ")
        yield Problem(key, None, limit, fix or f"set {key} to such a value")


def _lower_tiers(
    config: Config, object_given: bool, on_this_machine: bool, environment: Mapping[str, str]
) -> Iterator[Problem]:
    """Settings of the tiers under the region, as each tier itself checks them; then what they need
    of this machine."""
    for name, given in lower_tiers(config).items():
        if name == object_store.NAME:
            missing = object_store.check_missing(given) if object_given else []
            yield from missing
            if missing or not object_given:
                continue
        try:
            settings = TierRegistry().find(name).settings(given)
        except SettingsError as error:
            for found in error.problems:
                key = ".".join(filter(None, ("tiers.stack", name, found.key)))
                yield Problem(key, found.value, found.expected, found.fix)
        else:
            if name == "fs" and on_this_machine:
                yield from _disks("tiers.stack.fs", settings.paths, settings.capacity)
            if name == object_store.NAME:
                yield from _apart(config, settings)
            if name == object_store.NAME and on_this_machine:
                yield from object_store.check_credentials(settings, environment)
                if settings.scheme == "file":
                    room = settings.capacity_bytes or 0
                    yield from _disks(object_store.KEY, [settings.prefix], room, "url")


def _apart(config: Config, settings: ObjectSettings) -> Iterator[Problem]:
    """Objects in a directory of the filesystem tier would count twice, and be swept by it."""
    if settings.scheme != "file" or "fs" not in config.tiers.order:
        return
    own = Path(settings.prefix)
    for path in map(Path, map(os.path.abspath, config.tiers.stack.fs.paths)):
        if own.is_relative_to(path) or path.is_relative_to(own):
            yield Problem(
                object_store.URL_KEYS[0],
                settings.url,
                f"is {path} of tiers.stack.fs.paths, or one is inside the other",
                "give each of both tiers a directory of its own",
            )


def _edges(config: Config) -> Iterator[Problem]:
    """What moves between the tiers, as the stack itself checks it."""
    try:
        stack_settings(config, tokens_per_entry=1)
    except ConfigError as error:
        limit, _, fix = str(error).partition("; ")
        name = limit.split()[0]
        key = f"tiers.{name if hasattr(config.tiers, name) else 'edges'}"
        yield Problem(key, None, limit, fix or f"change {key}")


def _affinity(config: Config, topology: Topology | None) -> Iterator[Problem]:
    """A path for a replica that no node has would be passed over without a word."""
    if topology is None or "fs" not in config.tiers.order:
        return
    local = topology.data_parallel_size_local
    for rank, path in config.tiers.stack.fs.affinity.items():
        if not 0 <= rank < local:
            yield Problem(
                f"tiers.stack.fs.affinity.{rank}",
                path,
                f"names no replica: data_parallel_rank_local is 0 to {local - 1} on a node",
                "leave it out, or change parallel.data_parallel_size",
            )


def _disks(
    tier: str, paths: Sequence[str], capacity_bytes: int, name: str = "paths"
) -> Iterator[Problem]:
    """Each path, or the nearest directory above it that exists: can it be written, is it a place
    for its share of the capacity? `tier` and `name` are the key's."""
    key = f"{tier}.{name}"
    more = "more paths" if name == "paths" else "another directory"
    for path in map(Path, paths):
        there = next((p for p in (path, *path.parents) if p.exists()), path)
        if not there.is_dir():
            yield Problem(key, str(path), f"{there} is not a directory", "name a directory")
        elif not os.access(there, os.W_OK | os.X_OK):
            limit = f"{there} cannot be written by this user"
            yield Problem(key, str(path), limit, "name a directory that this user may write to")
        else:
            share = capacity_bytes // len(paths)
            room = os.statvfs(there)
            if room.f_blocks * room.f_frsize < share:
                yield Problem(
                    f"{tier}.capacity",
                    format_size(capacity_bytes),
                    f"{path} is on a disk of {format_size(room.f_blocks * room.f_frsize)}, its "
                    f"share is {format_size(share)}",
                    f"make {tier}.capacity smaller, or name {more}",
                )


def _run_dir(run_dir: Path) -> Iterator[Problem]:
    """The run directory exists (Hydra made it): can it be written, and is there room?"""
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        room = os.statvfs(run_dir)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        yield Problem(
            "hydra.run.dir", str(run_dir), reason, "choose another with hydra.run.dir=PATH"
        )
        return
    free = room.f_bavail * room.f_frsize
    if free < RUN_DIR_BYTES:
        limit = f"has {format_size(free)} free, logs and reports want {format_size(RUN_DIR_BYTES)}"
        yield Problem("hydra.run.dir", str(run_dir), limit, "make room, or set hydra.run.dir=PATH")


def _shards(
    config: Config,
    topology: Topology,
    model: ModelConfig,
    groups: tuple[KvGroup, ...],
    sizes_hold: bool,
    on_this_machine: bool,
) -> list[Problem]:
    """Can the model be divided over the ranks, and do its parts fit into what was declared?"""
    problems = [Problem(*finding) for finding in check_sharding(groups, topology)]
    problems += check_windows(config, groups)
    if sizes_hold:
        found = check_blocks(groups, cache_config(config, topology))
        problems += [Problem(*finding) for finding in found]
    if sizes_hold and not problems:
        shape = geometry(config, topology, model, groups)
        problems += _geometry(config, model, groups, topology, shape)
        if on_this_machine and not problems:
            problems += _huge_pages(config, topology, shape)
            problems += check_index_room(config, topology, shape.rows)
    return problems


def _geometry(
    config: Config,
    model: ModelConfig,
    groups: tuple[KvGroup, ...],
    topology: Topology,
    shape: Geometry,
) -> Iterator[Problem]:
    needed = len(columns(groups, cache_config(config, topology), topology))
    if shape.rows < needed:
        least = 2 * 4096 + shape.slot_bytes * shape.slots_per_row
        yield Problem(
            "region.size",
            config.region.size,
            f"holds {shape.rows} rows of {format_size(least)}, at least {needed} are needed "
            "(one a chunk of each KV-cache group)",
            f"set region.size={-(-least * needed * 2 // 2**20)}MiB or more, or make "
            "region.blocks_per_chunk smaller",
        )
    if shape.device_blocks < config.region.blocks_per_chunk:
        block = shape.unit_bytes
        least_mib = -(-block * config.region.blocks_per_chunk // 2**20)
        yield Problem(
            "engine.device_cache_size",
            config.engine.device_cache_size,
            f"holds {shape.device_blocks} blocks of {format_size(block)} a rank, less than one "
            f"chunk of {config.region.blocks_per_chunk}",
            f"set engine.device_cache_size={least_mib}MiB or more (it is per rank)",
        )
    for group in groups:
        head_bytes = group.head_size * model.itemsize_bytes
        if head_bytes % 8:
            yield Problem(
                "model.head_size",
                group.head_size,
                f"a head of group {group.name!r} has {head_bytes} bytes; the reference engine "
                "needs a multiple of 8",
                "choose a head size or dtype whose product is a multiple of 8 bytes",
            )


def _huge_pages(config: Config, topology: Topology, shape: Geometry) -> Iterator[Problem]:
    if config.region.huge_pages != "require":
        return
    from backends.region import hugepages  # loads ctypes; seldom needed

    row_bytes = row_bytes_for(shape.slot_bytes, shape.slots_per_row)
    nbytes = HEADER_BYTES + shape.rows * row_bytes
    try:
        hugepages.plan("require", nbytes, config.region.backing, machine.huge_pages())
    except RegionError as error:
        limit, _, fix = str(error).partition(". ")
        limit = limit.removeprefix("huge_pages is 'require', but ")
        yield Problem("region.huge_pages", "require", limit, fix or "set region.huge_pages=try")


def _memory(config: Config, topology: Topology) -> Iterator[Problem]:
    """What this node's replicas ask of its memory together, against what it has."""
    local = topology.data_parallel_size_local
    region = parse_size(config.region.size)
    cache = parse_size(config.engine.device_cache_size)
    workers = topology.workers_per_node
    first = config.spawn.node_rank * local
    elsewhere = (
        "; to plan for another machine set spawn.check_machine=false"
        if config.action == "plan"
        else ""
    )
    requests = [(f"dp{index}", region) for index in range(first, first + local)]
    space = check_node_space(requests, config.region.backing)
    for problem in space:
        message, _, hint = str(problem).partition(". What to do: ")
        hint = hint or "make region.size or parallel.data_parallel_size smaller, or use more nodes"
        yield Problem("region.size", config.region.size, message, hint + elsewhere)
    caches = 0 if config.engine.device == "cuda" else cache * workers
    processes = workers * (process_bytes(config) or WORKER_BYTES)
    if config.spawn.kind == "inline":
        processes = 0
    limit = machine.tightest_memory_limit()
    usable = max(0, limit.available_bytes - headroom_bytes(limit.limit_bytes))
    asked = region * local + caches + processes
    if asked > usable and not space:
        yield Problem(
            "engine.device_cache_size",
            config.engine.device_cache_size,
            f"this node needs {format_size(asked)} of memory: {local} regions of "
            f"{format_size(region)}, {workers} device caches of {format_size(cache)} and "
            f"{format_size(processes)} for the workers' processes; {format_size(usable)} can be "
            "used",
            "make region.size (per replica), engine.device_cache_size (per rank) or an axis "
            f"smaller{elsewhere}",
        )


def _files(config: Config, topology: Topology) -> Iterator[Problem]:
    workers = topology.workers_per_node
    files = FILES_OF_LAUNCHER + FILES_PER_WORKER * workers
    if files > machine.open_files_limit():
        yield Problem(
            "parallel.tensor_parallel_size",
            config.parallel.tensor_parallel_size,
            f"{workers} workers on a node need about {files} open files, the limit is "
            f"{machine.open_files_limit()}",
            "raise it with `ulimit -n`, or use more nodes",
        )
