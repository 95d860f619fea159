"""One replica of a plan, as somebody else's engine needs it: read from `plan.json` or given inline.

The planner decides, and writes down; here the part that backends need is read back, without the
planner. Unknown fields are passed over, missing ones are an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.config import CacheConfig, KvGroup, ModelConfig, OffloadConfig, ParallelConfig
from backends.errors import ConfigError
from backends.layout import Column, block_tokens, geometry_facts
from backends.policy.admission import open_admission
from backends.policy.registry import PolicyRegistry
from backends.region.region import Region
from backends.region.spec import RegionSpec
from backends.stack.headers import RowHeaders
from backends.stack.observer import PRIMARY, Observer
from backends.stack.settings import Edge, StackSettings
from backends.stack.stack import TierStack
from backends.tier.base import Tier, TierContext
from backends.tier.registry import TierRegistry

if TYPE_CHECKING:
    from backends.stack.node import NodeRows

PLAN_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class _Run:
    run_id: str
    run_dir: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """The axes of the deployment; `nnodes` are all its nodes."""

    data_parallel_size: int
    pp_size: int
    pcp_size: int
    tp_size: int
    dcp_size: int
    nnodes: int

    @property
    def world_size(self) -> int:
        return self.pp_size * self.pcp_size * self.tp_size


@dataclass(frozen=True, slots=True)
class _Region:
    rows: int
    row_bytes: int
    slot_bytes: int
    tokens_per_row: int
    geometry_digest: str
    numa_nodes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    node_rank: int
    local_rank: int
    slot: int
    worker_bytes_per_block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Replica:
    data_parallel_index: int
    data_parallel_rank_local: int
    engine_id: str
    node_ranks: tuple[int, ...]
    directory: str
    workers: tuple[_Worker, ...]


@dataclass(frozen=True, slots=True)
class _ModelSettings:
    rope: str


@dataclass(frozen=True, slots=True)
class _RegionSettings:
    backing: str
    persist_name: bool
    prefault: bool
    huge_pages: str
    pin: str


@dataclass(frozen=True, slots=True)
class _EngineSettings:
    layout: str
    copy_threads: int
    copy_kernel: str


@dataclass(frozen=True, slots=True)
class _Tiers:
    order: tuple[str, ...]
    stack: dict[str, dict[str, Any]]
    edges: dict[str, str]
    load_from: str
    promotion_share: float
    lookup_timeout_s: float
    load_timeout_s: float
    store_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Settings:
    model: _ModelSettings
    region: _RegionSettings
    engine: _EngineSettings
    tiers: _Tiers


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan says that backends need."""

    format: int
    version: str
    digest: str
    run: _Run
    topology: Sizes
    model: ModelConfig
    groups: tuple[KvGroup, ...]
    cache: CacheConfig
    fingerprint: str
    region: _Region
    replicas: tuple[_Replica, ...]
    settings: _Settings


