"""The counts of a ledger while one thread, of all processes, holds them: see `Ledger.counting`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.tier.filesystem.ledgerfile import (
    COUNT,
    COUNTS,
    COUNTS_AT,
    COUNTS_LOCK,
    QUARANTINE_SHARD,
)

if TYPE_CHECKING:
    from backends.tier.filesystem.ledger import Ledger


class Counting:
    """The counts while they are held. What changed is written when they are let go.

    That raises OSError if it fails. What was added is not in the ledger then, and the shards have
    to be counted: see `Ledger.take_doubtful`.
    """

    __slots__ = (
        *("_data", "_file", "_first", "_last", "_ledger", "_more_blocks", "_more_bytes"),
        "released_bytes",
    )

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._file = ledger.file
        self._data = bytearray()
        self._first, self._last = COUNTS, -1
        self._more_bytes = self._more_blocks = 0
        self.released_bytes = 0
        """Reservations that end with this, because what they were for is counted."""

    def __enter__(self) -> Counting:
        self._file.hold(COUNTS_LOCK)
        try:
            self._data = self._file.read(COUNTS_AT, COUNTS * COUNT.size)
        except BaseException:
            self._file.let_go(COUNTS_LOCK)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._last >= 0:
                part = slice(self._first * COUNT.size, (self._last + 1) * COUNT.size)
                self._ledger.write_counts(
                    COUNTS_AT + part.start,
                    bytes(self._data[part]),
                    self._more_bytes,
                    self._more_blocks,
                    self.released_bytes,
                )
            elif self.released_bytes:
                # In shards that were never counted: whoever counts them finds the files.
                self._ledger.release(self.released_bytes)
        except OSError:
            self._ledger.doubt(range(self._first, self._last + 1))
            raise
        finally:
            self._file.let_go(COUNTS_LOCK)

    def get(self, shard: int) -> tuple[int, int]:
        """Bytes and blocks; -1 blocks: not counted yet."""
        nbytes, blocks = COUNT.unpack_from(self._data, shard * COUNT.size)
        return nbytes, blocks

    def add(self, shard: int, nbytes: int, blocks: int) -> None:
        old_bytes, old_blocks = self.get(shard)
        # What was never counted will be.
        if old_blocks >= 0:
            self.set(shard, max(0, old_bytes + nbytes), max(0, old_blocks + blocks))

    def add_all(self, shards: Sequence[int], nbytes: Sequence[int], blocks: int) -> None:
        """`add` so many bytes, and `blocks`, to each of these shards, none of them the quarantine;
        one may be named several times."""
        if not shards:
            return
        counts = np.frombuffer(self._data, "<i8").reshape(COUNTS, 2)
        more = np.zeros_like(counts)
        np.add.at(more[:, 0], shards, nbytes)
        np.add.at(more[:, 1], shards, blocks)
        more[counts[:, 1] < 0] = 0
        np.maximum(more, -counts, out=more, where=more < 0)
        counts += more
        self._first = min(self._first, *shards)
        self._last = max(self._last, *shards)
        more_bytes, more_blocks = more.sum(axis=0).tolist()
        self._more_bytes += more_bytes
        self._more_blocks += more_blocks

    def set(self, shard: int, nbytes: int, blocks: int) -> None:
        old_bytes, old_blocks = self.get(shard)
        COUNT.pack_into(self._data, shard * COUNT.size, nbytes, blocks)
        self._first, self._last = min(self._first, shard), max(self._last, shard)
        self._more_bytes += nbytes - old_bytes
        if shard != QUARANTINE_SHARD:
            self._more_blocks += blocks - max(0, old_blocks)
