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
       152   4*n  length of each slot in bytes
      4088     8  checksum of everything before it, XXH3-64

A row that is being filled is WRITING: its key stands there already, so that whoever was told to use
the row can check that it still means the same block, but nobody else may read it. A row is sealed
before it leaves the region, and checked when it comes back.

Two tiers may seal one row at the same time, while either writes it out: every byte that sealing
puts there is put there once and depends on nothing but the block, so the other side's is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType
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
_SEALED_FLAGS: Final = struct.pack("<I", 1)
_THIS_FORMAT: Final = struct.pack("<8sI", MAGIC, FORMAT_VERSION)
_KEEPS_BYTES: Final = 64 << 10
_ONE_CALL_BYTES: Final = 512 << 10
_FIELDS = struct.Struct("<8sIIII64sQQ32sIIQ")
_KEY_FIELDS = struct.Struct("<II64s")
_FORMAT = slice(0, 12)
_STATE = slice(12, 16)
_KEY = slice(16, 88)
_KEY_LENGTH = slice(20, 24)
_HASH = slice(24, 88)
_CREATED = slice(96, 104)
_FINGERPRINT = slice(104, 136)
_FLAGS = slice(140, 144)
_PAYLOAD_SUM = slice(144, 152)
_FLAGS_AND_SUM = slice(140, 152)
_CHECKSUM = slice(HEADER_BYTES - 8, HEADER_BYTES)
SLOTS_MAX: Final = (_CHECKSUM.start - _FIELDS.size) // 4
_STATES: Final = {state: struct.pack("<I", state) for state in (EMPTY, WRITING, COMPLETE)}

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

    @property
    def key(self) -> BlockKey:
        return BlockKey(self.hash[: self.hash_bytes], self.group)


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
    slots = len(slot_lengths)
    if slots > SLOTS_MAX:
        raise ConfigError(f"{slots} slots, expected at most {SLOTS_MAX} in a header")
    try:
        fields = _FIELDS.pack(
            *(MAGIC, FORMAT_VERSION, state, key.group, len(key.hash), key.hash),
            *(sum(slot_lengths), created_ns, fingerprint, slots, 0, 0),
        )
        fields += struct.pack(f"<{slots}I", *slot_lengths)
    except struct.error as error:
        raise ConfigError(
            f"group {key.group}, slot lengths {list(slot_lengths)} and creation time {created_ns} "
            f"do not fit a block's header ({error}); group and lengths are 32-bit, not negative"
        ) from error
    header.data[:HEADER_BYTES] = fields.ljust(HEADER_BYTES, b"\0")


class HeaderRows:
    """Fills the headers of many rows at once, byte for byte as `write_header` fills one.

    `headers` is uint8 [rows, 4096 or more], each row's bytes side by side; `slot_lengths[group]` in
    bytes. Raises ConfigError as `write_header` does. `compiled` False: by numpy, which is what a
    machine without the compiled part has.
    """

    def __init__(
        self,
        headers: Bytes,
        *,
        fingerprint: bytes,
        slot_lengths: Sequence[Sequence[int]],
        compiled: bool = True,
    ) -> None:
        form: Bytes = np.zeros((len(slot_lengths), HEADER_BYTES), np.uint8)
        for group, lengths in enumerate(slot_lengths):
            write_header(
                form[group],
                BlockKey(b"", group),
                fingerprint=fingerprint,
                slot_lengths=lengths,
                created_ns=0,
                state=WRITING,
            )
        # Behind this nothing but the checksum is ever put into any of these headers.
        width = _FIELDS.size + 4 * max(map(len, slot_lengths))
        self._forms = [own[:width].tobytes() for own in form]
        self._headers = headers
        self._width = width
        self._native = _native() if compiled else None
        self._place = (headers.ctypes.data, headers.strides[0], len(headers))

    def announce(
        self, keys: Sequence[bytes], rows: Sequence[int], group: int, created_ns: int
    ) -> None:
        """These rows, which are `clear`, are WRITING these keys' blocks of one group now."""
        most, form = max(map(len, keys), default=0), self._forms[group]
        if most > HASH_BYTES_MAX:
            raise ConfigError(f"block hash has {most} bytes, expected at most {HASH_BYTES_MAX}")
        if self._native is not None:
            self._native.announce(*self._place, form, keys, rows, created_ns)
            return
        batch = np.frombuffer(form, np.uint8)[None].repeat(len(keys), axis=0)
        batch[:, _KEY_LENGTH].view("<u4")[:, 0] = list(map(len, keys))
        batch[:, _HASH].view(f"S{HASH_BYTES_MAX}")[:, 0] = keys
        batch[:, _CREATED].view("<u8")[:, 0] = created_ns
        at = np.array(rows, np.intp)
        self._headers[at, : len(form)] = batch
        self._headers[at, _CHECKSUM] = 0

    def clear(self, rows: Sequence[int]) -> None:
        """Whatever stood in these rows, nothing is left behind what `announce` fills."""
        if self._native is not None:
            self._native.clear(*self._place, self._width, rows)
            return
        self._headers[np.array(rows, np.intp), self._width : HEADER_BYTES] = 0

    def complete(self, rows: Sequence[int]) -> None:
        """All that is to be in these rows is there."""
        if self._native is not None:
            self._native.set_states(*self._place, rows, COMPLETE)
            return
        states = self._headers[:, _STATE].view("<u4")[:, 0]
        states[np.array(rows, np.intp)] = COMPLETE


def _native() -> ModuleType | None:
    try:
        from backends import _headers
    except ImportError:
        return None
    return _headers


