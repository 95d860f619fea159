"""The stored block: a 4 KiB header and the payload behind it, in a region's row as on any tier.

Header, little endian, zero to its end:

    offset  size  field
         0     8  magic
         8     4  format version
        12     4  state: EMPTY, WRITING, COMPLETE
        16     4  KV-cache group index
        20     4  length of the block hash
        24    64  block hash, zero padded
        88     8  payload bytes
        96     8  creation time, ns since the epoch
       104    32  fingerprint: SHA-256 of everything that decides the bytes
       136     4  number of slots
       140     4  flags: SEALED where the checksums hold
       144     8  checksum of the payload, XXH3-64
       152     8  checksum of the header with this field and the state zero, XXH3-64
       160   4*n  length of each slot in bytes

A row that is being filled is WRITING: its key stands there already, so that whoever was told to use
the row can check that it still means the same block, but nobody else may read it. A row is sealed
before it leaves the region, and checked when it comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from backends.config import BLOCK_FORMAT_VERSION as FORMAT_VERSION
from backends.errors import ConfigError

HEADER_BYTES: Final = 4096
MAGIC: Final = b"KVQBLOCK"
EMPTY: Final = 0
WRITING: Final = 1
COMPLETE: Final = 2
HASH_BYTES_MAX: Final = 64
FINGERPRINT_BYTES: Final = 32
_SEALED: Final = 1
_HEADER = struct.Struct("<8sIIII64sQQ32sIIQQ")
_STATE = struct.Struct("<I")
_STATE_OFFSET: Final = 12
_SUMS = struct.Struct("<IQQ")
_SUMS_OFFSET: Final = 140
SLOTS_MAX: Final = (HEADER_BYTES - _HEADER.size) // 4

Bytes = npt.NDArray[np.uint8]


class BlockKey(NamedTuple):
    """What names a block everywhere: its chained hash and its KV-cache group's index."""

    hash: bytes
    group: int


class BlockHeader(NamedTuple):
    """A header's fields, in their order."""

    magic: bytes
    version: int
    state: int
    group: int
    hash_bytes: int
    hash: bytes
    payload_bytes: int
    created_ns: int
    fingerprint: bytes
    slots: int
    flags: int
    payload_checksum: int
    header_checksum: int


def write_header(
    header: Bytes,
    key: BlockKey,
    *,
    fingerprint: bytes,
    slot_lengths: Sequence[int],
    created_ns: int,
    state: int,
) -> None:
    """Fill a header, uint8 [4096 or more], in place, not sealed. Lengths are in bytes."""
    if len(key.hash) > HASH_BYTES_MAX or len(fingerprint) != FINGERPRINT_BYTES:
        raise ConfigError(
            f"block hash has {len(key.hash)} bytes, expected at most {HASH_BYTES_MAX}; fingerprint "
            f"has {len(fingerprint)}, expected {FINGERPRINT_BYTES}"
        )
    if len(slot_lengths) > SLOTS_MAX:
        raise ConfigError(f"{len(slot_lengths)} slots, expected at most {SLOTS_MAX} in a header")
    packed = _HEADER.pack(
        *(MAGIC, FORMAT_VERSION, state, key.group, len(key.hash), key.hash),
        *(sum(slot_lengths), created_ns, fingerprint, len(slot_lengths), 0, 0, 0),
    )
    lengths = np.asarray(slot_lengths, dtype="<u4").view(np.uint8)
    end = len(packed) + lengths.size
    header[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
    header[len(packed) : end] = lengths
    header[end:HEADER_BYTES] = 0


def read_header(header: Bytes) -> BlockHeader:
    """The fields as they stand there, unchecked."""
    return BlockHeader(*_HEADER.unpack_from(header.data))


def set_state(header: Bytes, state: int) -> None:
    header[_STATE_OFFSET : _STATE_OFFSET + _STATE.size] = np.frombuffer(
        _STATE.pack(state), dtype=np.uint8
    )


def holds(header: Bytes, key: BlockKey) -> bool:
    """Whether a row of the region is meant for this key, filled or being filled."""
    found = read_header(header)
    return (
        found.magic == MAGIC
        and found.version == FORMAT_VERSION
        and found.state in (WRITING, COMPLETE)
        and found.group == key.group
        and found.hash[: found.hash_bytes] == key.hash
    )


def seal(block: Bytes, stored_bytes: int) -> None:
    """Put the checksums of a COMPLETE block into its header, before it leaves the region.

    `block` is the header and all `stored_bytes` behind it that will be stored, uint8 [n].
    """
    payload = xxhash.xxh3_64_intdigest(block[HEADER_BYTES : HEADER_BYTES + stored_bytes].data)
    _put_sums(block, payload, 0)
    _put_sums(block, payload, _header_checksum(block))


def check(block: Bytes, key: BlockKey, fingerprint: bytes, stored_bytes: int) -> str | None:
    """Why a block that came back must not be used; None if it is whole and the one meant.

    `block` is what was read, uint8 [n]; it may be shorter than it should be.
    """
    if block.size < HEADER_BYTES:
        return f"is {block.size} bytes long, expected at least a header of {HEADER_BYTES}"
    found = read_header(block)
    if found.magic != MAGIC:
        return f"begins with {found.magic!r}, expected {MAGIC!r}: it is not a block"
    if found.version != FORMAT_VERSION:
        return f"has format version {found.version}, expected {FORMAT_VERSION}"
    if not found.flags & _SEALED or found.header_checksum != _header_checksum(block):
        return "has a damaged header: its checksum differs"
    if found.fingerprint != fingerprint:
        return f"has fingerprint {found.fingerprint.hex()[:16]}, expected {fingerprint.hex()[:16]}"
    if (found.hash[: found.hash_bytes], found.group) != key:
        return f"holds key {found.hash.hex()[:16]} of group {found.group}, not the one asked for"
    if block.size < HEADER_BYTES + stored_bytes:
        return f"is {block.size} bytes long, expected {HEADER_BYTES + stored_bytes}: truncated"
    payload = block[HEADER_BYTES : HEADER_BYTES + stored_bytes].data
    if found.payload_checksum != xxhash.xxh3_64_intdigest(payload):
        return "has a damaged payload: its checksum differs"
    return None


def _put_sums(block: Bytes, payload_checksum: int, header_checksum: int) -> None:
    block[_SUMS_OFFSET : _SUMS_OFFSET + _SUMS.size] = np.frombuffer(
        _SUMS.pack(_SEALED, payload_checksum, header_checksum), dtype=np.uint8
    )


def _header_checksum(block: Bytes) -> int:
    header = bytearray(block[:HEADER_BYTES].tobytes())
    header[_STATE_OFFSET : _STATE_OFFSET + _STATE.size] = bytes(_STATE.size)
    header[_SUMS_OFFSET + 12 : _SUMS_OFFSET + 20] = bytes(8)
    return int(xxhash.xxh3_64_intdigest(header))
