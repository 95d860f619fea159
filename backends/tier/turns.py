"""When a store gets its turn: once for each key here, and once for each key among the replicas.

A key that is being stored already is not stored again; its second store waits for the first. Among
replicas the first in the key's order goes at once. Every other one looks again after a while for
each replica before it. Where replicas can tell each other, whoever goes leaves alone what another
one says that it is writing, says what it writes itself, and then writes what is not there yet. So a
block is written once, whoever comes when, and also where the replica that was to write it has died.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from backends.tier.jobs import Task
from backends.tier.naming import writer_position

# A claim that lasts longer is a writer that is stuck: rather written twice than lost.
_CLAIM_PATIENCE_S: Final = 10.0
# So much of what is left until a deadline may be spent waiting for others.
_DEADLINE_SHARE: Final = 0.5


class Claims(Protocol):
    """Where replicas tell each other what they are writing. Methods raise OSError."""

    def claim(self, block_ids: Iterable[int], /) -> set[int]:
        """Say that these are being written, but for those that another living replica says it is
        writing, which are given. Of two that want a block at the same moment one gets it."""

    def unclaim(self, block_ids: Iterable[int], /) -> None: ...


class Turns:
    """One storage's thread that lets stores go to the I/O threads."""

    def __init__(
        self,
        name: str,
        claims: Claims | None,
        *,
        replica: int,
        replicas: int,
        stagger_s: float,
        ready: Callable[[], bool],
        go: Callable[[list[Task]], None],
    ) -> None:
        """`replicas` 1: nobody else stores here. `ready` says whether stores may begin at all.

        `claims` None: the replicas cannot tell each other. `name` is the thread's.
        """
        self._claims = claims if replicas > 1 else None
        self._alone = replicas == 1
        self._replica = replica
        self._replicas = replicas
        self._stagger_s = stagger_s
        self._ready = ready
        self._go = go
        self._work = threading.Condition()
        self._new: deque[Task] = deque()
        self._waiting: list[tuple[float, int, float, Task]] = []
        self._numbers = itertools.count()
        self._active: dict[int, Task] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def add(self, tasks: Iterable[Task]) -> None:
        with self._work:
            self._new.extend(tasks)
            # Where there is nobody to wait for, they need no thread to go.
            if not self._alone or self._stopped or not self._ready():
                self._work.notify()
                return
            leading = self._lead()
        if leading:
            self._go(leading)

    def wait_until_ready(self, task: Task) -> None:
        """A task that has had its turn could not begin after all."""
        now_s = time.monotonic()
        self._wait(task, 0.0, now_s, now_s)
        self.wake()

    def ended(self, tasks: Sequence[Task]) -> list[Task]:
        """The stores of these tasks are over: those of the same keys that waited for them."""
        waited: list[Task] = []
        with self._work:
            for task in tasks:
                if self._active.get(task.block_id) is task:
                    del self._active[task.block_id]
                if task.followers:
                    waited += task.followers
                    task.followers = None
        if self._claims is not None:
            with contextlib.suppress(OSError):
                self._claims.unclaim([task.block_id for task in tasks])
        return waited

    def wake(self) -> None:
        with self._work:
            self._work.notify()

    def stop(self) -> None:
        with self._work:
            self._stopped = True
            self._work.notify()

    def join(self, end_s: float) -> bool:
        self._thread.join(max(0.0, end_s - time.monotonic()))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            with self._work:
                now_s = time.monotonic()
                while not self._stopped and not self._has_work(now_s):
                    self._work.wait(self._pause_s(now_s))
                    now_s = time.monotonic()
                if self._stopped:
                    return
                new = self._lead()
                due = []
                while self._waiting and self._waiting[0][0] <= now_s:
                    _, _, since_s, task = heapq.heappop(self._waiting)
                    due.append((task, since_s))
            due += [(task, now_s) for task in self._place(new)]
            tasks = [task for task, _ in due] if self._claims is None else self._claim(due)
            if tasks:
                self._go(tasks)

    def _has_work(self, now_s: float) -> bool:
        if not self._ready():
            return False
        return bool(self._new) or bool(self._waiting and self._waiting[0][0] <= now_s)

    def _pause_s(self, now_s: float) -> float | None:
        if not self._ready():
            return 0.02 if self._new or self._waiting else None
        return max(0.0, self._waiting[0][0] - now_s) if self._waiting else None

    def _lead(self) -> list[Task]:
        """New tasks, but for those whose key is being stored: they wait for that."""
        leading = []
        while self._new:
            task = self._new.popleft()
            if task.ended:
                continue
            leader = self._active.get(task.block_id)
            if leader is not None:
                if leader.followers is None:
                    leader.followers = []
                leader.followers.append(task)
                continue
            self._active[task.block_id] = task
            leading.append(task)
        return leading

    def _place(self, tasks: list[Task]) -> list[Task]:
        """Those that this replica is the first to write; the others wait for their turn."""
        if self._replicas == 1 or self._stagger_s == 0:
            return tasks
        first, now_s = [], time.monotonic()
        for task in tasks:
            position = writer_position(task.block_id, self._replica, self._replicas)
            if position == 0 or task.moved:
                first.append(task)
            else:
                self._wait(task, position * self._stagger_s, now_s, now_s)
        return first

    def _wait(self, task: Task, pause_s: float, now_s: float, since_s: float) -> None:
        if task.deadline_s is not None:
            pause_s = min(pause_s, max(0.0, task.deadline_s - now_s) * _DEADLINE_SHARE)
        task.seen_elsewhere = True
        with self._work:
            entry = (now_s + pause_s, next(self._numbers), since_s, task)
            heapq.heappush(self._waiting, entry)

    def _claim(self, due: list[tuple[Task, float]]) -> list[Task]:
        """Tasks whose turn it is, if nobody else is writing their block: it will be there soon.

        Each comes with the time since when it waits.
        """
        claimed: set[int] = set()
        if self._claims is not None and due:
            with contextlib.suppress(OSError):
                claimed = self._claims.claim(task.block_id for task, _ in due)
        go, now_s = [], time.monotonic()
        for task, since_s in due:
            task.seen_elsewhere = True
            patient = now_s - since_s < _CLAIM_PATIENCE_S and self._stagger_s > 0
            hasty = task.deadline_s is not None and task.deadline_s - now_s < 2 * self._stagger_s
            if task.block_id in claimed and patient and not hasty and not task.ended:
                self._wait(task, self._stagger_s, now_s, since_s)
            else:
                go.append(task)
        return go
