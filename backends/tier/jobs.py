"""Jobs in flight, key by key: who has begun what, what became of it, and what `poll` gives.

One lock, held for a few instructions; never while anything waits.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from backends.block import EMPTY, BlockKey, set_state
from backends.errors import TierError
from backends.tier.base import Bytes, Job, JobResult, Outcome, Rows

_LATE = "its deadline passed first"


class Task:
    """One key of a job. Its row may be touched between `begin` and `end`, and only then.

    `used_ns` orders uses: keys at the front of a batch are more recent. `tried` are the volumes
    that failed it; `moved`: it was sent on from one path to another. `seen_elsewhere`: another
    replica may have stored it by now. `followers`: stores of the same key that wait for this one.
    """

    __slots__ = (
        *("began_s", "begun", "block_id", "ended", "followers", "index", "key", "moved"),
        *("seen_elsewhere", "state", "tried", "used_ns"),
    )

    def __init__(self, state: JobState, index: int, block_id: int, used_ns: int) -> None:
        self.state = state
        self.index = index
        self.key: BlockKey = state.job.keys[index]
        self.block_id = block_id
        self.used_ns = used_ns
        self.begun = False
        self.ended = False
        self.tried: tuple[int, ...] = ()
        self.moved = False
        self.seen_elsewhere = False
        self.began_s = 0.0
        self.followers: list[Task] | None = None

    @property
    def deadline_s(self) -> float | None:
        return self.state.job.deadline_s

    def is_late(self) -> bool:
        deadline_s = self.state.job.deadline_s
        return deadline_s is not None and time.monotonic() >= deadline_s


class TaskRow:
    """The row of a task, from when its bytes come."""

    def __init__(self, jobs: Jobs, task: Task) -> None:
        self._jobs = jobs
        self._task = task

    def take(self) -> Bytes | None:
        return self._jobs.row(self._task) if self._jobs.begin(self._task) else None

    def give_back(self) -> None:
        self._jobs.put_back(self._task)


class JobState:
    """A job that has no result yet."""

    __slots__ = ("began_s", "bytes_moved", "is_load", "job", "left", "outcomes", "reasons", "tasks")

    def __init__(self, job: Job, is_load: bool) -> None:
        self.job = job
        self.is_load = is_load
        self.began_s = time.monotonic()
        self.left = len(job.keys)
        self.outcomes = [Outcome.FAILED] * len(job.keys)
        self.reasons = [""] * len(job.keys)
        self.bytes_moved = 0
        self.tasks: list[Task] = []


class Jobs:
    """All jobs of one tier."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._states: dict[int, JobState] = {}
        self._results: deque[JobResult] = deque()
        self._deadlines: list[tuple[float, int, JobState]] = []
        self._numbers = itertools.count()
        self._storing: dict[int, list[float]] = {}
        self._loading: dict[int, int] = {}
        self.counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.stores = 0
        self.loads = 0

    def submit(self, job: Job, ids: Sequence[int], used_ns: int, *, is_load: bool) -> JobState:
        """Enter a job; its tasks are in its state. Raises TierError for an id that is in use."""
        state = JobState(job, is_load)
        state.tasks = [Task(state, i, block_id, used_ns - i) for i, block_id in enumerate(ids)]
        with self._lock:
            if job.job_id in self._states:
                raise TierError(f"job id {job.job_id} is in use; give every job its own")
            if not state.tasks:
                self._results.append(self._result(state))
                return state
            self._states[job.job_id] = state
            if job.deadline_s is not None:
                entry = (job.deadline_s, next(self._numbers), state)
                heapq.heappush(self._deadlines, entry)
            if is_load:
                self.loads += len(ids)
                for block_id in ids:
                    self._loading[block_id] = self._loading.get(block_id, 0) + 1
            else:
                self.stores += len(ids)
                for block_id in ids:
                    times = self._storing.get(block_id)
                    if times is None:
                        self._storing[block_id] = [state.began_s]
                    else:
                        times.append(state.began_s)
        return state

    def storing_since_s(self, block_id: int) -> float | None:
        """When the oldest store of this block that has not ended was submitted. Takes no lock."""
        times = self._storing.get(block_id)
        return times[0] if times else None

    def is_loading(self, block_id: int) -> bool:
        return block_id in self._loading

    def row(self, task: Task) -> Bytes:
        return self._rows.row_view(task.state.job.rows[task.index])

    def begin(self, task: Task) -> bool:
        """Take a task for oneself; False where it has ended, or ends now because it is late."""
        return bool(self.begin_all([task])[0])

    def begin_all(self, tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
        """`begin` each: those that may be begun, and those that may not."""
        begun: list[Task] = []
        ended: list[Task] = []
        with self._lock:
            now_s = time.monotonic()
            for task in tasks:
                if not task.ended and task.is_late():
                    self._end(task, Outcome.LATE, _LATE, 0)
                if task.ended:
                    ended.append(task)
                else:
                    task.begun, task.began_s = True, now_s
                    begun.append(task)
        return begun, ended

    def put_back(self, task: Task) -> None:
        """Give up a task that was begun; its row is touched no more until it is begun again.

        One that is late ends now, as it was passed over when its deadline came.
        """
        with self._lock:
            task.begun = False
            if not task.ended and task.is_late():
                self._end(task, Outcome.LATE, _LATE, 0)

    def end(self, task: Task, outcome: Outcome, reason: str = "", moved_bytes: int = 0) -> None:
        """A task that its caller has begun, or that nobody has, ends. The first end counts."""
        with self._lock:
            if not task.ended:
                self._end(task, outcome, reason, moved_bytes)

    def end_all(self, tasks: Iterable[Task], outcome: Outcome, moved_bytes: int) -> None:
        """`end` for many, each of which has moved so many bytes."""
        with self._lock:
            for task in tasks:
                if not task.ended:
                    self._end(task, outcome, "", moved_bytes)

    def end_unbegun(self, outcome: Outcome, reason: str) -> None:
        """End every task that nobody has begun."""
        with self._lock:
            for state in list(self._states.values()):
                for task in state.tasks:
                    if not task.begun and not task.ended:
                        self._end(task, outcome, reason, 0)

    def poll(self) -> list[JobResult]:
        with self._lock:
            self._expire()
            results = list(self._results)
            self._results.clear()
        return results

    def drain(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._expire()
                left_s = end_s - time.monotonic()
                if not self._states or left_s <= 0:
                    return not self._states
                due_s = self._deadlines[0][0] - time.monotonic() if self._deadlines else left_s
                self._idle.wait(max(0.0, min(left_s, due_s)))

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            state = heapq.heappop(self._deadlines)[2]
            for task in state.tasks:
                if not task.begun and not task.ended:
                    self._end(task, Outcome.LATE, _LATE, 0)

    def _end(self, task: Task, outcome: Outcome, reason: str, moved_bytes: int) -> None:
        state = task.state
        if outcome is Outcome.DONE and task.begun and task.is_late():
            outcome, reason, moved_bytes = Outcome.LATE, "its deadline passed on the way", 0
        task.ended = True
        state.outcomes[task.index] = outcome
        state.reasons[task.index] = reason
        state.bytes_moved += moved_bytes
        state.left -= 1
        self.counts[outcome] += 1
        if state.is_load:
            self.loads -= 1
            left = self._loading[task.block_id] - 1
            if left:
                self._loading[task.block_id] = left
            else:
                del self._loading[task.block_id]
            if outcome is not Outcome.DONE:
                set_state(self.row(task), EMPTY)
        else:
            self.stores -= 1
            times = self._storing[task.block_id]
            times.remove(state.began_s)
            if not times:
                del self._storing[task.block_id]
        if not state.left:
            del self._states[state.job.job_id]
            self._results.append(self._result(state))
            state.tasks = []
            self._idle.notify_all()

    def _result(self, state: JobState) -> JobResult:
        return JobResult(
            state.job.job_id,
            tuple(state.outcomes),
            tuple(state.reasons),
            state.bytes_moved,
            time.monotonic() - state.began_s,
        )