@dataclass(frozen=True, slots=True)
class Deployment:
    """Replica `index` of a plan, which may be all that the plan still has."""

    plan: Plan
    index: int

    @property
    def replica(self) -> _Replica:
        return next(r for r in self.plan.replicas if r.data_parallel_index == self.index)

    @property
    def engine_id(self) -> str:
        return self.replica.engine_id

    @property
    def directory(self) -> Path:
        """Where this replica keeps what only its own processes need."""
        return Path(self.plan.run.run_dir) / self.replica.directory

    def offload_config(self, rank: int) -> OffloadConfig:
        """Everything that one worker's backends are told."""
        plan, sizes, replica = self.plan, self.plan.topology, self.replica
        worker = replica.workers[rank]
        return OffloadConfig(
            engine_id=replica.engine_id,
            model=plan.model,
            cache=plan.cache,
            parallel=ParallelConfig(
                rank=rank,
                world_size=sizes.world_size,
                tp_size=sizes.tp_size,
                pp_size=sizes.pp_size,
                pcp_size=sizes.pcp_size,
                dcp_size=sizes.dcp_size,
                data_parallel_index=self.index,
                data_parallel_size=sizes.data_parallel_size,
                data_parallel_rank_local=replica.data_parallel_rank_local,
                data_parallel_size_local=max(1, sizes.data_parallel_size // sizes.nnodes),
                node_rank=worker.node_rank,
                nnodes=sizes.nnodes,
                local_rank=worker.local_rank,
                local_world_size=sizes.world_size // len(replica.node_ranks),
            ),
            groups=plan.groups,
            worker_bytes_per_block=worker.worker_bytes_per_block,
            layout=plan.settings.engine.layout,
        )

    def region_spec(self) -> RegionSpec:
        plan, settings = self.plan, self.plan.settings.region
        return RegionSpec(
            engine_id=self.engine_id,
            run_id=plan.run.run_id,
            backing=settings.backing,
            rows=plan.region.rows,
            slot_bytes=plan.region.slot_bytes,
            local_world_size=1 + max(worker.slot for worker in self.replica.workers),
            geometry_digest=plan.region.geometry_digest,
            persist_name=settings.persist_name,
            huge_pages=settings.huge_pages,
            numa_node=plan.region.numa_nodes[self.replica.data_parallel_rank_local],
        )

    def fingerprint(self, engine_facts: Mapping[str, Any] | None = None) -> bytes:
        """The namespace: what the plan knows decides the bytes, and what only the engine knows,
        where that is anything."""
        if not engine_facts:
            return bytes.fromhex(self.plan.fingerprint)
        return namespace(self.plan.fingerprint, engine_facts)

    def tier_context(self, rows: Any, engine_facts: Mapping[str, Any] | None = None) -> TierContext:
        """What every tier is given. `rows` is the region, or another engine's memory."""
        plan, config = self.plan, self.offload_config(0)
        fingerprint = self.fingerprint(engine_facts)
        engine = {"engine": dict(engine_facts)} if engine_facts else {}
        return TierContext(
            fingerprint=fingerprint,
            manifest={
                "model": asdict(plan.model),
                "geometry": geometry_facts(
                    plan.groups, plan.model, plan.cache, plan.topology, config.layout
                ),
                "rope": plan.settings.model.rope,
                **engine,
                "fingerprint": fingerprint.hex(),
            },
            rows=rows,
            parallel=config.parallel,
            engine_id=self.engine_id,
        )

    def open_tier(self, name: str, context: TierContext) -> Tier:
        entry = TierRegistry().find(name)
        given = self.plan.settings.tiers.stack[name]
        return entry.open(context, entry.settings(given, f"tiers.stack.{name}"))

    def open_stack(
        self,
        region: Region,
        settings: StackSettings | None = None,
        *,
        engine_facts: Mapping[str, Any] | None = None,
        columns: Sequence[Column] | None = None,
        observers: Sequence[Observer] = (),
        node: NodeRows | None = None,
    ) -> TierStack:
        """The replica's stack over its region, its tiers opened. Raises TierError."""
        tiers = list[Tier]()
        context = self.tier_context(region, engine_facts)
        try:
            tiers += (self.open_tier(name, context) for name in self.lower_tiers)
            return self.make_stack(
                region,
                tiers,
                settings,
                engine_facts=engine_facts,
                columns=columns,
                observers=observers,
                node=node,
            )
        except BaseException:
            for tier in tiers:
                tier.close()
            raise

    def make_stack(
        self,
        region: Region | None,
        tiers: Sequence[Tier],
        settings: StackSettings | None = None,
        *,
        engine_facts: Mapping[str, Any] | None = None,
        columns: Sequence[Column] | None = None,
        observers: Sequence[Observer] = (),
        now: Callable[[], float] = time.monotonic,
        node: NodeRows | None = None,
    ) -> TierStack:
        """A stack over opened tiers. `settings` None: those of the plan. `columns` are those of an
        entry that its engine asks for as a whole; None where it names the chunks of each group by
        themselves. Without a region there are no bytes, and `now` may be another clock."""
        plan = self.plan
        if columns is None:
            columns = [Column(group, 0, 1, None) for group in range(len(plan.groups))]
        # Those of windows an entry has for a while only.
        lasting = max(1, sum(column.reach is None for column in columns))
        shm, entries = plan.settings.tiers.stack[PRIMARY], plan.region.rows // lasting
        return TierStack(
            plan.region.rows,
            PolicyRegistry().open(str(shm["eviction"]), entries),
            tiers,
            settings or self.stack_settings,
            groups=len(columns),
            reach=[column.reach for column in columns],
            admission=None
            if shm["admission"] == "all"
            else open_admission(str(shm["admission"]), entries),
            entry_bytes=plan.region.row_bytes * lasting,
            headers=None
            if region is None
            else RowHeaders(
                region.row_headers(), self.fingerprint(engine_facts), self._slot_lengths(columns)
            ),
            now=now,
            observers=observers,
            node=node,
        )

    def _slot_lengths(self, columns: Sequence[Column]) -> list[list[int]]:
        """What each slot of this node's rows keeps of a chunk, by column, in bytes."""
        local = self.plan.topology.world_size // len(self.replica.node_ranks)
        writers = {worker.slot: worker for worker in reversed(self.replica.workers[:local])}
        return [
            [
                writers[slot].worker_bytes_per_block[column.group]
                * self.plan.cache.blocks_per_chunk
                for slot in sorted(writers)
            ]
            for column in columns
        ]

    @property
    def stack_settings(self) -> StackSettings:
        settings = self.plan.settings.tiers
        return StackSettings(
            edges=tuple(Edge.parse(settings.edges[name]) for name in self.lower_tiers),
            load_from=settings.load_from,
            tokens_per_entry=self.plan.region.tokens_per_row,
            lookup_timeout_s=settings.lookup_timeout_s,
            load_timeout_s=settings.load_timeout_s,
            store_timeout_s=settings.store_timeout_s,
            promotion_share=settings.promotion_share,
        )

    def differences(self, found: Mapping[str, Any]) -> list[str]:
        """What an engine's own settings, by name, say otherwise than the plan."""
        plan, sizes = self.plan, self.plan.topology
        context = sizes.pcp_size * sizes.dcp_size
        planned: dict[str, Any] = {
            "engine_id": self.engine_id,
            "workers of a replica": sizes.world_size,
            "tensor_parallel_size": sizes.tp_size,
            "pipeline_parallel_size": sizes.pp_size,
            "prefill_context_parallel_size": sizes.pcp_size,
            "decode_context_parallel_size": sizes.dcp_size,
            "block sizes": [block_tokens(group, plan.cache) * context for group in plan.groups],
            "tokens per hash": plan.cache.tokens_per_hash,
            "blocks_per_chunk": plan.cache.blocks_per_chunk,
            "KV dtype": plan.model.dtype,
        }
        return [
            f"{name} is {value!r} in the engine and {planned[name]!r} in the plan"
            for name, value in found.items()
            if value != planned[name]
        ]

    def other_layers(self, found: Sequence[Sequence[int]]) -> list[str]:
        """Which KV-cache groups of an engine, in their order, do not have the layers that the plan
        gives them. With pipeline stages, an engine may tell the layers of one of them."""
        staged = self.plan.topology.pp_size > 1
        return [
            f"group {index} has layers {list(layers)} in the engine and {list(group.layers)} in "
            "the plan"
            for index, (layers, group) in enumerate(zip(found, self.plan.groups, strict=False))
            if not (staged and set(layers) <= set(group.layers))
            and sorted(layers) != sorted(group.layers)
        ]

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """Names of the tiers under the region, nearest first."""
        return tuple(name for name in self.plan.settings.tiers.order if name != PRIMARY)


def namespace(planned: str, engine_facts: Mapping[str, Any]) -> bytes:
    """32 bytes: under one namespace lies what agrees in the plan's part and in the engine's."""
    text = json.dumps({"plan": planned, "engine": dict(engine_facts)}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def read_plan_file(path: str, sha256: str | None = None) -> Plan:
    """`plan.json`. `sha256` (hex), if given, is what the file was when it was named.

    Raises ConfigError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; plan again") from error
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and sha256 != found:
        raise ConfigError(
            f"{path}: has SHA-256 {found}, expected {sha256}: it was changed since the command was "
            "made; plan and export again instead of editing it"
        )
    try:
        return _checked(msgspec.json.decode(data, type=Plan), path)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is not a plan of kvquay: {error}; plan again") from error


def plan_of(options: Mapping[str, Any]) -> Plan:
    """The same from plain data. Raises ConfigError."""
    try:
        return _checked(msgspec.convert(dict(options), Plan), "the inline plan")
    except msgspec.ValidationError as error:
        raise ConfigError(f"the inline plan is not a plan of kvquay: {error}") from error


def inline_options(plan: Plan) -> dict[str, Any]:
    """What `plan_of` reads, in plain JSON types."""
    plain: dict[str, Any] = msgspec.to_builtins(plan)
    return plain


def _checked(plan: Plan, where: str) -> Plan:
    if plan.format != PLAN_FORMAT:
        raise ConfigError(
            f"{where}: has format {plan.format} (kvquay {plan.version}), expected {PLAN_FORMAT}; "
            "plan again with the kvquay that the engine uses"
        )
    return plan
