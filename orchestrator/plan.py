"""The plan: every rank, device, slot, region, directory, port and byte, before a process starts.

`plan.json` is the one thing that workers read. Its digest covers all that was decided and nothing
that only names this run (run id, run directory, time), so that the same configuration always has
the same digest.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass, replace
from math import gcd
from operator import mul
from pathlib import Path
from typing import Any

import msgspec

from backends import machine
from backends.config import (
    BLOCK_FORMAT_VERSION,
    CacheConfig,
    KvGroup,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
)
from backends.errors import ConfigError, KvquayError
from backends.layout import (
    Column,
    blocks_per_unit,
    columns,
    fingerprint,
    geometry_digest,
    rank_slots,
    replica_worker_groups,
    slot_bytes,
    unit_tokens,
)
from backends.region.node.spec import NodeIndexSpec
from backends.region.numa import replica_node
from backends.region.spec import RegionSpec, rows_for_size
from backends.tier.object.settings import ObjectSettings
from backends.tier.registry import TierRegistry
from backends.units import parse_size
from orchestrator import __version__, object_store
from orchestrator.lower_tiers import lower_tiers
from orchestrator.ports import port_of
from orchestrator.schema import CleanConf, Config, SimulateConf, SweepConf
from orchestrator.topology import Placement, Topology
from orchestrator.workload.hashing import HASH_ALGORITHM

PLAN_FORMAT = 1
DEFAULT_RDZV_PORT = 29400  # torchrun's own


class PlanError(KvquayError):
    """A plan file is missing, damaged, of another version, or not the one that was meant."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker. `device_index` is the accelerator to use, and is used for nothing else."""

    rank: int
    node_rank: int
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    dcp_rank: int
    local_rank: int
    device: str
    device_index: int
    slot: int
    worker_bytes_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One data-parallel engine. `directory` is relative to the run directory. A port is 0 where
    there is no such service."""

    data_parallel_index: int
    data_parallel_rank_local: int
    engine_id: str
    node_ranks: tuple[int, ...]
    region_name: str
    region_bytes: int
    directory: str
    rdzv_endpoint: str
    command: str
    workers: tuple[WorkerPlan, ...]
    metrics_port: int = 0
    events_port: int = 0
    events_replay_port: int = 0


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """What every replica's region on every node looks like. Sizes in bytes.

    `rows` are one pool for all KV-cache groups. `tokens_per_row` are those of an entry, which has a
    row for each of its columns (`backends.layout.columns`): one a group where all blocks are equal.
    `numa_nodes[data_parallel_rank_local]` is the memory node to bind a replica to; None asks for
    nothing, as on a machine with one node. `index_bytes` are those of each node's index of the
    blocks of all its replicas, in /dev/shm, with `region.scope: node`.
    """

    backing: str
    rows: int
    row_bytes: int
    slot_bytes: int
    tokens_per_row: int
    bytes_per_rank: int
    bytes_per_replica: int
    bytes_per_node: int
    geometry_digest: str
    numa_nodes: tuple[int | None, ...]
    index_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What the object tier holds, and where. Sizes in bytes; an object is a row.

    `namespaces` are URLs that the names of all objects begin with, one for each replica where
    replicas are isolated. `upload_requests` is what storing one object takes. Capacities are None
    where `capacity: unbounded` leaves it to `lifecycle`, the command that sets such a rule.
    `million_tokens_objects` and `_bytes` are of a million tokens that nobody has stored before.
    """

    namespaces: tuple[str, ...]
    object_bytes: int
    upload_requests: int
    million_tokens_objects: int
    million_tokens_bytes: int
    capacity_bytes: int | None
    capacity_bytes_per_replica: int | None
    capacity_bytes_per_node: int | None
    capacity_objects: int | None
    lifecycle: str | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What names this run and decides nothing."""

    run_id: str
    run_dir: str
    created_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided."""

    format: int
    version: str
    digest: str
    run: RunInfo
    topology: Topology
    model: ModelConfig
    groups: tuple[KvGroup, ...]
    cache: CacheConfig
    fingerprint: str
    region: RegionPlan
    device_blocks: int
    replicas: tuple[ReplicaPlan, ...]
    settings: Config
    object_store: ObjectPlan | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """Of an entry: each takes a row."""
        return columns(self.groups, self.cache, self.topology)

    @property
    def slots(self) -> int:
        """Of a row. Workers that keep equal bytes share one."""
        return 1 + max(worker.slot for worker in self.replicas[0].workers)

    def parallel_config(self, placement: Placement) -> ParallelConfig:
        return _parallel_config(self.topology, placement)

    def offload_config(self, data_parallel_index: int, rank: int) -> OffloadConfig:
        """What the backends of one worker are told."""
        replica = self.replicas[data_parallel_index]
        return OffloadConfig(
            engine_id=replica.engine_id,
            model=self.model,
            cache=self.cache,
            parallel=self.parallel_config(self.topology.placement(data_parallel_index, rank)),
            groups=self.groups,
            worker_bytes_per_block=replica.workers[rank].worker_bytes_per_block,
            layout=self.settings.engine.layout,
        )

    def node_index(self, data_parallel_index: int) -> NodeIndexSpec | None:
        """The index of a replica's node; None where replicas do not share their regions."""
        if self.settings.region.scope != "node":
            return None
        return node_index_spec(
            self.run.run_id,
            self.topology,
            self.region.rows,
            self.fingerprint,
            self.topology.first_node(data_parallel_index),
        )

    def region_spec(self, data_parallel_index: int) -> RegionSpec:
        settings = self.settings.region
        return RegionSpec(
            engine_id=self.replicas[data_parallel_index].engine_id,
            run_id=self.run.run_id,
            backing=settings.backing,
            rows=self.region.rows,
            slot_bytes=self.region.slot_bytes,
            local_world_size=self.slots,
            geometry_digest=self.region.geometry_digest,
            persist_name=settings.persist_name,
            huge_pages=settings.huge_pages,
            numa_node=self.region.numa_nodes[
                self.replicas[data_parallel_index].data_parallel_rank_local
            ],
        )


