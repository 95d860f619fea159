"""The frozen configuration that backends receive: who this worker is, and what a block is.

Every object here is complete and checked when it is made; nothing is read from the environment.
Words and units follow the field: a *block* is the engine's paging unit, a *chunk* is
`blocks_per_chunk` blocks and the unit that is offloaded, a *row* is a chunk's place in a region.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.errors import ConfigError

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
BLOCK_FORMAT_VERSION = 1  # of a stored block, see `backends.block`
GROUP_KINDS = ("full", "sliding_window", "mla")


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one KV-cache kind and geometry, in global (unsharded) terms.

    `layers` are global layer indices. `kv_heads` is the model's number of KV heads (1 for MLA),
    `head_size` the elements of one head's vector (for MLA: latent plus decoupled RoPE elements),
    `planes` is 2 where K and V are kept and 1 for MLA. `sliding_window` is in tokens, None where
    attention is full. `tokens_per_block` is the group's own block, None where it is the cache's.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    head_size: int
    planes: int
    sliding_window: int | None = None
    tokens_per_block: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ConfigError(f"group {self.name!r}: kind is {self.kind!r}, expected {GROUP_KINDS}")
        if self.planes not in (1, 2):
            raise ConfigError(f"group {self.name!r}: planes is {self.planes}, expected 1 or 2")
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"group {self.name!r}: layers must be distinct and not empty")
        if min(self.kv_heads, self.head_size) < 1:
            raise ConfigError(f"group {self.name!r}: kv_heads and head_size must be at least 1")
        if self.tokens_per_block is not None and self.tokens_per_block < 1:
            raise ConfigError(f"group {self.name!r}: tokens_per_block must be at least 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What of the model decides the bytes of a block."""

    name: str
    revision: str
    dtype: str
    num_layers: int

    @property
    def itemsize_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Paging and hashing units.

    `tokens_per_block` counts the tokens that ONE worker's block holds, in groups that have no block
    of their own; with context parallelism a logical block covers `tokens_per_block x pcp x dcp`
    tokens of the sequence. `tokens_per_hash` counts tokens of the sequence and divides a logical
    block of every group.
    """

    tokens_per_block: int
    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Where this worker stands: every field is required.

    `data_parallel_rank_local` may be None only where it is truly unknown. `world_size` counts the
    workers of ONE replica (PP x PCP x TP); data parallelism is never in it. `local_rank` is the
    index in the node-local subgroup of the replica's process group; the worker's slot follows from
    it, see `backends.layout.rank_slots`.
    """

    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int | None
    data_parallel_size_local: int
    node_rank: int
    nnodes: int
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        product = self.pp_size * self.pcp_size * self.tp_size
        if product != self.world_size:
            raise ConfigError(
                f"world_size is {self.world_size}, but PP x PCP x TP = {self.pp_size} x "
                f"{self.pcp_size} x {self.tp_size} = {product}"
            )
        if self.tp_size % self.dcp_size:
            raise ConfigError(f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}")
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
            ("data_parallel_index", self.data_parallel_index, self.data_parallel_size),
            ("node_rank", self.node_rank, self.nnodes),
        ):
            if not 0 <= value < size:
                raise ConfigError(f"{name} is {value}, expected 0 <= {name} < {size}")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pcp_rank(self) -> int:
        return self.rank // self.tp_size % self.pcp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp_size * self.pcp_size)

    @property
    def dcp_rank(self) -> int:
        """DCP groups are consecutive TP ranks."""
        return self.tp_rank % self.dcp_size

    @property
    def cp_size(self) -> int:
        """Workers over which one sequence's tokens are spread."""
        return self.pcp_size * self.dcp_size

    @property
    def cp_rank(self) -> int:
        return self.pcp_rank * self.dcp_size + self.dcp_rank


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """All that a backend is told.

    `worker_bytes_per_block` holds, per group, the bytes that this worker keeps of one block (0
    where a pipeline stage has no layer of the group). `layout` is `layers_first` (one tensor a
    layer) or `blocks_first` (one tensor with every layer of a block side by side).
    """

    engine_id: str
    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    groups: tuple[KvGroup, ...]
    worker_bytes_per_block: tuple[int, ...]
    layout: str
