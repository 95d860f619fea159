"""The headers of the region's rows, kept by whoever hands the rows out.

A row says which block it is meant for before any worker is told to write it, and says that it is
whole only once all of them have: see `backends.block`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from backends.block import COMPLETE, WRITING, BlockKey, set_state, write_header
from backends.stack.primary import NO_ROW


class RowHeaders:
    """Headers, uint8 [rows, 4096 or more]. `slot_lengths[group]` are what each worker of this node
    keeps of an entry, in bytes."""

    def __init__(
        self,
        headers: npt.NDArray[np.uint8],
        fingerprint: bytes,
        slot_lengths: Sequence[Sequence[int]],
    ) -> None:
        self._headers: npt.NDArray[np.uint8] | None = headers
        self._fingerprint = fingerprint
        self._slot_lengths = slot_lengths

    def announce(self, keys: Iterable[bytes], rows: Iterable[int], group: int) -> None:
        """These rows are about to be written with these keys' blocks of one group."""
        headers, now_ns = self._headers, time.time_ns()
        assert headers is not None
        for key, row in zip(keys, rows, strict=True):
            if row != NO_ROW:
                write_header(
                    headers[row],
                    BlockKey(key, group),
                    fingerprint=self._fingerprint,
                    slot_lengths=self._slot_lengths[group],
                    created_ns=now_ns,
                    state=WRITING,
                )

    def complete(self, rows: Iterable[int]) -> None:
        """All workers have written these rows."""
        headers = self._headers
        assert headers is not None
        for row in rows:
            if row != NO_ROW:
                set_state(headers[row], COMPLETE)

    def close(self) -> None:
        """Let the region unmap."""
        self._headers = None
