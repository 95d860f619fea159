"""The messages of vLLM's KV event stream, as MessagePack.

A batch is an array `[ts, events, data_parallel_rank]`, an event a map with its kind under `type`;
fields of an event that have their default are left out. Format: `vllm/distributed/kv_events.py` of
vLLM 0.32. Field order is vLLM's, so that equal events are equal bytes.

A hash is either the bytes of a block's key or, as vLLM sends it unless told otherwise, the lowest
64 bits of them as a number.
"""

from __future__ import annotations

from typing import Final

import msgspec

BlockHash = int | bytes

MEDIUM_CPU: Final = "CPU"
MEDIUM_STORAGE: Final = "STORAGE"
LOCAL: Final = "LOCAL"

# What a group keeps, by `KvGroup.kind`, in vLLM's words.
SPEC_KINDS: Final = {
    "full": "full_attention",
    "sliding_window": "sliding_window",
    "mla": "mla_attention",
}
_LOWEST_64_BITS: Final = -8  # bytes from the end of a big-endian number


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """What every event has: `type`, the class's name."""


class BlockStored(KvEvent):
    """Blocks of one sequence that follow each other are in a tier now.

    `parent_block_hash` is the block before the first one, None where that is the first of its
    sequence or not known. `token_ids` are those of all blocks, or none where only hashes are known.
    `block_size` is in tokens. `medium` says what holds them, `ownership` the name of a tier under
    the region.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(KvEvent):
    """Blocks are no longer in a tier."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KvEvent):
    """Nothing that was said to be in a tier can be relied on any more.

    vLLM's has no fields and means all tiers, and that is how who knows no more than that reads it.
    """

    medium: str | None = None
    locality: str | None = None
    ownership: str | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries. `ts` is in seconds since the epoch."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def lowest_64_bits(key: bytes) -> int:
    """A hash as a number, the way vLLM shortens it."""
    return int.from_bytes(key[_LOWEST_64_BITS:], "big")
