"""The index of one namespace on one path, in one file, so that a restart knows its blocks at once.

    magic 8, format version 4, width of a hash 4, number of blocks 8, checksum of the rest 8
    ids u64[n], used_ns i64[n], groups u32[n], hashes u8[n, width], lengths u8[n]

A snapshot is a hint: what it names may be gone, which a load then finds, and what it does not name
is found by probes and by the scan.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import xxhash

from backends.block import HASH_BYTES_MAX
from backends.tier.index import Columns

_MAGIC: Final = b"KVQINDEX"
_VERSION: Final = 1
_HEADER = struct.Struct("<8sIIQQ")


def pack(columns: Columns) -> bytes:
    """The file's contents."""
    width = int(columns.lengths.max()) if columns.lengths.size else 0
    parts = [
        columns.ids.astype("<u8", copy=False),
        columns.used_ns.astype("<i8", copy=False),
        columns.groups.astype("<u4", copy=False),
        np.ascontiguousarray(columns.hashes[:, :width]),
        columns.lengths,
    ]
    body = b"".join(part.tobytes() for part in parts)
    checksum = xxhash.xxh3_64_intdigest(body)
    return _HEADER.pack(_MAGIC, _VERSION, width, columns.ids.size, checksum) + body


def unpack(data: bytes) -> Columns | None:
    """What `pack` packed; None if it is anything else, or damaged."""
    if len(data) < _HEADER.size:
        return None
    magic, version, width, count, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if magic != _MAGIC or version != _VERSION or width > HASH_BYTES_MAX:
        return None
    if len(body) != count * (8 + 8 + 4 + width + 1) or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    ends = np.cumsum([8 * count, 8 * count, 4 * count, width * count, count]).tolist()
    ids, used_ns, groups, hashes, lengths = (
        body[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    return Columns(
        np.frombuffer(ids, "<u8"),
        np.frombuffer(hashes, np.uint8).reshape(count, width),
        np.frombuffer(lengths, np.uint8),
        np.frombuffer(groups, "<u4"),
        np.frombuffer(used_ns, "<i8"),
    )