@dataclass(frozen=True, slots=True)
class _Stamp:
    """The part of a plan file that every version has."""

    format: int
    version: str


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one replica's workers hold, the same for every replica. Bytes, by rank where a tuple.
    `slots` are numbers, by rank too."""

    slot_bytes: int
    rows: int
    device_blocks: int
    worker_bytes_per_block: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    unit_bytes: int  # the most that a rank keeps of the longest block, over all groups

    @property
    def slots_per_row(self) -> int:
        return 1 + max(self.slots)


def declared_blocks(config: Config) -> tuple[int, ...]:
    """Tokens of a worker's block in each group, or in all of them. A config.json names none."""
    groups = () if config.model.hf_config else config.model.groups
    default = config.engine.tokens_per_block
    return tuple(group.tokens_per_block or default for group in groups) or (default,)


def node_index_spec(
    run_id: str, topology: Topology, rows: int, fingerprint: str = "", node_rank: int = 0
) -> NodeIndexSpec:
    """The index of one node, for regions of `rows` each."""
    replicas = topology.data_parallel_size_local
    return NodeIndexSpec(run_id, node_rank, replicas, rows, fingerprint)


def cache_config(config: Config, topology: Topology) -> CacheConfig:
    """Paging units; a hash covers one logical block, or what blocks of several sizes are all made
    of, unless set."""
    engine = config.engine
    common_tokens = gcd(*declared_blocks(config)) * topology.pcp_size * topology.dcp_size
    return CacheConfig(
        tokens_per_block=engine.tokens_per_block,
        tokens_per_hash=engine.tokens_per_hash or common_tokens,
        blocks_per_chunk=config.region.blocks_per_chunk,
    )


