"""Do many small things together: whoever has one adds it, and one of them does all that are there.

It keeps what has to be done under a lock short, and spares the threads from handing the lock, and
the interpreter, to each other for every one of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

_MOST: Final = 32
_Item = TypeVar("_Item")


class GroupCommit(Generic[_Item]):
    """`work` is given batches, by one thread at a time, that of somebody who added an item."""

    def __init__(self, work: Callable[[list[_Item]], None]) -> None:
        self._work = work
        self._working = threading.Lock()
        self._items: deque[_Item] = deque()

    def add(self, item: _Item) -> None:
        """It will be worked on: by this thread, or by the one that is at it now."""
        self._items.append(item)
        # Whoever is at work looks once more after it has let go, so no item is left behind.
        while self._items and self._working.acquire(blocking=False):
            try:
                batch: list[_Item] = []
                while self._items and len(batch) < _MOST:
                    batch.append(self._items.popleft())
                if batch:
                    self._work(batch)
            finally:
                self._working.release()
