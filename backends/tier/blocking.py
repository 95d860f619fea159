"""The contract of a tier on top of calls that may block: threads, queues, deadlines, answers.

Derive from BlockingTier where a storage's client blocks, and write only what touches the storage.
Queues are bounded by blocks. Lookups are answered from memory and fed by probes in the background;
loads go before probes, and those before stores. A tier with an asynchronous client of its own
derives from Tier instead.
"""

from __future__ import annotations

import errno
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final

from backends.block import EMPTY, HEADER_BYTES, BlockKey, check, check_row, seal, set_state
from backends.errors import TierError
from backends.tier.base import (
    COUNTERS,
    Bytes,
    Evicted,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Tier,
    TierContext,
    Usage,
)
from backends.tier.gone import Gone

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_ABSENT_MAX: Final = 1 << 16
_DRAIN_STEP_S: Final = 0.02
_COUNTED: Final = {
    Outcome.CORRUPT: "corrupt",
    Outcome.SHED: "shed",
    Outcome.LATE: "late",
    Outcome.FAILED: "failed",
}


class BlockingTier(Tier):
    """A tier whose storage is reached by `has_block`, `write_block`, `read_block`, `set_aside`.

    Those four are called from the tier's own threads, several at once where `threads` is more than
    one, but for one key only `has_block` beside another. They may wait and may raise: OSError with
    ENOSPC or EDQUOT from `write_block` means that there is no room, any other exception fails that
    one key.
    """

    def __init__(
        self,
        context: TierContext,
        *,
        threads: int = 1,
        queue_blocks: int = 4096,
        recheck_s: float = 1.0,
        close_timeout_s: float = 30.0,
    ) -> None:
        """Call it last: the threads start here.

        `queue_blocks` bounds what waits, what is more is SHED. A MISS is looked up again after
        `recheck_s`, because others may have stored the key since; only where the tier is shared.
        """
        if threads < 1 or queue_blocks < 1:
            raise TierError(
                f"threads is {threads} and queue_blocks {queue_blocks}, expected both at least 1"
            )
        self.context = context
        self._queue_blocks = queue_blocks
        self._recheck_s = recheck_s
        self._close_timeout_s = close_timeout_s
        # Held for a few instructions only, never while the storage is asked.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._probes: deque[BlockKey] = deque()
        self._loads: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._jobs: dict[int, _JobState] = {}
        self._results: deque[JobResult] = deque()
        self._present: set[BlockKey] = set()
        self._absent: dict[BlockKey, float] = {}
        self._probing: set[BlockKey] = set()
        self._storing: dict[BlockKey, int] = {}
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._gone = Gone()
        self._closed = False
        # One key, one thread: a store finds what the store of the same key before it has written.
        self._busy: set[BlockKey] = set()
        self._deferred: dict[BlockKey, list[_Task]] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"{self.name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def has_block(self, key: BlockKey) -> bool:
        """Whether the storage has something whole under this key."""

    @abstractmethod
    def write_block(self, key: BlockKey, block: Bytes) -> None:
        """Publish a sealed block, whole or not at all. uint8 [row_bytes], not to be changed."""

    @abstractmethod
    def read_block(self, key: BlockKey, into: Bytes) -> int | None:
        """Read what stands under this key; bytes read, None if there is nothing.

        `into` is uint8 [row_bytes]. What was read is checked by the caller.
        """

    @abstractmethod
    def set_aside(self, key: BlockKey) -> None:
        """Take what stands under this key out of the way: it is wrong."""

    def close_storage(self) -> None:
        """Give back what the subclass holds. Called once, after the threads have ended."""

    def forget(self, key: BlockKey, *, evicted: bool = False) -> None:
        """This key is gone from the storage. For a subclass, from any thread."""
        with self._lock:
            self._present.discard(key)
            self._counters["evicted"] += evicted
        if evicted:
            self._gone.add((key,))

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        now_s = time.monotonic()
        with self._lock:
            self._end_late_ones()
            return [self._lookup(key, now_s) for key in keys]

    def submit_store(self, job: Job) -> None:
        self._submit(job, self._stores)

    def submit_load(self, job: Job) -> None:
        self._submit(job, self._loads)

    def poll(self) -> Sequence[JobResult]:
        with self._lock:
            self._end_late_ones()
            results = tuple(self._results)
            self._results.clear()
        return results

    def evicted(self) -> Evicted:
        return self._gone.take()

    def usage(self) -> Usage:
        """Counts what this process has stored or seen. A subclass that knows more says more."""
        with self._lock:
            blocks = len(self._present)
        return Usage(blocks * self.context.rows.row_bytes, blocks, None, None)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def drain(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while self._jobs:
                self._end_late_ones()
                left_s = end_s - time.monotonic()
                if not self._jobs or left_s <= 0:
                    break
                self._idle.wait(min(left_s, _DRAIN_STEP_S))
            return not self._jobs

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for state in list(self._jobs.values()):
                for task in [task for task in state.tasks if not task.begun]:
                    self._end(task, Outcome.SHED, "the tier was closed")
            for waiting in (self._loads, self._stores, self._probes, self._deferred):
                waiting.clear()
            self._work.notify_all()
        end_s = time.monotonic() + self._close_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.close_storage()

    # Below: called with the lock held, unless the name says otherwise.

    def _lookup(self, key: BlockKey, now_s: float) -> Lookup:
        if self._closed:
            return Lookup.MISS
        if key in self._present:
            return Lookup.HIT
        if key in self._storing or key in self._probing:
            return Lookup.PENDING
        seen_s = self._absent.get(key)
        if seen_s is not None and (
            not self.capabilities.shared or now_s - seen_s < self._recheck_s
        ):
            return Lookup.MISS
        if len(self._probes) >= self._queue_blocks:
            return Lookup.MISS
        self._probing.add(key)
        self._probes.append(key)
        self._work.notify()
        return Lookup.PENDING

    def _submit(self, job: Job, queue: deque[_Task]) -> None:
        with self._lock:
            if self._closed:
                raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
            if job.job_id in self._jobs:
                raise TierError(f"job id {job.job_id} is in use; give every job its own")
            state = _JobState(job, queue is self._loads)
            if not job.keys:
                self._results.append(state.result())
                return
            blocks = [self.context.rows.row_view(row) for row in job.rows]
            tasks = [_Task(state, index, block) for index, block in enumerate(blocks)]
            state.tasks.update(tasks)
            self._jobs[job.job_id] = state
            if not state.is_load:
                for key in job.keys:
                    self._storing[key] = self._storing.get(key, 0) + 1
            deferred = sum(len(tasks) for tasks in self._deferred.values())
            room = max(0, self._queue_blocks - len(queue) - deferred)
            queue.extend(tasks[:room])
            for task in tasks[room:]:
                self._end(task, Outcome.SHED, f"{self._queue_blocks} blocks wait already")
            self._work.notify(len(tasks))

    def _end_late_ones(self) -> None:
        now_s = time.monotonic()
        for state in [state for state in self._jobs.values() if state.late(now_s)]:
            for task in [task for task in state.tasks if not task.begun]:
                self._end(task, Outcome.LATE, "its deadline passed before it was begun")

    def _end(self, task: _Task, outcome: Outcome, reason: str = "", moved_bytes: int = 0) -> None:
        state, key = task.state, task.key
        task.begun = True
        state.tasks.discard(task)
        state.outcomes[task.index] = outcome
        state.reasons[task.index] = reason
        state.bytes_moved += moved_bytes
        if state.is_load:
            if outcome is Outcome.DONE:
                self._counters["loaded"] += 1
            else:
                set_state(task.block, EMPTY)
        else:
            self._counters["stored"] += moved_bytes > 0
            self._storing[key] -= 1
            if not self._storing[key]:
                del self._storing[key]
        if outcome is Outcome.DONE:
            self._present.add(key)
            self._absent.pop(key, None)
        elif outcome in (Outcome.CORRUPT, Outcome.MISSING):
            self._present.discard(key)
            self._saw_nothing(key)
        if outcome in _COUNTED:
            self._counters[_COUNTED[outcome]] += 1
        if not state.tasks:
            del self._jobs[state.job.job_id]
            self._results.append(state.result())
            self._idle.notify_all()

    def _saw_nothing(self, key: BlockKey) -> None:
        if len(self._absent) >= _ABSENT_MAX:
            self._absent.clear()
        self._absent[key] = time.monotonic()

    def _next(self) -> _Task | BlockKey | None:
        while not self._closed:
            if self._probes and not self._loads:
                return self._probes.popleft()
            queue = self._loads or self._stores
            if not queue:
                self._work.wait()
                continue
            task = queue.popleft()
            if task.begun:
                continue
            if task.state.late(time.monotonic()):
                self._end(task, Outcome.LATE, "its deadline passed before it was begun")
                continue
            if task.key in self._busy:
                self._deferred.setdefault(task.key, []).append(task)
                continue
            task.begun = True
            self._busy.add(task.key)
            return task
        return None

    def _release(self, key: BlockKey) -> None:
        """The key's thread is done with it: who waited for that is next."""
        self._busy.discard(key)
        deferred = self._deferred.pop(key, [])
        for task in reversed(deferred):
            (self._loads if task.state.is_load else self._stores).appendleft(task)
        self._work.notify(len(deferred))

    # Below: the tier's own threads, without the lock.

    def _serve(self) -> None:
        while True:
            with self._lock:
                work = self._next()
            if work is None:
                return
            if isinstance(work, BlockKey):
                self._probe(work)
            else:
                self._run(work)

    def _probe(self, key: BlockKey) -> None:
        try:
            found = self.has_block(key)
        # A probe that fails is a MISS for now; the storage's fault shows in loads and stores.
        except Exception:
            found = False
        with self._lock:
            self._probing.discard(key)
            if found:
                self._present.add(key)
            else:
                self._saw_nothing(key)

    def _run(self, task: _Task) -> None:
        moved_bytes = 0
        try:
            move = self._load if task.state.is_load else self._store
            outcome, reason, moved_bytes = move(task.key, task.block)
        # One key's trouble, of whatever kind, is that key's outcome and never ends the thread.
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in _NO_ROOM
            outcome = Outcome.SHED if full else Outcome.FAILED
            reason = f"{type(error).__name__}: {error}"
        if outcome is Outcome.DONE and task.state.late(time.monotonic()):
            outcome, reason, moved_bytes = Outcome.LATE, "its deadline passed on the way", 0
        with self._lock:
            self._release(task.key)
            self._end(task, outcome, reason, moved_bytes)

    def _store(self, key: BlockKey, block: Bytes) -> tuple[Outcome, str, int]:
        wrong = check_row(block, key, self.context.fingerprint)
        if wrong:
            return Outcome.FAILED, f"its row {wrong}", 0
        if self.has_block(key):
            return Outcome.DONE, "", 0
        seal(block, block.size - HEADER_BYTES)
        self.write_block(key, block)
        return Outcome.DONE, "", block.size

    def _load(self, key: BlockKey, block: Bytes) -> tuple[Outcome, str, int]:
        found_bytes = self.read_block(key, block)
        if found_bytes is None:
            return Outcome.MISSING, "it is not there", 0
        wrong = check(block[:found_bytes], key, self.context.fingerprint, block.size - HEADER_BYTES)
        if wrong:
            self.set_aside(key)
            return Outcome.CORRUPT, f"what stood there {wrong}", 0
        return Outcome.DONE, "", block.size


class _Task:
    """One key of a job. `begun` once a thread, or the deadline, has taken it."""

    __slots__ = ("begun", "block", "index", "key", "state")

    def __init__(self, state: _JobState, index: int, block: Bytes) -> None:
        self.state = state
        self.index = index
        self.key = state.job.keys[index]
        self.block = block
        self.begun = False


class _JobState:
    """A job in flight. `tasks` are those of its keys that have not ended."""

    __slots__ = ("began_s", "bytes_moved", "is_load", "job", "outcomes", "reasons", "tasks")

    def __init__(self, job: Job, is_load: bool) -> None:
        self.job = job
        self.is_load = is_load
        self.began_s = time.monotonic()
        self.tasks: set[_Task] = set()
        self.outcomes = [Outcome.FAILED] * len(job.keys)
        self.reasons = [""] * len(job.keys)
        self.bytes_moved = 0

    def late(self, now_s: float) -> bool:
        return self.job.deadline_s is not None and now_s >= self.job.deadline_s

    def result(self) -> JobResult:
        return JobResult(
            self.job.job_id,
            tuple(self.outcomes),
            tuple(self.reasons),
            self.bytes_moved,
            time.monotonic() - self.began_s,
        )
