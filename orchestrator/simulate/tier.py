"""One replica's view of a simulated tier: the tier contract without bytes."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from backends.block import BlockKey
from backends.tier.base import (
    COUNTERS,
    Capabilities,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Tier,
    Usage,
)
from orchestrator.simulate.clock import Clock
from orchestrator.simulate.medium import Medium, Recency
from orchestrator.simulate.timing import TierTiming, Transfer


class SimTier(Tier):
    """Knows at once what there is, and takes as long for a transfer as it is told to."""

    capabilities = Capabilities(persistent=False, shared=True, quota=True, corruption=False)

    def __init__(
        self,
        name: str,
        medium: Medium,
        row_bytes: int,
        clock: Clock,
        timing: TierTiming,
        *,
        private: int | None = None,
    ) -> None:
        """`private` is the replica's number where nobody else sees its blocks."""
        self.name = name
        self._medium = medium
        self._recency = Recency(medium)
        self._row_bytes = row_bytes
        self._clock = clock
        self._timing = timing
        self._private = private
        self._results: list[tuple[float, int, JobResult]] = []
        self._busy_until_s = {True: 0.0, False: 0.0}
        self._counters = dict.fromkeys((*COUNTERS, "dedup_skips"), 0)

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        blocks = self._blocks(keys)
        self._recency.use(blocks, self._medium.tick(len(blocks)))
        medium = self._medium
        return [Lookup.HIT if block in medium else Lookup.MISS for block in blocks]

    def submit_store(self, job: Job) -> None:
        medium, blocks = self._medium, self._blocks(job.keys)
        at = medium.tick(len(blocks))
        new = [block for block in blocks if block not in medium]
        if len(new) < len(blocks):
            self._recency.use(blocks, at)
            self._counters["dedup_skips"] += len(blocks) - len(new)
        shed: set[Hashable] = set()
        if medium.capacity is not None and new:
            over = len(medium) + len(new) - medium.capacity
            if over > 0:
                gone = medium.oldest(over, self._recency, set(blocks))
                medium.evict(gone)
                self._counters["evicted"] += len(gone)
                shed.update(new[len(new) - (over - len(gone)) :])
        written = [block for block in new if block not in shed]
        self._show(blocks, written, at)
        self._counters["stored"] += len(written)
        self._counters["shed"] += len(shed)
        outcomes = [Outcome.SHED if block in shed else Outcome.DONE for block in blocks]
        self._end(job, outcomes, len(written), self._timing.store, is_load=False)

    def _show(self, batch: list[Hashable], written: list[Hashable], at: int) -> None:
        """A block's time is that of its place in the batch, also where others were there before."""
        if len(written) == len(batch):
            self._medium.show(written, at)
            return
        wanted = set(written)
        for number in range(len(batch) - 1, -1, -1):
            if batch[number] in wanted:
                self._medium.show([batch[number]], at - number)

    def submit_load(self, job: Job) -> None:
        medium, blocks = self._medium, self._blocks(job.keys)
        at = medium.tick(len(blocks))
        there = [block in medium for block in blocks]
        self._show(blocks, [b for b, here in zip(blocks, there, strict=True) if here], at)
        outcomes = [Outcome.DONE if here else Outcome.MISSING for here in there]
        loaded = sum(there)
        self._counters["loaded"] += loaded
        self._end(job, outcomes, loaded, self._timing.load, is_load=True)

    def _end(
        self, job: Job, outcomes: list[Outcome], moved: int, cost: Transfer, *, is_load: bool
    ) -> None:
        """Blocks of an earlier batch that is still under way go first."""
        now_s = self._clock.now_s
        ends_s = now_s
        if moved:
            behind_s = self._busy_until_s[is_load] + moved * cost.block_s
            ends_s = max(now_s + cost.seconds(moved), behind_s)
            self._busy_until_s[is_load] = ends_s
        result = JobResult(
            job.job_id,
            tuple(outcomes),
            ("",) * len(outcomes),
            moved * self._row_bytes,
            ends_s - now_s,
        )
        heapq.heappush(self._results, (ends_s, job.job_id, result))
        if moved:
            self._clock.expect(ends_s)

    def poll(self) -> Sequence[JobResult]:
        found = []
        while self._results and self._results[0][0] <= self._clock.now_s:
            found.append(heapq.heappop(self._results)[2])
        return found

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._recency.use(self._blocks(keys), self._medium.tick(len(keys)))

    def usage(self) -> Usage:
        capacity, blocks = self._medium.capacity, len(self._medium)
        return Usage(
            blocks * self._row_bytes,
            blocks,
            None if capacity is None else capacity * self._row_bytes,
            None,
        )

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def drain(self, timeout_s: float) -> bool:
        if self._results:
            self._clock.at_least(self._results[0][0])
        return not self._results

    def close(self) -> None:
        self._results.clear()

    def _blocks(self, keys: Sequence[BlockKey]) -> list[Hashable]:
        """What stands for keys here: 64 bits of a hash tell blocks apart and take little room."""
        from_bytes = int.from_bytes
        if self._private is None:
            return [from_bytes(h[:8], "little") + group for h, group in keys]
        return [(self._private, from_bytes(h[:8], "little") + group) for h, group in keys]
