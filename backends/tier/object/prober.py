"""Find out about many keys that nobody knows, away from the engine's thread.

Keys are gathered for a moment. One by one costs a small request each, many at a time; a listing of
the whole namespace costs a request for a thousand blocks. Whichever is less is done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from backends.block import BlockKey
from backends.tier.object.client import PAGE_NAMES

# A page of a listing takes as long as so many requests for one object, which go side by side.
_PAGE_COST: Final = 8
_THREADS: Final = 8


class ObjectProber:
    """Threads that look whether there are objects."""

    def __init__(
        self,
        *,
        gather_s: float,
        known: Callable[[], int],
        useful: Callable[[], bool],
        holds: Callable[[int, BlockKey], bool],
        list_all: Callable[[], set[int] | None],
        found: Callable[[int, BlockKey, bool], None],
        threads: int = _THREADS,
    ) -> None:
        """`known` is how many blocks there are, as far as is known. `list_all` gives the ids of
        all there are, None if it cannot; `found(id, key, there)` gets each answer."""
        self._gather_s = gather_s
        self._known = known
        self.useful = useful
        self._holds = holds
        self._list_all = list_all
        self._found = found
        self._work = threading.Condition()
        self._queue: deque[tuple[int, BlockKey]] = deque()
        self._since_s = 0.0
        self._listing = False
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvquay-object-probe-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, block_id: int, key: BlockKey) -> None:
        with self._work:
            if not self._queue:
                self._since_s = time.monotonic()
            self._queue.append((block_id, key))
            self._work.notify()

    def stop(self) -> None:
        with self._work:
            self._stopped = True
            self._queue.clear()
            self._work.notify_all()

    def join(self, end_s: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while True:
            batch = self._next()
            if not batch:
                return
            if len(batch) == 1:
                self._ask(*batch[0])
            else:
                self._ask_by_listing(batch)

    def _next(self) -> list[tuple[int, BlockKey]]:
        with self._work:
            while not self._stopped:
                if not self._queue:
                    self._work.wait()
                    continue
                ripe_s = self._since_s + self._gather_s - time.monotonic()
                if ripe_s > 0:
                    self._work.wait(ripe_s)
                    continue
                pages = self._known() // PAGE_NAMES + 1
                if not self._listing and len(self._queue) > pages * _PAGE_COST:
                    self._listing = True
                    batch = list(self._queue)
                    self._queue.clear()
                    return batch
                return [self._queue.popleft()]
            return []

    def _ask(self, block_id: int, key: BlockKey) -> None:
        try:
            there = self._holds(block_id, key)
        # The store's fault shows in loads and stores; for now the key is not there.
        except Exception:
            there = False
        self._found(block_id, key, there)

    def _ask_by_listing(self, batch: list[tuple[int, BlockKey]]) -> None:
        try:
            there = self._list_all()
        except Exception:
            there = set()
        with self._work:
            self._listing = False
        if there is None:
            for block_id, key in batch:
                self._ask(block_id, key)
            return
        for block_id, key in batch:
            self._found(block_id, key, block_id in there)
