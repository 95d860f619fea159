"""What tiers that stand in front of another tier share."""

from __future__ import annotations

from collections.abc import Sequence

from backends.block import EMPTY, BlockKey, set_state
from backends.tier.base import Evicted, Job, JobResult, Lookup, Outcome, Tier, TierContext, Usage


class TierWrapper(Tier):
    """Passes every call on. `context` is the one that the inner tier was opened with."""

    def __init__(self, inner: Tier, context: TierContext) -> None:
        self.inner = inner
        self.context = context
        self.name = inner.name
        self.capabilities = inner.capabilities

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        return self.inner.lookup(keys)

    def submit_store(self, job: Job) -> None:
        self.inner.submit_store(job)

    def submit_load(self, job: Job) -> None:
        self.inner.submit_load(job)

    def poll(self) -> Sequence[JobResult]:
        return self.inner.poll()

    def evicted(self) -> Evicted:
        return self.inner.evicted()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.inner.touch(keys)

    def usage(self) -> Usage:
        return self.inner.usage()

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def drain(self, timeout_s: float) -> bool:
        return self.inner.drain(timeout_s)

    def close(self) -> None:
        self.inner.close()

    def unserved(
        self, job: Job, outcome: Outcome, reason: str, *, is_load: bool, seconds: float
    ) -> JobResult:
        """The result of a job that never reached the inner tier."""
        if is_load:
            for row in job.rows:
                set_state(self.context.rows.row_view(row), EMPTY)
        count = len(job.keys)
        return JobResult(job.job_id, (outcome,) * count, (reason,) * count, 0, seconds)
