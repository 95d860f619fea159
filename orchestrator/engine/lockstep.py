"""One request at a time over all replicas of a node, so that a run comes out the same each time.

Replicas share lower tiers, and which of two finds what the other stores depends on who is faster.
In lockstep a replica serves a request when all that come before it in the stream have been served
and their blocks have come to rest. Whose turn it is stands in a file that all leaders map: the
number of the next request. Only the replica that takes this request writes it.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Final

from backends.errors import KvquayError

_WORD: Final = 8
_LOOK_S: Final = 0.001


class LockstepError(KvquayError):
    """The requests before one's own are not being served."""


class Turn:
    """One replica's view of whose turn it is."""

    def __init__(self, path: Path, patience_s: float) -> None:
        """Makes the file if nobody has yet. Raises OSError. `patience_s` without one request being
        served by anybody, and waiting ends with an error."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _WORD)
            self._file = mmap.mmap(fd, _WORD)
        finally:
            os.close(fd)
        self._next = memoryview(self._file).cast("Q")
        self._patience_s = patience_s
        self._mine = 0
        self._seen = (0, time.monotonic())

    def wait(self, index: int, timeout_s: float) -> bool:
        """Whether it is request `index`'s turn, waiting for that a while. Raises LockstepError."""
        end_s = time.monotonic() + timeout_s
        while (now := self._next[0]) != index:
            now_s = time.monotonic()
            if now != self._seen[0]:
                self._seen = (now, now_s)
            elif now_s - self._seen[1] > self._patience_s:
                raise LockstepError(
                    f"request {now} has not been served for {self._patience_s:.0f} s, and request "
                    f"{index} comes after it; see what became of the replica that takes it"
                )
            if now_s >= end_s:
                return False
            time.sleep(_LOOK_S)
        return True

    @property
    def others_acted(self) -> bool:
        """Whether another replica has served a request since this one did."""
        return self._next[0] != self._mine

    def ended(self, index: int) -> None:
        """Request `index` has been served, and nothing of it is under way any more."""
        self._mine = index + 1
        self._seen = (self._mine, time.monotonic())
        self._next[0] = self._mine

    def close(self) -> None:
        self._next.release()
        self._file.close()