def geometry(
    config: Config, topology: Topology, model: ModelConfig, groups: tuple[KvGroup, ...]
) -> Geometry:
    """Slot, rows and device blocks that the sizes of the configuration come to."""
    cache = cache_config(config, topology)
    held = replica_worker_groups(groups, model, cache, topology)
    per_block = tuple(tuple(group.block_bytes for group in worker) for worker in held)
    slot = slot_bytes(held, cache.blocks_per_chunk)
    local = topology.local_world_size
    if config.engine.kind == "reference":
        slots = rank_slots(groups, topology, local)
    else:
        # Each of its workers copies by itself, and is told of no other.
        slots = tuple(rank % local for rank in range(topology.world_size))
    rows = rows_for_size(parse_size(config.region.size), slot, 1 + max(slots))
    counts = blocks_per_unit(groups, cache)
    largest = max(sum(map(mul, worker, counts)) for worker in per_block)
    return Geometry(
        slot_bytes=slot,
        rows=rows,
        device_blocks=parse_size(config.engine.device_cache_size) // largest,
        worker_bytes_per_block=per_block,
        slots=slots,
        unit_bytes=largest,
    )


def _parallel_config(topology: Topology, placement: Placement) -> ParallelConfig:
    return ParallelConfig(
        rank=placement.rank,
        world_size=topology.world_size,
        tp_size=topology.tp_size,
        pp_size=topology.pp_size,
        pcp_size=topology.pcp_size,
        dcp_size=topology.dcp_size,
        data_parallel_index=placement.data_parallel_index,
        data_parallel_size=topology.data_parallel_size,
        data_parallel_rank_local=placement.data_parallel_rank_local,
        data_parallel_size_local=topology.data_parallel_size_local,
        node_rank=placement.node_rank,
        nnodes=topology.nnodes,
        local_rank=placement.local_rank,
        local_world_size=topology.local_world_size,
    )


def make_plan(
    config: Config,
    topology: Topology,
    model: ModelConfig,
    groups: tuple[KvGroup, ...],
    run: RunInfo,
) -> Plan:
    """Compute the plan of a configuration that `validate` found nothing wrong with."""
    cache = cache_config(config, topology)
    shape = geometry(config, topology, model, groups)
    region = RegionSpec(
        engine_id="plan",
        run_id=run.run_id,
        backing=config.region.backing,
        rows=shape.rows,
        slot_bytes=shape.slot_bytes,
        local_world_size=shape.slots_per_row,
        geometry_digest="0" * 64,
    )
    digest = geometry_digest(
        groups,
        model,
        cache,
        _parallel_config(topology, topology.placement(0, 0)),
        config.engine.layout,
    )
    # Replicas differ by their node and their devices alone; large plans are made fast this way.
    first = tuple(topology.replica(0))
    plan = Plan(
        format=PLAN_FORMAT,
        version=__version__,
        digest="",
        run=run,
        topology=topology,
        model=model,
        groups=groups,
        cache=cache,
        fingerprint=fingerprint(
            groups,
            model,
            cache,
            topology,
            config.engine.layout,
            rope=config.model.rope,
            hash_algorithm=HASH_ALGORITHM,
            format_version=BLOCK_FORMAT_VERSION,
            tenant_salt=config.workload.salt,
        ),
        region=RegionPlan(
            backing=config.region.backing,
            rows=shape.rows,
            row_bytes=region.row_bytes,
            slot_bytes=shape.slot_bytes,
            tokens_per_row=(
                unit_tokens(groups, cache)
                * cache.blocks_per_chunk
                * topology.pcp_size
                * topology.dcp_size
            ),
            bytes_per_rank=shape.rows * shape.slot_bytes,
            bytes_per_replica=region.nbytes * topology.nodes_per_replica,
            bytes_per_node=region.nbytes * topology.data_parallel_size_local,
            geometry_digest=digest,
            numa_nodes=_numa_nodes(config, topology),
            index_bytes=(
                node_index_spec(run.run_id, topology, shape.rows).nbytes
                if config.region.scope == "node"
                else 0
            ),
        ),
        device_blocks=shape.device_blocks,
        replicas=tuple(
            _replica_plan(config, topology, run, index, region.nbytes, shape, first)
            for index in range(topology.data_parallel_size)
        ),
        settings=config,
    )
    plan = replace(plan, object_store=_object_plan(plan))
    return replace(plan, digest=plan_digest(plan))


