"""The I/O threads of one path and the two queues before them: loads go first.

So that a load finds a thread even where stores take long, some threads never store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from backends.tier.jobs import Task


def store_threads_of(threads: int) -> int:
    """How many of so many threads may store at a time: a quarter is left to loads."""
    return max(1, threads - (threads + 3) // 4)


def threads_of(store_threads: int) -> int:
    """How many threads, where so many may store at a time: a quarter as many besides for loads."""
    return store_threads + -(-store_threads // 4)


class Pool:
    """`threads` threads that run tasks; at most `store_threads` of them store at a time."""

    def __init__(
        self,
        name: str,
        threads: int,
        run: Callable[[list[Task]], None],
        store_threads: int | None = None,
        batch: int = 1,
    ) -> None:
        """`store_threads` None: `store_threads_of(threads)`. A thread is given loads or stores, up
        to `batch` of them where more wait than there are threads."""
        self.store_threads = store_threads or store_threads_of(threads)
        self._run = run
        self._batch = batch
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        self._storing = 0
        self._idle = 0
        self._stopped = False
        self._since_s: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, tasks: Iterable[Task], *, loads: bool) -> None:
        with self._lock:
            (self._loads if loads else self._stores).extend(tasks)
            # The first one that comes wakes the next, so that a caller wakes no more than one.
            self._wake_one(self._storing)

    def stores_wait(self) -> bool:
        """Whether stores wait for a thread. Takes no lock."""
        return bool(self._stores)

    def busy_for_s(self) -> float:
        """How long the call that has been under way longest has taken so far. Takes no lock."""
        oldest_s = min(list(self._since_s.values()), default=None)
        return 0.0 if oldest_s is None else time.monotonic() - oldest_s

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._work.notify_all()

    def join(self, end_s: float) -> bool:
        """Wait for the threads until `end_s`, on the clock of `time.monotonic`."""
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, number: int) -> None:
        while True:
            with self._lock:
                tasks, storing = self._next()
                if not tasks:
                    return
                self._storing += storing
                self._since_s[number] = time.monotonic()
            try:
                self._run(tasks)
            finally:
                with self._lock:
                    del self._since_s[number]
                    self._storing -= storing
                # A queue's row must not stay alive in a thread that waits for the next.
                tasks = []

    def _next(self) -> tuple[list[Task], int]:
        """Loads or stores, and how many threads of those that may store that takes."""
        while True:
            if self._loads:
                tasks = self._take(self._loads, len(self._threads))
                self._wake_one(self._storing)
                return tasks, 0
            if self._stores and self._storing < self.store_threads:
                tasks = self._take(self._stores, self.store_threads)
                self._wake_one(self._storing + 1)
                return tasks, 1
            if self._stopped:
                return [], 0
            self._idle += 1
            self._work.wait()
            self._idle -= 1

    def _take(self, queue: deque[Task], threads: int) -> list[Task]:
        count = max(1, min(self._batch, len(queue) // threads))
        return [queue.popleft() for _ in range(count)]

    def _wake_one(self, storing: int) -> None:
        """Wake a thread that waits, if there is something that it may do."""
        if self._idle and (self._loads or (self._stores and storing < self.store_threads)):
            self._work.notify()