def read_header(header: Bytes) -> BlockHeader:
    """The fields as they stand there, unchecked. `header` is uint8 [4096 or more]."""
    return BlockHeader._make(_FIELDS.unpack_from(header.data))


def created_ns(header: Bytes) -> int:
    """When the block was made, as it stands there, unchecked."""
    return int.from_bytes(header.data[_CREATED], "little")


def slot_lengths(header: Bytes) -> tuple[int, ...]:
    """Length of each slot in bytes, as a header that was checked says."""
    return struct.unpack_from(f"<{read_header(header).slots}I", header.data, _FIELDS.size)


def set_state(header: Bytes, state: int) -> None:
    """Change the state alone. Leaving COMPLETE breaks the seal: the bytes may change now."""
    data = header.data
    data[_STATE] = _STATES[state]
    if state != COMPLETE:
        data[_FLAGS] = bytes(4)


def holds(header: Bytes, key: BlockKey) -> bool:
    """Whether a row of the region is meant for this key, filled or being filled."""
    data = header.data
    return _names(data, key) and data[_STATE] in (_STATES[WRITING], _STATES[COMPLETE])


def is_whole(header: Bytes, key: BlockKey) -> bool:
    """Whether a row of the region has this key's bytes, so that they may be loaded."""
    data = header.data
    return _names(data, key) and data[_STATE] == _STATES[COMPLETE]


def check_row(header: Bytes, key: BlockKey, fingerprint: bytes) -> str | None:
    """Why a row must not be stored as this key's block; None if it may. Checksums are not read."""
    data = header.data
    if (
        _names(data, key)
        and data[_STATE] == _STATES[COMPLETE]
        and data[_FINGERPRINT] == fingerprint
    ):
        return None
    found = read_header(header)
    if found.magic != MAGIC:
        return f"begins with {found.magic!r}, expected {MAGIC!r}: it is not a block"
    if found.version != FORMAT_VERSION:
        return f"has format version {found.version}, expected {FORMAT_VERSION}"
    if found.fingerprint != fingerprint:
        return f"has fingerprint {found.fingerprint.hex()[:16]}, expected {fingerprint.hex()[:16]}"
    if found.state != COMPLETE:
        return f"has state {found.state}, expected {COMPLETE}: it was not filled to its end"
    return (
        f"holds key {found.key.hash.hex()[:16]} of group {found.group}, expected "
        f"{key.hash.hex()[:16]} of group {key.group}"
    )


def seal(block: Bytes, stored_bytes: int) -> None:
    """Put the checksums of a COMPLETE block into its header, before it leaves the region.

    `block` is the header and at least the `stored_bytes` behind it that will be stored, uint8 [n].
    A block whose seal holds is left as it is: it came from a tier, and a checksum made anew would
    hide what happened to its bytes since.
    """
    data = block.data
    if data[_FLAGS] == _SEALED_FLAGS and data[_CHECKSUM] == _header_checksum(data):
        return
    payload = _payload_checksum(data[HEADER_BYTES : HEADER_BYTES + stored_bytes])
    # Assigned, not packed in place: `struct` zeroes its target first, and another tier may be
    # writing this very header to its disk.
    data[_FLAGS_AND_SUM] = _SEALED_FLAGS + payload
    data[_CHECKSUM] = _header_checksum(data)


def check(
    block: Bytes,
    key: BlockKey,
    fingerprint: bytes,
    stored_bytes: int,
    payload_sum: int | None = None,
) -> str | None:
    """Why a block that came back must not be used; None if it is whole and the one meant.

    `block` is what was read, uint8 [n]; it may be shorter than it should be. `payload_sum` is the
    XXH3-64 of its `stored_bytes`, where the caller has made it already.
    """
    if block.size < HEADER_BYTES:
        return f"is {block.size} bytes long, expected at least a header of {HEADER_BYTES}"
    wrong = check_row(block, key, fingerprint)
    if wrong:
        return wrong
    data = block.data
    if data[_CHECKSUM] != _header_checksum(data):
        return "has a damaged header: its checksum differs"
    if data[_FLAGS] != _SEALED_FLAGS:
        return "was never sealed: it has no checksum of its payload"
    if block.size < HEADER_BYTES + stored_bytes:
        return f"is {block.size} bytes long, expected {HEADER_BYTES + stored_bytes}: truncated"
    found = (
        _payload_checksum(data[HEADER_BYTES : HEADER_BYTES + stored_bytes])
        if payload_sum is None
        else payload_sum.to_bytes(8, "little")
    )
    if data[_PAYLOAD_SUM] != found:
        return "has a damaged payload: its checksum differs"
    return None


def _names(data: memoryview, key: BlockKey) -> bool:
    return data[_FORMAT] == _THIS_FORMAT and data[_KEY] == _KEY_FIELDS.pack(
        key.group, len(key.hash), key.hash
    )


def _payload_checksum(payload: memoryview) -> bytes:
    """XXH3, 64 bits, little-endian.

    The library lets the interpreter go for each call with more than 64 KiB. Where several I/O
    threads run, to get it back takes longer than to sum up a small payload.
    """
    if payload.nbytes > _ONE_CALL_BYTES:
        return xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
    digest = xxhash.xxh3_64()
    for begin in range(0, payload.nbytes, _KEEPS_BYTES):
        digest.update(payload[begin : begin + _KEEPS_BYTES])
    return digest.intdigest().to_bytes(8, "little")


def _header_checksum(data: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(data[: _CHECKSUM.start]).to_bytes(8, "little")
