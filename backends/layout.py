"""The byte geometry of one worker: which layers, KV heads and tokens of a block it holds.

Pure arithmetic over the frozen configuration, without torch and without a device, so that a plan
of thousands of ranks costs nothing and engine, region and lower tiers cannot disagree about a
byte. A row holds the chunk of ONE key, and a key names one group, so groups never share a row.

What a stack places and evicts is an *entry*: the tokens of the longest chunk of any group. A group
with shorter blocks has several chunks in it. Each chunk of an entry is a *column*, and takes a row.

What follows vLLM, so that its workers and ours agree: pipeline stages as in
`vllm.distributed.utils.get_pp_indices`, KV heads divided or replicated as in
`ModelConfig.get_num_kv_heads`, tokens spread over context-parallel ranks as in the slot mapping
of `vllm/v1/worker/block_table.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from backends.config import CacheConfig, KvGroup, ModelConfig, ParallelConfig
from backends.errors import ConfigError

SLOT_ALIGNMENT_BYTES = 64


class Finding(NamedTuple):
    """One thing that cannot work: dotted key, what it is, what it must be, how to mend it."""

    key: str
    value: Any
    limit: str
    fix: str


class ShardSizes(Protocol):
    """Sizes of the axes that divide a block. A ParallelConfig has them, and so does a topology."""

    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pcp_size(self) -> int: ...
    @property
    def dcp_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One KV group as one worker holds it.

    `layers` are global layer indices on this pipeline stage, in the group's order, and may be
    empty. `heads` are global KV heads, in order. A plane is one layer's K or V (for MLA: its
    latent) of one block: `tokens_per_block x heads x head_size` elements.
    """

    group_index: int
    layers: tuple[int, ...]
    heads: range
    head_size: int
    planes: int
    itemsize_bytes: int
    tokens_per_block: int

    @property
    def plane_bytes(self) -> int:
        return self.tokens_per_block * len(self.heads) * self.head_size * self.itemsize_bytes

    @property
    def layer_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes


def pipeline_layers(num_layers: int, pp_size: int) -> list[range]:
    """The layers of each pipeline stage, in order; every stage has at least one.

    Layers that do not divide evenly go one each to the stages before the last, from the back:
    the last stage also has the output head, and the first the embedding, so they get extra
    layers last or never. This is vLLM's rule (`get_pp_indices`), without its environment
    variable for uneven splits.
    """
    if not 1 <= pp_size <= num_layers:
        raise ConfigError(
            f"pp_size is {pp_size}, expected 1 <= pp_size <= num_layers = {num_layers}"
        )
    base, remainder = divmod(num_layers, pp_size)
    stages = []
    start = 0
    for stage in range(pp_size):
        extra = pp_size - 1 - remainder <= stage < pp_size - 1
        stages.append(range(start, start + base + extra))
        start = stages[-1].stop
    return stages


