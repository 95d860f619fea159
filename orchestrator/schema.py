"""The types and legal keys of the configuration. YAML under `conf/` gives the values.

Each class is one Hydra config group. Nothing here checks a value (see `validate`), and nothing
imports Hydra (see `compose`) or torch: workers read these types back from a plan. Choices are plain
strings: the validator reports them with a suggestion, all of them at once.

A `*_size` in this file is a number of ranks; a size in bytes is text as people write it
(`8GiB`), and the comment behind it says whether it is per rank, per replica or per node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from orchestrator.model import ModelConf

# OmegaConf 2.3 resolves `X | None` only on Python 3.10+, and Hydra's error texts quote the
# annotation; Optional keeps both readable.
# ruff: noqa: UP045


@dataclass(frozen=True)
class ParallelConf:
    """Axes of the deployment. Workers of one replica = PP x PCP x TP; DCP divides TP."""

    data_parallel_size: int = 2
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    tensor_parallel_size: int = 2
    decode_context_parallel_size: int = 1
    nodes: int = "${spawn.nnodes}"  # type: ignore[assignment]  # an interpolation


@dataclass(frozen=True)
class ShmTierConf:
    """The primary tier: the region itself."""

    eviction: str = "lru"
    admission: str = "all"


@dataclass(frozen=True)
class FsTierConf:
    """The filesystem tier; `backends.tier.filesystem.settings` says what each setting means."""

    paths: list[str] = field(default_factory=lambda: ["kvcache"])
    capacity: str = "4GiB"  # of all paths, for all replicas together
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    durability: str = "none"
    threads: int = 8
    queue_blocks: int = 1024
    queue_bytes: str = "4GiB"
    placement: str = "shared"
    affinity: dict[int, str] = field(default_factory=dict)  # data_parallel_rank_local: path
    direct: str = "auto"
    bounce: str = "auto"
    verify: bool = True
    quarantine_limit_bytes: str = "256MiB"
    free_reserve_bytes: str = "128MiB"
    probe_interval_s: float = 1.0
    stagger_s: float = 0.05
    touch_interval_s: float = 60.0
    spare_files: int = 64
    lease_blocks: int = 16
    snapshot_interval_s: float = 300.0
    retry_s: float = 0.5
    retry_most_s: float = 30.0
    stuck_s: float = 5.0
    close_timeout_s: float = 10.0


@dataclass(frozen=True)
class ObjectTierConf:
    """The object tier; `backends.tier.object.settings` says what each setting means.

    There is no key for a credential, and none will come: they are taken from the environment.
    """

    url: str = "file:kvcache_objects"
    endpoint: Optional[str] = None
    region: Optional[str] = None
    addressing: str = "path"
    allow_http: bool = False
    ca_bundle: Optional[str] = None
    signed_payload: bool = False
    direct_reads: bool = True
    capacity: str = "unbounded"  # of everything under the url, for all replicas together
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    concurrency: int = 32
    in_flight_bytes: str = "256MiB"  # per replica
    queue_blocks: int = 1024
    queue_bytes: str = "4GiB"
    multipart_threshold: str = "64MiB"
    multipart_part: str = "16MiB"
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 5.0
    request_timeout_s: float = 30.0
    retries: int = 3
    retry_s: float = 0.1
    retry_most_s: float = 2.0
    breaker_failures: int = 5
    breaker_s: float = 1.0
    breaker_most_s: float = 5.0
    placement: str = "shared"
    stagger_s: float = 0.2
    conditional: str = "auto"
    verify: bool = True
    quarantine_limit_bytes: str = "256MiB"
    absent_ttl_s: float = 2.0
    probe_interval_s: float = 0.002
    rescan_s: float = 300.0
    recency_interval_s: float = 60.0
    close_timeout_s: float = 10.0


@dataclass(frozen=True)
class StackConf:
    """Settings of every tier, by name."""

    shm: ShmTierConf = field(default_factory=ShmTierConf)
    fs: FsTierConf = field(default_factory=FsTierConf)
    object: ObjectTierConf = field(default_factory=ObjectTierConf)


@dataclass(frozen=True)
class EdgesConf:
    """When blocks go into each tier from the one above it: `write_through`, `write_on_evict` (from
    the region alone), `write_after_hits:N`, `none`."""

    fs: str = "write_through"
    object: str = "write_through"


@dataclass(frozen=True)
class TiersConf:
    """Which tiers stand under each other, nearest first, and what moves between them.

    `backends.stack.settings` says what the settings that are not of one tier mean.
    """

    order: list[str] = field(default_factory=lambda: ["shm"])
    stack: StackConf = field(default_factory=StackConf)
    edges: EdgesConf = field(default_factory=EdgesConf)
    load_from: str = "fastest"
    promotion_share: float = 0.5  # of a region's rows
    lookup_timeout_s: float = 0.05
    load_timeout_s: float = 2.0
    store_timeout_s: float = 10.0


@dataclass(frozen=True)
class RegionConf:
    """One shared mapping per replica and node."""

    size: str = "256MiB"  # per replica and node
    backing: str = "memfd"
    scope: str = "replica"
    persist_name: bool = False
    blocks_per_chunk: int = 32
    prefault: bool = True
    huge_pages: str = "off"
    numa: str = "auto"
    pin: str = "auto"


@dataclass(frozen=True)
class WorkloadConf:
    """Requests, and which replica takes which."""

    kind: str = "multi_turn"
    policy: str = "prefix_affinity"
    requests: Optional[int] = None
    salt: str = ""
    path: Optional[str] = None
    offset: int = 0
    on_bad_line: str = "error"
    tokens_per_s: float = 20000.0
    max_imbalance: float = 1.5
    seed: int = 0
    conversations: Optional[int] = 24
    turns: float = 4.0
    system_prompts: int = 3
    system_prompt_tokens: int = 1024
    user_tokens: int = 192
    output_tokens: int = 256
    conversations_per_s: float = 4.0
    think_s: float = 2.0
    max_sequence_tokens: Optional[int] = None


@dataclass(frozen=True)
class VllmConf:
    """What a vLLM is told beside what follows from the plan; see docs/vllm.md."""

    port: int = 8000  # of `vllm serve`; this port + data_parallel_index
    load_format: str = "auto"
    max_model_len: Optional[int] = None  # None: the model's own
    max_num_seqs: int = 8
    max_output_tokens: int = 16
    enforce_eager: bool = True
    compare: bool = True  # replay without offload too, and compare the answers
    start_timeout_s: float = 900.0


@dataclass(frozen=True)
class EngineConf:
    """The engine that drives the backends."""

    kind: str = "reference"
    device: str = "cpu"
    tokens_per_block: int = 16  # one worker's block
    tokens_per_hash: Optional[int] = None  # of the sequence; None: one logical block
    device_cache_size: str = "32MiB"  # per rank
    layout: str = "layers_first"
    max_tokens_per_step: int = 8192
    prefill_tokens_per_s: Optional[float] = None  # what loading is weighed against; None: measured
    lockstep: bool = False  # one request at a time over all replicas, tiers at rest in between
    verify: str = "all"
    copy_kernel: str = "auto"
    copy_threads: int = 1
    model: Optional[str] = None  # engine=vllm: directory of a model
    vllm: VllmConf = field(default_factory=VllmConf)


@dataclass(frozen=True)
class SpawnConf:
    """How and where the workers start."""

    kind: str = "torchrun"
    scope: str = "replica"
    nnodes: int = 1
    node_rank: int = 0
    devices_per_node: Optional[int] = None
    devices: Optional[list[int]] = None
    virtual_local_rank: bool = False
    start_method: str = "auto"
    rdzv_port: int = 0  # 0: the system picks a free one; else this port + data_parallel_index
    start_timeout_s: float = 60.0
    group_timeout_s: float = 60.0
    stop_timeout_s: float = 3.0
    on_failure: str = "stop"
    check_machine: bool = True


@dataclass(frozen=True)
class MetricsConf:
    """Prometheus metrics, served by each replica's leader."""

    port: int = 0  # 0: none; else this port + data_parallel_index
    host: str = "127.0.0.1"
    refresh_s: float = 1.0
    linger_s: float = 0.0  # how long the last values may wait for a scrape when a run is over


