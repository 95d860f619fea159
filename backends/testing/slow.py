"""SlowTier: another tier, far away. For tests of what a slow disk or network does to its users."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from backends.block import BlockKey
from backends.errors import TierError
from backends.testing.wrapper import TierWrapper
from backends.tier.base import Job, JobResult, Lookup, Outcome, Tier, TierContext

_DRAIN_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class _Travelling:
    job: Job
    is_load: bool
    began_s: float
    arrives_s: float


class SlowTier(TierWrapper):
    """Hands every job to the inner tier late: it stands for a distance and a narrow pipe.

    A job arrives `latency_s` after all jobs before it have gone through a pipe of `bytes_per_s`
    (None: as wide as you like). `jitter` (0 to 1) varies each job's latency by up to that share,
    by `seed` alone: the same jobs are delayed alike every time. The first lookup of a key is
    PENDING for `lookup_latency_s`.

    It keeps the contract: jobs whose deadline passes on the way are LATE, and never touch the
    inner tier. It has no thread; jobs move on when it is polled, asked or drained.
    """

    def __init__(
        self,
        inner: Tier,
        context: TierContext,
        *,
        latency_s: float,
        bytes_per_s: float | None = None,
        jitter: float = 0.0,
        lookup_latency_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner, context)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._jitter = jitter
        self._lookup_latency_s = lookup_latency_s
        self._random = random.Random(seed)
        self._pipe_free_s = 0.0
        self._travelling: dict[int, _Travelling] = {}
        self._inside: dict[int, _Travelling] = {}
        self._results: list[JobResult] = []
        self._asked_s: dict[BlockKey, float] = {}
        self._not_served = {"late": 0, "shed": 0}
        self._closed = False

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        self._move_on()
        answers = list(self.inner.lookup(keys))
        if self._closed:
            return answers
        now_s = time.monotonic()
        stored = {
            key for item in self._travelling.values() if not item.is_load for key in item.job.keys
        }
        for index, key in enumerate(keys):
            underway = key in stored and answers[index] is Lookup.MISS
            if underway or self._being_asked(key, now_s):
                answers[index] = Lookup.PENDING
        return answers

    def submit_store(self, job: Job) -> None:
        self._send(job, is_load=False)

    def submit_load(self, job: Job) -> None:
        self._send(job, is_load=True)

    def poll(self) -> Sequence[JobResult]:
        self._move_on()
        results, self._results = self._results, []
        for result in self.inner.poll():
            item = self._inside.pop(result.job_id)
            if not item.is_load:
                # Whoever stored a key need not ask far away whether it is there.
                self._asked_s.update(dict.fromkeys(item.job.keys, -math.inf))
            seconds = time.monotonic() - item.began_s
            results.append(dataclasses.replace(result, seconds=seconds))
        return results

    def counters(self) -> dict[str, int]:
        counts = self.inner.counters()
        return counts | {name: counts[name] + more for name, more in self._not_served.items()}

    def drain(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while True:
            self._move_on()
            left_s = end_s - time.monotonic()
            if not self._travelling:
                return self.inner.drain(max(0.0, left_s))
            if left_s <= 0:
                return False
            time.sleep(min(left_s, _DRAIN_STEP_S))

    def close(self) -> None:
        self._closed = True
        for item in list(self._travelling.values()):
            self._end(item, Outcome.SHED, "the tier was closed")
        self.inner.close()

    def _being_asked(self, key: BlockKey, now_s: float) -> bool:
        if not self._lookup_latency_s:
            return False
        return now_s - self._asked_s.setdefault(key, now_s) < self._lookup_latency_s

    def _send(self, job: Job, *, is_load: bool) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
        if job.job_id in self._travelling or job.job_id in self._inside:
            raise TierError(f"job id {job.job_id} is in use; give every job its own")
        now_s = time.monotonic()
        if self._bytes_per_s is not None:
            size_bytes = len(job.keys) * self.context.rows.row_bytes
            self._pipe_free_s = max(self._pipe_free_s, now_s) + size_bytes / self._bytes_per_s
        latency_s = self._latency_s * (1 + self._jitter * self._random.uniform(-1, 1))
        arrives_s = max(self._pipe_free_s, now_s) + latency_s
        self._travelling[job.job_id] = _Travelling(job, is_load, now_s, arrives_s)

    def _move_on(self) -> None:
        now_s = time.monotonic()
        for item in sorted(self._travelling.values(), key=lambda item: item.arrives_s):
            deadline_s = item.job.deadline_s
            if item.arrives_s <= now_s and (deadline_s is None or now_s < deadline_s):
                del self._travelling[item.job.job_id]
                self._inside[item.job.job_id] = item
                submit = self.inner.submit_load if item.is_load else self.inner.submit_store
                submit(item.job)
            elif deadline_s is not None and now_s >= deadline_s:
                self._end(item, Outcome.LATE, "its deadline passed on the way to the tier")

    def _end(self, item: _Travelling, outcome: Outcome, reason: str) -> None:
        del self._travelling[item.job.job_id]
        seconds = time.monotonic() - item.began_s
        self._not_served[outcome.value] += len(item.job.keys)
        self._results.append(
            self.unserved(item.job, outcome, reason, is_load=item.is_load, seconds=seconds)
        )
