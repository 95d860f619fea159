"""The headers of the region's rows, kept by whoever hands the rows out.

A row says which block it is meant for before any worker is told to write it, and says that it is
whole only once all of them have: see `backends.block`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from backends.block import HeaderRows
from backends.stack.rows import NO_ROW


class RowHeaders:
    """Headers, uint8 [rows, 4096 or more]. `slot_lengths[group]` are what each worker of this node
    keeps of an entry, in bytes."""

    def __init__(
        self,
        headers: npt.NDArray[np.uint8],
        fingerprint: bytes,
        slot_lengths: Sequence[Sequence[int]],
    ) -> None:
        self._rows: HeaderRows | None = HeaderRows(
            headers, fingerprint=fingerprint, slot_lengths=slot_lengths
        )
        # Rows in which a tier, or an earlier owner of this memory, may have left more than a header
        # of ours. Most of a header is zeroes, and not writing them again is most of what it costs.
        self._foreign = bytearray(b"\1") * len(headers)

    def announce(self, keys: Sequence[bytes], rows: Sequence[int], group: int) -> None:
        """These rows are about to be written with these keys' blocks of one group."""
        headers, foreign = self._rows, self._foreign
        assert headers is not None
        if NO_ROW in rows:
            given = [row != NO_ROW for row in rows]
            keys, rows = list(compress(keys, given)), list(compress(rows, given))
        unclear = list(compress(rows, map(foreign.__getitem__, rows)))
        if unclear:
            headers.clear(unclear)
            for row in unclear:
                foreign[row] = 0
        headers.announce(keys, rows, group, time.time_ns())

    def overwritten(self, rows: Iterable[int]) -> None:
        """A tier may write anything to these rows, until they are announced again."""
        foreign = self._foreign
        for row in rows:
            foreign[row] = 1

    def complete(self, rows: Sequence[int]) -> None:
        """All workers have written these rows."""
        assert self._rows is not None
        self._rows.complete([row for row in rows if row != NO_ROW] if NO_ROW in rows else rows)

    def close(self) -> None:
        """Let the region unmap."""
        self._rows = None