@dataclass(frozen=True)
class EventsConf:
    """KV events as vLLM publishes them, from each replica's leader."""

    port: int = 0  # 0: none; else this port + data_parallel_index
    replay_port: int = 0  # 0: none; else this port + data_parallel_index
    host: str = "127.0.0.1"
    topic: str = ""
    hashes: str = "int64"
    queue_batches: int = 1024
    replay_batches: int = 10000


@dataclass(frozen=True)
class CleanConf:
    """`action=clean`: a dry run unless `apply` is set."""

    apply: bool = False


@dataclass(frozen=True)
class SimulateConf:
    """`action=simulate`: what a run comes to (`stack`), and which eviction policies are tried on
    its workload, and at which sizes (`policies`)."""

    parts: list[str] = field(default_factory=lambda: ["stack", "policies"])
    doctor: Optional[str] = None  # a doctor.json, for times
    compare: Optional[str] = None  # directory of a run, whose own plan is simulated

    policies: list[str] = field(
        default_factory=lambda: ["lru", "arc", "s3fifo", "sieve", "tinylfu", "prefix_cost"]
    )
    capacities: list[int] = field(default_factory=lambda: [1000, 3000, 10000, 30000])  # chunks
    admission: str = "all"
    tokens_per_chunk: Optional[int] = None  # None: as in a run


@dataclass(frozen=True)
class SweepConf:
    """`python launch.py -m`: what becomes of the other jobs when one fails, and of those that were
    run before."""

    on_failure: str = "continue"
    resume: bool = False


@dataclass(frozen=True)
class Config:
    """Everything `python launch.py` can be told."""

    action: str = "run"
    view: str = "auto"
    parallel: ParallelConf = field(default_factory=ParallelConf)
    tiers: TiersConf = field(default_factory=TiersConf)
    region: RegionConf = field(default_factory=RegionConf)
    model: ModelConf = field(default_factory=ModelConf)
    workload: WorkloadConf = field(default_factory=WorkloadConf)
    engine: EngineConf = field(default_factory=EngineConf)
    spawn: SpawnConf = field(default_factory=SpawnConf)
    metrics: MetricsConf = field(default_factory=MetricsConf)
    events: EventsConf = field(default_factory=EventsConf)
    sweep: SweepConf = field(default_factory=SweepConf)
    clean: CleanConf = field(default_factory=CleanConf)
    simulate: SimulateConf = field(default_factory=SimulateConf)
