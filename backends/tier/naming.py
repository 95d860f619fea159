"""Names that a key has wherever it is stored, and the order in which replicas may write it.

A namespace is the fingerprint in hex, with `_dp<index>` behind it where replicas are isolated.
Names are made of hex digits and numbers only, whatever a key holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import xxhash

from backends.block import BlockKey

SHARDS: Final = 256

_NAMESPACE = re.compile(r"[0-9a-f]{64}(_dp[0-9]{1,6})?")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){0,64})_([0-9]{1,10})\.kvb")


class Namespace:
    """One namespace's directory name, and what follows from a key in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seed = xxhash.xxh3_64_intdigest(name.encode())

    def block_id(self, key: BlockKey) -> int:
        """64 bits that stand for a key in memory. Two keys may share one: names never do."""
        return xxhash.xxh3_64_intdigest(key.hash + key.group.to_bytes(4, "little"), self._seed)

    def block_ids(self, keys: Iterable[BlockKey]) -> list[int]:
        """`block_id` of each."""
        digest, seed = xxhash.xxh3_64_intdigest, self._seed
        return [digest(hash_ + group.to_bytes(4, "little"), seed) for hash_, group in keys]

    def leaf(self, block_id: int) -> str:
        """Where a block is, relative to what holds all namespaces."""
        return f"{self.name}/{shard_of(block_id):02x}"


def namespace_name(fingerprint: bytes, replica: int | None) -> str:
    return fingerprint.hex() + ("" if replica is None else f"_dp{replica}")


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def shard_of(block_id: int) -> int:
    """The fan-out directory, 0 to 255: the unit in which space is counted."""
    return block_id >> 56


def block_name(key: BlockKey) -> str:
    return f"{key.hash.hex()}_{key.group}.kvb"


def parse_block_name(name: str) -> BlockKey | None:
    """The key whose file has this name; None for any other file."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    group = int(match[2])
    return BlockKey(bytes.fromhex(match[1]), group) if group < 2**32 else None


def writer_position(block_id: int, replica: int, replicas: int) -> int:
    """How many replicas come before this one in the order in which they may write a block."""
    packed = block_id.to_bytes(8, "little")
    own = xxhash.xxh3_64_intdigest(packed, replica + 1)
    return sum(
        xxhash.xxh3_64_intdigest(packed, other + 1) > own
        for other in range(replicas)
        if other != replica
    )
