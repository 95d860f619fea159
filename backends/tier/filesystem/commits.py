"""Do many small things together: whoever has one adds it, and one of them does all that are there.

It keeps what has to be done under a lock short, and spares the threads from handing the lock, and
the interpreter, to each other for every one of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

_MOST: Final = 32
# For so long an item waits for others, though more are to come.
_WAIT_S: Final = 0.01
_Item = TypeVar("_Item")


class GroupCommit(Generic[_Item]):
    """`work` is given batches, by one thread at a time, that of somebody who added an item."""

    def __init__(
        self, work: Callable[[list[_Item]], None], few: int, more: Callable[[], bool]
    ) -> None:
        """Fewer than `few` items wait for others, but not for long, while `more` are to come.

        Whoever is one of those `more` has to call `settle` when it has been dealt with.
        """
        self._work = work
        self._few = few
        self._more = more
        self._working = threading.Lock()
        self._items: deque[_Item] = deque()
        self._since_s = 0.0

    def add(self, item: _Item) -> None:
        """It will be worked on by whoever calls `settle`, which the caller has to do too."""
        if not self._items:
            self._since_s = time.monotonic()
        self._items.append(item)

    def settle(self) -> None:
        """Work on what is there, if enough is there, or it has to wait no more."""
        # Whoever is at work looks once more after it has let go, so no item is left behind.
        while self._is_due() and self._working.acquire(blocking=False):
            try:
                batch: list[_Item] = []
                while self._items and len(batch) < _MOST:
                    batch.append(self._items.popleft())
                self._since_s = time.monotonic()
                if batch:
                    self._work(batch)
            finally:
                self._working.release()

    def _is_due(self) -> bool:
        count = len(self._items)
        if not count:
            return False
        if count >= self._few or not self._more():
            return True
        return time.monotonic() - self._since_s > _WAIT_S
