"""Names of everything below a path, and the two orders that keys impose on paths and replicas.

    <path>/usage                                     ledger shared by all processes
    <path>/<namespace>/manifest.json, index          what the digest stands for; snapshot
    <path>/<namespace>/<2 hex>/<hash hex>_<group>.kvb
    <path>/writers/<writer>/<number>                 files being written
    <path>/quarantine/<ns since the epoch>_<name>    files found wrong

One level of 256 directories: a million blocks are 4000 names in each, which every filesystem
worth storing on finds by hash or tree. A second level would cost a directory for nearly every one
of the first 65536 blocks, and as many to be read in a scan.

Names of namespaces and blocks, and the order of replicas, are those of every tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from backends.tier.naming import (
    SHARDS,
    Namespace,
    block_name,
    is_namespace,
    namespace_name,
    parse_block_name,
    shard_of,
    writer_position,
)

__all__ = [
    "SHARDS",
    "Namespace",
    "block_name",
    "is_namespace",
    "namespace_name",
    "parse_block_name",
    "path_order",
    "path_seed",
    "shard_of",
    "writer_position",
]

LEDGER: Final = "usage"
WRITERS: Final = "writers"
QUARANTINE: Final = "quarantine"
MANIFEST: Final = "manifest.json"
SNAPSHOT: Final = "index"


def path_order(block_id: int, path_seeds: Sequence[int]) -> list[int]:
    """Paths for a block, best first, by highest random weight.

    Depends on the set of paths and not on their order in the settings; one path more or less moves
    only the blocks that belong to it.
    """
    packed = block_id.to_bytes(8, "little")
    weights = [xxhash.xxh3_64_intdigest(packed, seed) for seed in path_seeds]
    return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)


def path_seed(path: str) -> int:
    return xxhash.xxh3_64_intdigest(path.encode(errors="surrogateescape"))