def _object_plan(plan: Plan) -> ObjectPlan | None:
    given = lower_tiers(plan.settings).get(object_store.NAME)
    if given is None:
        return None
    settings: ObjectSettings = TierRegistry().find(object_store.NAME).settings(given)
    topology, nbytes = plan.topology, plan.region.row_bytes
    replicas = topology.data_parallel_size
    isolated = settings.placement == "per_replica"
    # As `backends.tier.naming.namespace_name` has it, which needs numpy.
    behind = [f"_dp{index}" for index in range(replicas)] if isolated else [""]
    kept = sum(column.reach is None for column in plan.columns)
    objects = -(-1_000_000 // plan.region.tokens_per_row) * max(1, kept)
    capacity = settings.capacity_bytes
    parts = -(-nbytes // settings.multipart_part)
    return ObjectPlan(
        namespaces=tuple(f"{settings.url}/{plan.fingerprint}{suffix}/" for suffix in behind),
        object_bytes=nbytes,
        upload_requests=parts + 2 if nbytes > settings.multipart_threshold else 1,
        million_tokens_objects=objects,
        million_tokens_bytes=objects * nbytes,
        capacity_bytes=capacity,
        capacity_bytes_per_replica=None if capacity is None else capacity // replicas,
        capacity_bytes_per_node=None if capacity is None else capacity // topology.nnodes,
        capacity_objects=None if capacity is None else capacity // nbytes,
        lifecycle=object_store.lifecycle(settings) if capacity is None else None,
    )


def _numa_nodes(config: Config, topology: Topology) -> tuple[int | None, ...]:
    """Memory node of each replica on a node: this machine's, so only where it is the one meant."""
    local = topology.data_parallel_size_local
    if config.region.numa != "auto" or not config.spawn.check_machine:
        return (None,) * local
    nodes = machine.numa_nodes()
    return tuple(replica_node(rank_local, local, nodes) for rank_local in range(local))


def _replica_plan(
    config: Config,
    topology: Topology,
    run: RunInfo,
    index: int,
    region_bytes: int,
    shape: Geometry,
    placements: tuple[Placement, ...],
) -> ReplicaPlan:
    """`placements` are those of replica 0, which stands on node 0."""
    engine_id = f"{run.run_id}_dp{index}"
    rank_local = index % topology.data_parallel_size_local
    first_node = topology.first_node(index)
    first_device = rank_local * topology.local_world_size
    endpoint, local = _rendezvous(config, topology, index)
    prefix = "memfd:" if config.region.backing == "memfd" else "/dev/shm/"
    workers = []
    for placement in placements:
        device_index = first_device + placement.local_rank
        if config.spawn.devices is not None:
            device_index = config.spawn.devices[device_index]
        workers.append(
            WorkerPlan(
                rank=placement.rank,
                node_rank=first_node + placement.node_rank,
                pp_rank=placement.pp_rank,
                pcp_rank=placement.pcp_rank,
                tp_rank=placement.tp_rank,
                dcp_rank=placement.dcp_rank,
                local_rank=placement.local_rank,
                device=config.engine.device,
                device_index=device_index,
                slot=shape.slots[placement.rank],
                worker_bytes_per_block=shape.worker_bytes_per_block[placement.rank],
            )
        )
    return ReplicaPlan(
        data_parallel_index=index,
        data_parallel_rank_local=rank_local,
        engine_id=engine_id,
        node_ranks=tuple(range(first_node, first_node + topology.nodes_per_replica)),
        region_name=f"{prefix}kvquay_{engine_id}",
        region_bytes=region_bytes,
        directory=f"replicas/dp{index}",
        rdzv_endpoint=endpoint,
        command=(
            f"torchrun --nnodes={topology.nodes_per_replica} "
            f"--nproc-per-node={topology.local_world_size} --rdzv-backend=c10d "
            f"--rdzv-endpoint={endpoint} --rdzv-id={engine_id} {local}"
            f"{'--virtual-local-rank ' if config.spawn.virtual_local_rank else ''}"
            f"-m orchestrator.worker --plan {_plan_argument(run)} --replica {index}"
        ),
        workers=tuple(workers),
        metrics_port=port_of(config.metrics.port, index),
        events_port=port_of(config.events.port, index),
        events_replay_port=port_of(config.events.replay_port, index),
    )


def _rendezvous(config: Config, topology: Topology, index: int) -> tuple[str, str]:
    """Endpoint of a replica's rendezvous, and the option that keeps torchrun off the network.

    Port 0 lets the system choose a free one, which a replica on one node can do. Over several
    nodes the endpoint is on the replica's first node, under the name `node<node_rank>`.
    """
    port = config.spawn.rdzv_port + index if config.spawn.rdzv_port else 0
    if topology.nodes_per_replica == 1:
        return f"localhost:{port}", "--local-addr=localhost "
    return f"node{topology.first_node(index)}:{port or DEFAULT_RDZV_PORT}", ""


def _plan_argument(run: RunInfo) -> str:
    """Where a run's plan lies, as it is typed in a shell."""
    return shlex.quote(f"{run.run_dir}/plan.json")


def plan_digest(plan: Plan) -> str:
    """SHA-256 (hex) of the plan without what only names the run or only says what to do with it.

    A run has the digest that `action=plan` told of the same configuration.
    """
    settings = replace(
        plan.settings,
        action="",
        view="",
        sweep=SweepConf(),
        clean=CleanConf(),
        simulate=SimulateConf(),
    )
    # Keys of a mapping may be numbers, but msgspec puts only text in order.
    plain: Any = msgspec.to_builtins(settings, str_keys=True)
    nameless = replace(
        plan,
        digest="",
        run=RunInfo("", "", 0.0),
        replicas=tuple(_nameless(replica, plan.run) for replica in plan.replicas),
        settings=plain,
    )
    return hashlib.sha256(msgspec.json.encode(nameless, order="deterministic")).hexdigest()


def _nameless(replica: ReplicaPlan, run: RunInfo) -> ReplicaPlan:
    command = replica.command.replace(_plan_argument(run), "<plan>")
    return replace(
        replica,
        engine_id=replica.engine_id.replace(run.run_id, "<run_id>"),
        region_name=replica.region_name.replace(run.run_id, "<run_id>"),
        command=command.replace(run.run_id, "<run_id>"),
    )


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file, mode 0600, that is seen whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_plan(plan: Plan, run_dir: Path) -> Path:
    """Write `plan.json` into the run directory and return its path."""
    path = run_dir / "plan.json"
    write_atomic(path, msgspec.json.format(msgspec.json.encode(plan), indent=1))
    return path


def read_plan(path: Path, *, expected_digest: str | None = None) -> Plan:
    """Read `plan.json` back and check that it is whole, ours, and the one that was meant.

    Raises PlanError that says what was found, what was expected and what to do.
    """
    try:
        data = path.read_bytes()
        stamp = msgspec.json.decode(data, type=_Stamp)
        if (stamp.format, stamp.version) != (PLAN_FORMAT, __version__):
            raise PlanError(
                f"{path}: was written by kvquay {stamp.version} (format {stamp.format}), this is "
                f"{__version__} (format {PLAN_FORMAT}); plan again with this version"
            )
        plan = msgspec.json.decode(data, type=Plan)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}; run action=plan") from error
    except (msgspec.DecodeError, ConfigError) as error:
        raise PlanError(
            f"{path}: is not a plan of kvquay {__version__}: {error}; plan again"
        ) from error
    found = plan_digest(plan)
    if found != plan.digest or (expected_digest is not None and found != expected_digest):
        raise PlanError(
            f"{path}: digest is {found}, expected {expected_digest or plan.digest}; the file was "
            "changed after it was planned: plan again instead of editing it"
        )
    return plan
