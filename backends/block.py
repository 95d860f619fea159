"""The 4 KiB header at the head of every row: what the payload is, and whether it may be used.

Layout (little endian): magic 8 bytes, format version u32, state u32, group index u32, key length
u32, key 64 bytes (zero padded), payload bytes u64, creation time in ns since the epoch u64. The
rest is zero. A row that is being filled is WRITING: its key stands there already, so that whoever
was told to use the row can check that it still means the same block, but nobody else may read it.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from backends.errors import ConfigError

MAGIC: Final = b"KVQBLOCK"
FORMAT_VERSION: Final = 1
EMPTY: Final = 0
WRITING: Final = 1
COMPLETE: Final = 2
KEY_BYTES_MAX: Final = 64
_HEADER = struct.Struct("<8sIIII64sQQ")
_STATE = struct.Struct("<I")
_STATE_OFFSET: Final = 12

Header = npt.NDArray[np.uint8]


def write_header(
    header: Header, *, key: bytes, group: int, payload_bytes: int, created_ns: int, state: int
) -> None:
    """Fill a row's header, uint8 [4096], in place."""
    if len(key) > KEY_BYTES_MAX:
        raise ConfigError(f"key has {len(key)} bytes, expected at most {KEY_BYTES_MAX}")
    packed = _HEADER.pack(
        MAGIC, FORMAT_VERSION, state, group, len(key), key, payload_bytes, created_ns
    )
    header[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)


def set_state(header: Header, state: int) -> None:
    header[_STATE_OFFSET : _STATE_OFFSET + _STATE.size] = np.frombuffer(
        _STATE.pack(state), dtype=np.uint8
    )


def holds(header: Header, key: bytes, group: int) -> bool:
    """Whether the row is meant for this key and group, filled or being filled."""
    magic, version, state, found_group, length, found_key, _, _ = _HEADER.unpack_from(header.data)
    return bool(
        magic == MAGIC
        and version == FORMAT_VERSION
        and state in (WRITING, COMPLETE)
        and found_group == group
        and found_key[:length] == key
    )
