"""Everything that can be known before a process starts, checked in one place, told all at once.

Needs no GPU, imports no torch, creates nothing. `validate` returns what the planner needs or raises
`ConfigProblems` with every problem that was found.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from backends import machine
from backends.config import KvGroup, ModelConfig
from backends.layout import check_sharding
from backends.region.space import check_node_space, headroom_bytes
from backends.region.spec import BACKINGS, HUGE_PAGES
from orchestrator.model import check_model, resolve_model
from orchestrator.overrides import NOT_YET, not_yet
from orchestrator.plan import Geometry, cache_config, geometry
from orchestrator.problems import ConfigProblems, Problem, did_you_mean
from orchestrator.schema import Config
from orchestrator.topology import Topology, check_topology
from orchestrator.units import format_size, parse_size
from orchestrator.workload.check import check as check_workload
from orchestrator.workloads import workload_spec

ACTIONS = ("run", "plan", "clean")
VIEWS = ("auto", "plain", "quiet")
WORKER_BYTES = 150 << 20
"""What a worker process needs beside its KV, measured: resident size that forks do not share."""
RUN_DIR_BYTES = 64 << 20
FILES_PER_WORKER = 6
FILES_OF_LAUNCHER = 64

CHOICES: dict[str, tuple[Callable[[Config], str], tuple[str, ...]]] = {
    "action": (lambda c: c.action, ACTIONS),
    "view": (lambda c: c.view, VIEWS),
    "region.backing": (lambda c: c.region.backing, BACKINGS),
    "region.huge_pages": (lambda c: c.region.huge_pages, HUGE_PAGES),
    "region.numa": (lambda c: c.region.numa, ("auto", "off")),
    "region.pin": (lambda c: c.region.pin, ("auto", "off")),
    "tiers.stack.shm.eviction": (lambda c: c.tiers.stack.shm.eviction, ("lru",)),
    "engine.kind": (lambda c: c.engine.kind, ("reference",)),
    "engine.device": (lambda c: c.engine.device, ("cpu", "cuda")),
    "engine.layout": (lambda c: c.engine.layout, ("layers_first", "blocks_first")),
    "engine.verify": (lambda c: c.engine.verify, ("all", "sample", "off")),
    "spawn.kind": (lambda c: c.spawn.kind, ("torchrun", "inline")),
    "spawn.scope": (lambda c: c.spawn.scope, ("replica",)),
    "spawn.start_method": (lambda c: c.spawn.start_method, ("auto", "fork", "spawn")),
    "spawn.on_failure": (lambda c: c.spawn.on_failure, ("stop", "continue")),
}

SIZES: dict[str, Callable[[Config], str]] = {
    "region.size": lambda c: c.region.size,
    "engine.device_cache_size": lambda c: c.engine.device_cache_size,
}

# key → (value, smallest that is allowed)
MINIMA: dict[str, tuple[Callable[[Config], float | None], float]] = {
    "region.blocks_per_chunk": (lambda c: c.region.blocks_per_chunk, 1),
    "engine.tokens_per_block": (lambda c: c.engine.tokens_per_block, 1),
    "engine.tokens_per_hash": (lambda c: c.engine.tokens_per_hash, 1),
    "engine.max_tokens_per_step": (lambda c: c.engine.max_tokens_per_step, 1),
    "engine.copy_threads": (lambda c: c.engine.copy_threads, 1),
    "spawn.node_rank": (lambda c: c.spawn.node_rank, 0),
    "spawn.devices_per_node": (lambda c: c.spawn.devices_per_node, 1),
    "spawn.start_timeout_s": (lambda c: c.spawn.start_timeout_s, 1),
    "spawn.group_timeout_s": (lambda c: c.spawn.group_timeout_s, 1),
    "spawn.stop_timeout_s": (lambda c: c.spawn.stop_timeout_s, 0),
}


@dataclass(frozen=True, slots=True)
class Validated:
    """What is known of a configuration with which nothing is wrong."""

    topology: Topology
    model: ModelConfig
    groups: tuple[KvGroup, ...]


def validate(config: Config, run_dir: Path) -> Validated:
    """Check a configuration against itself and against this machine.

    Raises ConfigProblems with all that was found.
    """
    problems = [*_choices(config), *_sizes(config), *_minima(config), *_tiers(config)]
    problems += [Problem(*finding) for finding in check_model(config.model)]
    topology, found = _topology(config)
    problems += found
    problems += _spawn(config, topology)
    if topology is not None:
        problems += _units(config, topology)
    if problems or topology is None:
        raise ConfigProblems(problems + _workload(config, topology))

    model, groups = resolve_model(config.model)
    problems += [Problem(*finding) for finding in check_sharding(groups, topology)]
    problems += _workload(config, topology)
    if config.spawn.check_machine:
        problems += _run_dir(run_dir)
    if not any(problem.key.startswith("parallel.") for problem in problems):
        shape = geometry(config, topology, model, groups)
        problems += _geometry(config, model, groups, topology, shape)
        if config.spawn.check_machine:
            problems += _machine(config, topology)
    if problems:
        raise ConfigProblems(problems)
    return Validated(topology, model, groups)


def _choices(config: Config) -> Iterator[Problem]:
    for key, (read, known) in CHOICES.items():
        value = read(config)
        if value in known:
            continue
        if value in NOT_YET.get(key, ()):
            yield not_yet(key, value)
        else:
            hint = did_you_mean(value, known)
            yield Problem(key, value, f"must be one of {', '.join(known)}", hint)


def _sizes(config: Config) -> Iterator[Problem]:
    for key, read in SIZES.items():
        try:
            if parse_size(read(config)) < 1:
                yield Problem(key, read(config), "must be more than 0", f"set {key}=256MiB, say")
        except ValueError as error:
            yield Problem(key, read(config), str(error), f"write it like {key}=256MiB")


def _minima(config: Config) -> Iterator[Problem]:
    for key, (read, smallest) in MINIMA.items():
        value = read(config)
        if value is not None and not value >= smallest:  # a NaN is not
            yield Problem(key, value, f"must be at least {smallest}", f"set {key}={smallest}")


def _tiers(config: Config) -> Iterator[Problem]:
    order = config.tiers.order
    for name in order:
        if name in NOT_YET["tiers.order"]:
            yield not_yet("tiers.order", name)
        elif name != "shm":
            yield Problem("tiers.order", name, "is not a tier", did_you_mean(name, ["shm"]))
    if not order or (order[0] != "shm" and "shm" in order):
        yield Problem("tiers.order", list(order), "must begin with 'shm'", "set tiers.order=[shm]")
    if len(set(order)) != len(order):
        yield Problem("tiers.order", list(order), "names a tier twice", "name each tier once")


def _topology(config: Config) -> tuple[Topology | None, list[Problem]]:
    parallel, spawn = config.parallel, config.spawn
    devices = spawn.devices_per_node
    if devices is None and config.engine.device == "cuda" and spawn.check_machine:
        devices = machine.cuda_device_count()
    topology, problems = check_topology(
        data_parallel_size=parallel.data_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        nnodes=parallel.nodes,
        devices_per_node=devices,
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
    if spawn.nnodes >= 1 and spawn.node_rank >= spawn.nnodes:
        limit = f"must be less than spawn.nnodes = {spawn.nnodes}"
        yield Problem("spawn.node_rank", spawn.node_rank, limit, "number nodes from 0")
    if topology is None:
        return
    workers = topology.workers_per_node
    devices = spawn.devices
    if devices is not None:
        if len(devices) != workers:
            yield Problem(
                "spawn.devices",
                list(devices),
                f"must name one device for each of the {workers} workers on a node",
                f"name {workers} devices, or leave it out",
            )
        if len(set(devices)) != len(devices) or any(device < 0 for device in devices):
            yield Problem(
                "spawn.devices",
                list(devices),
                "must be different numbers of at least 0",
                "give every worker a device of its own",
            )
        if config.engine.device == "cuda" and spawn.check_machine and devices:
            count = machine.cuda_device_count()
            if max(devices) >= count:
                limit = f"this machine has {count} CUDA devices, numbered from 0"
                yield Problem("spawn.devices", list(devices), limit, "name devices that exist")
    local = topology.data_parallel_size_local
    last = spawn.rdzv_port + topology.data_parallel_size - 1
    if spawn.rdzv_port and not 1 <= spawn.rdzv_port <= last <= 65535:
        yield Problem(
            "spawn.rdzv_port",
            spawn.rdzv_port,
            f"each replica takes one port: {spawn.rdzv_port} to {last} must lie in 1 to 65535",
            "set spawn.rdzv_port=0 and let the system choose free ones",
        )
    elif spawn.rdzv_port and spawn.check_machine:
        first = spawn.rdzv_port + spawn.node_rank * local
        busy = [port for port in range(first, first + local) if not _port_is_free(port)]
        if busy:
            yield Problem(
                "spawn.rdzv_port",
                spawn.rdzv_port,
                f"ports in use on this machine: {', '.join(map(str, busy))}",
                "choose other ports, or spawn.rdzv_port=0 to let the system choose",
            )


def _port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _units(config: Config, topology: Topology) -> Iterator[Problem]:
    engine = config.engine
    context = topology.pcp_size * topology.dcp_size
    logical = engine.tokens_per_block * context
    unit = engine.tokens_per_hash
    if unit and unit > 0 and logical % unit:
        spread = f" x PCP x DCP = {context}" if context > 1 else ""
        yield Problem(
            "engine.tokens_per_hash",
            unit,
            f"must divide a logical block of engine.tokens_per_block = {engine.tokens_per_block}"
            f"{spread} = {logical} tokens",
            f"leave it out for {logical}, or choose a divisor",
        )
    chunk = logical * config.region.blocks_per_chunk
    if 0 < engine.max_tokens_per_step < chunk:
        yield Problem(
            "engine.max_tokens_per_step",
            engine.max_tokens_per_step,
            f"must hold at least one chunk of {chunk} tokens (region.blocks_per_chunk = "
            f"{config.region.blocks_per_chunk} blocks of {logical} tokens)",
            f"set engine.max_tokens_per_step={chunk} or make region.blocks_per_chunk smaller",
        )


def _workload(config: Config, topology: Topology | None) -> Iterable[Problem]:
    if topology is None or config.engine.tokens_per_block < 1:
        return []
    spec = workload_spec(config.workload, cache_config(config, topology))
    problems = []
    for name, message in check_workload(spec):
        key = "engine.tokens_per_hash" if name == "tokens_per_hash" else f"workload.{name}"
        limit, _, fix = message.partition("; ")
        problems.append(Problem(key, None, limit, fix or f"set {key} to such a value"))
    return problems


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


def _geometry(
    config: Config,
    model: ModelConfig,
    groups: tuple[KvGroup, ...],
    topology: Topology,
    shape: Geometry,
) -> Iterator[Problem]:
    if shape.rows < len(groups):
        least = 2 * 4096 + shape.slot_bytes * topology.local_world_size
        yield Problem(
            "region.size",
            config.region.size,
            f"holds {shape.rows} rows of {format_size(least)}, at least {len(groups)} are needed "
            "(one a KV-cache group)",
            f"set region.size={-(-least * len(groups) * 2 // 2**20)}MiB or more, or make "
            "region.blocks_per_chunk smaller",
        )
    if shape.device_blocks < config.region.blocks_per_chunk:
        block = max(map(sum, shape.worker_bytes_per_block))
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


def _machine(config: Config, topology: Topology) -> Iterator[Problem]:
    """This node's share against what this node has."""
    local = topology.data_parallel_size_local
    region = parse_size(config.region.size)
    cache = parse_size(config.engine.device_cache_size)
    workers = topology.workers_per_node
    first = config.spawn.node_rank * local
    requests = [(f"dp{index}", region) for index in range(first, first + local)]
    space = check_node_space(requests, config.region.backing)
    for problem in space:
        yield Problem(
            "region.size",
            config.region.size,
            str(problem),
            "make region.size or parallel.data_parallel_size smaller, or use more nodes",
        )
    caches = 0 if config.engine.device == "cuda" else cache * workers
    processes = 0 if config.spawn.kind == "inline" else WORKER_BYTES * workers
    limit = machine.tightest_memory_limit()
    usable = max(0, limit.available_bytes - headroom_bytes(limit.limit_bytes))
    asked = region * local + caches + processes
    if asked > usable and not space:
        yield Problem(
            "engine.device_cache_size",
            config.engine.device_cache_size,
            f"this node needs {format_size(asked)} of memory: {local} regions of "
            f"{format_size(region)}, {workers} device caches of {format_size(cache)} and "
            f"{format_size(processes)} for the workers' processes; {format_size(usable)} can be used",
            "make engine.device_cache_size (per rank), region.size (per replica) or an axis smaller",
        )
    files = FILES_OF_LAUNCHER + FILES_PER_WORKER * workers
    if files > machine.open_files_limit():
        yield Problem(
            "parallel.tensor_parallel_size",
            config.parallel.tensor_parallel_size,
            f"{workers} workers on a node need about {files} open files, the limit is "
            f"{machine.open_files_limit()}",
            "raise it with `ulimit -n`, or use more nodes",
        )
    if config.engine.device == "cuda" and machine.cuda_device_count() == 0:
        yield Problem(
            "engine.device", "cuda", "this machine has no CUDA device", "set engine.device=cpu"
        )