def heads_of(kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """The global KV heads of a TP rank: an equal part, or one head that several ranks replicate.

    Neighbouring ranks share a replicated head, as in vLLM, so that a DCP group (consecutive TP
    ranks) stands within one head.
    """
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tp_rank is {tp_rank}, expected 0 <= tp_rank < tp_size = {tp_size}")
    if kv_heads % tp_size == 0:
        part = kv_heads // tp_size
        return range(tp_rank * part, (tp_rank + 1) * part)
    if tp_size % kv_heads == 0:
        head = tp_rank * kv_heads // tp_size
        return range(head, head + 1)
    raise ConfigError(
        f"{kv_heads} KV heads and tp_size {tp_size}: expected that one divides the other"
    )


def cp_tokens(
    tokens_per_block: int, cp_size: int, cp_rank: int, interleave: int = 1
) -> tuple[int, ...]:
    """Positions of this worker's tokens inside a logical block, in the order it keeps them.

    A logical block has `tokens_per_block * cp_size` tokens of the sequence. `interleave`
    consecutive tokens go to context-parallel rank 0, the next ones to rank 1, and so on around:
    1 deals tokens out singly, `tokens_per_block` gives each rank one run (vLLM's
    `cp_kv_cache_interleave_size`).
    """
    if not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank is {cp_rank}, expected 0 <= cp_rank < cp_size = {cp_size}")
    if interleave < 1 or tokens_per_block % interleave:
        raise ConfigError(
            f"interleave is {interleave}, expected a divisor of tokens_per_block = "
            f"{tokens_per_block}"
        )
    return tuple(
        (start * cp_size + cp_rank * interleave) + offset
        for start in range(0, tokens_per_block, interleave)
        for offset in range(interleave)
    )


def _worker_groups(
    groups: Sequence[KvGroup],
    model: ModelConfig,
    cache: CacheConfig,
    stage: range,
    tp_size: int,
    tp_rank: int,
) -> tuple[WorkerGroup, ...]:
    return tuple(
        WorkerGroup(
            group_index=index,
            layers=tuple(layer for layer in group.layers if layer in stage),
            heads=heads_of(group.kv_heads, tp_size, tp_rank),
            head_size=group.head_size,
            planes=group.planes,
            itemsize_bytes=model.itemsize_bytes,
            tokens_per_block=block_tokens(group, cache),
        )
        for index, group in enumerate(groups)
    )


def block_tokens(group: KvGroup, cache: CacheConfig) -> int:
    """Tokens of one worker's block of this group."""
    return group.tokens_per_block or cache.tokens_per_block


def unit_tokens(groups: Sequence[KvGroup], cache: CacheConfig) -> int:
    """Tokens of the longest block: what an engine pages by, and of which every block is a part."""
    return max(block_tokens(group, cache) for group in groups)


def blocks_per_unit(groups: Sequence[KvGroup], cache: CacheConfig) -> tuple[int, ...]:
    """Of each group, how many of its blocks are as long as the longest block.

    Raises ConfigError where they do not fill it.
    """
    if findings := check_blocks(groups, cache):
        found = findings[0]
        raise ConfigError(f"{found.key} is {found.value}: {found.limit}; {found.fix}")
    unit = unit_tokens(groups, cache)
    return tuple(unit // block_tokens(group, cache) for group in groups)


def check_blocks(groups: Sequence[KvGroup], cache: CacheConfig) -> list[Finding]:
    """Which groups' blocks do not fill the longest one: a prefix could end inside one of them."""
    unit = unit_tokens(groups, cache)
    return [
        Finding(
            f"model.groups[{index}].tokens_per_block",
            block_tokens(group, cache),
            f"must divide the longest block of any group, which has {unit} tokens",
            f"choose one of {_listed(_divisors(unit))}",
        )
        for index, group in enumerate(groups)
        if unit % block_tokens(group, cache)
    ]


class Column(NamedTuple):
    """Chunk number `part`, of `parts`, of one group in an entry. `reach`: how many of a hit's last
    entries need it; None: all."""

    group: int
    part: int
    parts: int
    reach: int | None


def columns(groups: Sequence[KvGroup], cache: CacheConfig, sizes: ShardSizes) -> tuple[Column, ...]:
    """The columns of an entry. A column's number stands for the group in keys: the first chunks of
    all groups come first, so it is the group's index wherever there are no others.

    Behind a hit of t tokens the next token attends to the `sliding_window - 1` before it, so a
    window needs the chunks that have one of these, and no earlier ones.
    """
    parts = blocks_per_unit(groups, cache)
    context = sizes.pcp_size * sizes.dcp_size
    found = []
    for part in range(max(parts)):
        for index, group in enumerate(groups):
            if part >= parts[index]:
                continue
            reach = None
            if group.sliding_window is not None:
                chunk_tokens = block_tokens(group, cache) * cache.blocks_per_chunk * context
                chunks = -(-(group.sliding_window - 1) // chunk_tokens)
                # Column `part` of an entry is followed by parts - 1 - part chunks inside it.
                reach = (chunks + part) // parts[index]
            found.append(Column(index, part, parts[index], reach))
    return tuple(found)


def rank_slots(
    groups: Sequence[KvGroup], sizes: ShardSizes, local_world_size: int
) -> tuple[int, ...]:
    """By rank, its slot in its node's rows. Ranks of a node that keep equal bytes share one, and
    the first of them writes it: those that replicate every group's heads (all TP ranks, where there
    is only MLA) and hold the same layers and tokens."""
    tp = sizes.tp_size
    slots: list[int] = []
    known: dict[tuple[int, ...], int] = {}
    for rank in range(tp * sizes.pcp_size * sizes.pp_size):
        if rank % local_world_size == 0:
            known = {}
        tp_rank, above = rank % tp, rank // tp
        held = (above, tp_rank % sizes.dcp_size)
        heads = (heads_of(group.kv_heads, tp, tp_rank).start for group in groups)
        slots.append(known.setdefault((*held, *heads), len(known)))
    return tuple(slots)


def _check_layers(groups: Sequence[KvGroup], model: ModelConfig) -> None:
    held = sorted(layer for group in groups for layer in group.layers)
    if held != list(range(model.num_layers)):
        raise ConfigError(
            f"the groups of model {model.name!r} hold layers {held}, expected each of "
            f"0..{model.num_layers - 1} once"
        )


def worker_groups(
    groups: Sequence[KvGroup], model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig
) -> tuple[WorkerGroup, ...]:
    """Every group as this worker holds it, index for index.

    A group that has no layer on the worker's pipeline stage stands there with no layers and
    0 bytes. Raises ConfigError where heads or layers cannot be divided as asked.
    """
    _check_layers(groups, model)
    stage = pipeline_layers(model.num_layers, parallel.pp_size)[parallel.pp_rank]
    return _worker_groups(groups, model, cache, stage, parallel.tp_size, parallel.tp_rank)


def replica_worker_groups(
    groups: Sequence[KvGroup], model: ModelConfig, cache: CacheConfig, sizes: ShardSizes
) -> tuple[tuple[WorkerGroup, ...], ...]:
    """`worker_groups` of every rank of a replica, in rank order (TP fastest, then PCP, then PP).

    Ranks that differ only on the PCP axis hold other tokens, but as many bytes: they share one
    object.
    """
    _check_layers(groups, model)
    return tuple(
        worker
        for stage in pipeline_layers(model.num_layers, sizes.pp_size)
        for worker in [
            _worker_groups(groups, model, cache, stage, sizes.tp_size, tp_rank)
            for tp_rank in range(sizes.tp_size)
        ]
        * sizes.pcp_size
    )


def slot_bytes(workers: Iterable[Sequence[WorkerGroup]], blocks_per_chunk: int) -> int:
    """Bytes of a slot: the largest chunk of any group on any of these workers, up to 64.

    All slots of a region have this one size, so `workers` must be every rank of the replica and
    not only those of one node or stage.
    """
    largest = max((group.block_bytes for worker in workers for group in worker), default=0)
    if largest < 1 or blocks_per_chunk < 1:
        raise ConfigError(
            f"a slot of {blocks_per_chunk} blocks of {largest} bytes: expected at least one of each"
        )
    return -(-largest * blocks_per_chunk // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def check_sharding(groups: Sequence[KvGroup], sizes: ShardSizes) -> list[Finding]:
    """Why these groups cannot be divided over these axes, every reason at once.

    MLA and multi-query groups count as one head that every TP rank replicates. With DCP, the
    ranks of a DCP group spread the tokens of one and the same head, so each head must be
    replicated a multiple of `dcp_size` times. vLLM asks for `tp_size > kv_heads` and
    `dcp_size <= tp_size // kv_heads`; that follows from this rule, which also rules out groups
    that would straddle two heads. Query heads play no part in the bytes and are not checked.
    """
    tp, pp, dcp = sizes.tp_size, sizes.pp_size, sizes.dcp_size
    findings = [
        Finding(key, size, "must be at least 1", f"set {key}=1 to leave this axis unused")
        for key, size in (
            ("parallel.tensor_parallel_size", tp),
            ("parallel.pipeline_parallel_size", pp),
            ("parallel.prefill_context_parallel_size", sizes.pcp_size),
            ("parallel.decode_context_parallel_size", dcp),
        )
        if size < 1
    ]
    if findings:
        return findings
    num_layers = sum(len(group.layers) for group in groups)
    if pp > num_layers:
        findings.append(
            Finding(
                "parallel.pipeline_parallel_size",
                pp,
                f"must be at most the model's {num_layers} layers: a stage needs a layer",
                f"choose 1 to {num_layers}",
            )
        )
    if tp % dcp:
        findings.append(
            Finding(
                "parallel.decode_context_parallel_size",
                dcp,
                f"must divide parallel.tensor_parallel_size = {tp}",
                f"choose one of {_listed(_divisors(tp))}",
            )
        )
    by_heads: dict[int, str] = {}
    for group in groups:
        by_heads.setdefault(group.kv_heads, group.name)
    for heads, name in by_heads.items():
        if heads % tp and tp % heads:
            findings.append(
                Finding(
                    "parallel.tensor_parallel_size",
                    tp,
                    f"must divide the {heads} KV heads of group {name!r}, or be a multiple of them",
                    f"choose {_listed(_divisors(heads))}, or a multiple of {heads}",
                )
            )
        elif dcp > 1 and not tp % dcp and (tp % heads or tp // heads % dcp):
            findings.append(
                Finding(
                    "parallel.decode_context_parallel_size",
                    dcp,
                    f"must divide the copies of each KV head of group {name!r}, which are "
                    f"{max(1, tp // heads)}: parallel.tensor_parallel_size {tp} over {heads} heads",
                    f"use parallel.tensor_parallel_size={heads * dcp} or a multiple of it, or "
                    "parallel.decode_context_parallel_size=1",
                )
            )
    return findings


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def geometry_facts(
    groups: Sequence[KvGroup],
    model: ModelConfig,
    cache: CacheConfig,
    sizes: ShardSizes,
    layout: str,
    *,
    interleave: int = 1,
) -> dict[str, Any]:
    """Everything that decides where a byte of a block lies, as plain JSON values.

    What only says where a worker runs (data-parallel index and size, node, rank) is not in it,
    and neither are the names of model and groups.
    """
    world_size = sizes.tp_size * sizes.pcp_size * sizes.pp_size
    shared = len(set(rank_slots(groups, sizes, world_size))) < world_size
    # Named only where they are: what was stored before there were any stays what it is.
    return ({"shared_slots": True} if shared else {}) | {
        "cache": {
            "tokens_per_block": cache.tokens_per_block,
            "tokens_per_hash": cache.tokens_per_hash,
            "blocks_per_chunk": cache.blocks_per_chunk,
            "cp_interleave": interleave,
        },
        "dtype": model.dtype,
        "groups": [
            {
                "kind": group.kind,
                "layers": list(group.layers),
                "kv_heads": group.kv_heads,
                "head_size": group.head_size,
                "planes": group.planes,
                "sliding_window": group.sliding_window,
            }
            | ({"tokens_per_block": own} if (own := group.tokens_per_block) else {})
            for group in groups
        ],
        "layout": layout,
        "num_layers": model.num_layers,
        "parallel": {
            "tp_size": sizes.tp_size,
            "pp_size": sizes.pp_size,
            "pcp_size": sizes.pcp_size,
            "dcp_size": sizes.dcp_size,
        },
    }


def geometry_digest(
    groups: Sequence[KvGroup],
    model: ModelConfig,
    cache: CacheConfig,
    sizes: ShardSizes,
    layout: str,
    *,
    interleave: int = 1,
) -> str:
    """SHA-256 (hex) of `geometry_facts`: equal where two processes agree on every offset."""
    return _digest(geometry_facts(groups, model, cache, sizes, layout, interleave=interleave))


def fingerprint(
    groups: Sequence[KvGroup],
    model: ModelConfig,
    cache: CacheConfig,
    sizes: ShardSizes,
    layout: str,
    *,
    rope: str,
    hash_algorithm: str,
    format_version: int,
    kv_quantization: str = "",
    tenant_salt: str = "",
    interleave: int = 1,
) -> str:
    """SHA-256 (hex) over everything that decides the bytes under a key: a tier's namespace.

    Two deployments may share stored blocks only where this is equal. Data parallelism is not in
    it, since replicas hold equal bytes under equal keys; the other axes are, since a stored block
    is divided into the slots of its ranks.
    """
    return _digest(
        {
            "format_version": format_version,
            "geometry": geometry_facts(groups, model, cache, sizes, layout, interleave=interleave),
            "hash_algorithm": hash_algorithm,
            "kv_quantization": kv_quantization,
            "model": {"name": model.name, "revision": model.revision},
            "rope": rope,
            "tenant_salt": tenant_salt,
        }
    )


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
