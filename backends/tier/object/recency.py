"""When blocks were used, of one namespace, in one object: so that all evict by the use of all.

    magic 8, format version 4, reserved 4, number of blocks 8, checksum of the rest 8
    ids u64[n], used u32[n] in seconds since the epoch

12 bytes a block. It is a hint: who writes it reads it first and keeps the later time of each block,
and what two writers at once lose of each other is written again the next time.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

_MAGIC: Final = b"KVQRECNT"
_VERSION: Final = 1
_HEADER = struct.Struct("<8sIIQQ")
_BLOCK_BYTES: Final = 12
BYTES_MAX: Final = 64 << 20


class Uses(NamedTuple):
    """ids u64 [n], used_s u32 [n]."""

    ids: npt.NDArray[np.uint64]
    used_s: npt.NDArray[np.uint32]


def pack(uses: Uses) -> bytes:
    """The object's contents: the most recent blocks, as many as fit."""
    most = (BYTES_MAX - _HEADER.size) // _BLOCK_BYTES
    if uses.ids.size > most:
        chosen = np.argpartition(uses.used_s, -most)[-most:]
        uses = Uses(uses.ids[chosen], uses.used_s[chosen])
    body = uses.ids.astype("<u8").tobytes() + uses.used_s.astype("<u4").tobytes()
    checksum = xxhash.xxh3_64_intdigest(body)
    return _HEADER.pack(_MAGIC, _VERSION, 0, uses.ids.size, checksum) + body


def unpack(data: bytes) -> Uses | None:
    """What `pack` packed; None if it is anything else, or damaged."""
    if len(data) < _HEADER.size or len(data) > BYTES_MAX:
        return None
    magic, version, _, count, checksum = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if magic != _MAGIC or version != _VERSION or len(body) != count * _BLOCK_BYTES:
        return None
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    return Uses(np.frombuffer(body[: count * 8], "<u8"), np.frombuffer(body[count * 8 :], "<u4"))


def merge(ours: Uses, theirs: Uses) -> Uses:
    """The later use of each of our blocks. Blocks that only they know are left out where we know
    all there are: they are gone."""
    if not theirs.ids.size or not ours.ids.size:
        return ours
    order = np.argsort(theirs.ids)
    ids, used_s = theirs.ids[order], theirs.used_s[order]
    at = np.minimum(np.searchsorted(ids, ours.ids), ids.size - 1)
    same = ids[at] == ours.ids
    return Uses(ours.ids, np.where(same, np.maximum(ours.used_s, used_s[at]), ours.used_s))
