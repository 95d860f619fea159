"""Rows for tests: memory, keys and bytes that are known in advance, so that every load is verified.

Nothing here is random: the bytes of a block are a function of its key and its fingerprint, in this
process and in every other.
"""

from __future__ import annotations

import hashlib
import mmap

import numpy as np
import xxhash

from backends.block import (
    COMPLETE,
    HEADER_BYTES,
    BlockKey,
    check_row,
    read_header,
    seal,
    write_header,
)
from backends.config import ParallelConfig
from backends.tier.base import Bytes, TierContext

FINGERPRINT = hashlib.sha256(b"the namespace of a test").digest()
_SLOTS = 2
_PAYLOADS_KEPT = 64
_CREATED_NS = 1_700_000_000_000_000_000


def make_keys(label: str, count: int, group: int = 0) -> tuple[BlockKey, ...]:
    """`count` different keys; the same label gives the same keys."""
    hashes = (hashlib.sha256(f"{label} {number}".encode()).digest() for number in range(count))
    return tuple(BlockKey(digest, group) for digest in hashes)


def payload_of(key: BlockKey, fingerprint: bytes, payload_bytes: int) -> Bytes:
    """What a block of this key holds behind its header, uint8 [payload_bytes]."""
    seed = xxhash.xxh3_64_intdigest(fingerprint + key.group.to_bytes(4, "little") + key.hash)
    return np.random.default_rng(seed).integers(0, 256, payload_bytes, dtype=np.uint8)


def stored_block(key: BlockKey, fingerprint: bytes, row_bytes: int) -> Bytes:
    """The sealed block as a tier stores it, header and payload: uint8 [row_bytes]."""
    block = np.zeros(row_bytes, dtype=np.uint8)
    _fill(block, key, fingerprint, payload_of(key, fingerprint, row_bytes - HEADER_BYTES))
    seal(block, row_bytes - HEADER_BYTES)
    return block


class RowBuffer:
    """`Rows` in anonymous memory, aligned to 4096 bytes as a region's are."""

    def __init__(self, rows: int, row_bytes: int, fingerprint: bytes = FINGERPRINT) -> None:
        if row_bytes <= HEADER_BYTES or row_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"row_bytes is {row_bytes}, expected a multiple of {mmap.PAGESIZE} with room for a "
                f"header of {HEADER_BYTES} bytes and a payload"
            )
        self.rows = rows
        self.fingerprint = fingerprint
        self._row_bytes = row_bytes
        flat = np.frombuffer(mmap.mmap(-1, rows * row_bytes), dtype=np.uint8)
        self._rows = flat.reshape(rows, row_bytes)
        self._payloads: dict[BlockKey, Bytes] = {}

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def row_view(self, row: int) -> Bytes:
        if not 0 <= row < self.rows:
            raise IndexError(f"row is {row}, expected 0 <= row < {self.rows}")
        view: Bytes = self._rows[row]
        return view

    def fill(self, row: int, key: BlockKey) -> None:
        """Make the row this key's block: COMPLETE, not sealed."""
        _fill(self.row_view(row), key, self.fingerprint, self.payload(key))

    def payload(self, key: BlockKey) -> Bytes:
        """`payload_of` this key here; the last few dozen are kept, because they are asked again."""
        found = self._payloads.get(key)
        if found is None:
            if len(self._payloads) >= _PAYLOADS_KEPT:
                self._payloads.clear()
            found = payload_of(key, self.fingerprint, self._row_bytes - HEADER_BYTES)
            self._payloads[key] = found
        return found

    def scribble(self, row: int, value: int = 0xA5) -> None:
        """Put bytes there that are nobody's block."""
        self.row_view(row)[:] = value

    def wrong(self, row: int, key: BlockKey) -> str | None:
        """Why the row is not this key's block, payload included; None if it is."""
        block = self.row_view(row)
        why = check_row(block, key, self.fingerprint)
        if why:
            return f"row {row} {why}"
        differs = np.flatnonzero(block[HEADER_BYTES:] != self.payload(key))
        if differs.size:
            return f"row {row} has {differs.size} wrong payload bytes, the first at {differs[0]}"
        return None

    def state(self, row: int) -> int:
        """EMPTY, WRITING or COMPLETE, as the row's header says."""
        return read_header(self.row_view(row)).state


def make_context(
    rows: RowBuffer, *, data_parallel_index: int = 0, data_parallel_size: int = 1
) -> TierContext:
    """What a tier over these rows is told, as the leader of one replica of one worker."""
    parallel = ParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=data_parallel_index,
        data_parallel_size=data_parallel_size,
        data_parallel_rank_local=data_parallel_index,
        data_parallel_size_local=data_parallel_size,
        node_rank=0,
        nnodes=1,
        local_rank=0,
        local_world_size=1,
    )
    return TierContext(
        fingerprint=rows.fingerprint,
        manifest={"purpose": "test", "fingerprint": rows.fingerprint.hex()},
        rows=rows,
        parallel=parallel,
        engine_id=f"test_dp{data_parallel_index}",
    )


def _fill(block: Bytes, key: BlockKey, fingerprint: bytes, payload: Bytes) -> None:
    lengths = [payload.size // _SLOTS] * _SLOTS
    write_header(
        block,
        key,
        fingerprint=fingerprint,
        slot_lengths=lengths,
        created_ns=_CREATED_NS,
        state=COMPLETE,
    )
    block[HEADER_BYTES:] = payload
