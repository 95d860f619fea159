"""FaultyTier: another tier on a bad day, the same bad day every time.

A fault can be put in at three heights, and they are different tests:

- In the storage, under a tier that does not know: the raw hooks of a `TierHarness` damage what is
  stored. That shows whether the tier finds it.
- In the tier's system calls, where it has a seam for that. That shows whether it bears errors.
- Above the tier, here. That shows whether those who *use* a tier bear what a right tier may answer
  on a bad day. So FaultyTier keeps the contract, but for WRONG_BYTES.
"""

from __future__ import annotations

import enum
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from backends.block import EMPTY, HEADER_BYTES, BlockKey, check, set_state
from backends.errors import TierError
from backends.testing.wrapper import TierWrapper
from backends.tier.base import COUNTERS, Job, JobResult, Lookup, Outcome, Tier, TierContext

_DRAIN_STEP_S = 0.005


class FaultKind(enum.Enum):
    """What goes wrong with one key of a job, what it stands for, and what the caller sees."""

    ERROR = "error"  # a read or write that fails: FAILED; the storage is as before
    SHORT_READ = "short_read"  # a truncated block: CORRUPT, then a MISS until the next store
    FLIPPED_BIT = "flipped_bit"  # a damaged block: CORRUPT, then a MISS until the next store
    LOST_WRITE = "lost_write"  # a disk that lies: the store is DONE, and nothing is there
    HANG = "hang"  # a storage that stopped: no answer until `release`, the deadline or `close`
    WRONG_BYTES = "wrong_bytes"  # a tier that does not check: DONE with a wrong payload. It
    # breaks the contract, to show that a user's own verification finds that.


_KINDS = {
    "store": (FaultKind.ERROR, FaultKind.LOST_WRITE, FaultKind.HANG),
    "load": (
        FaultKind.ERROR,
        FaultKind.SHORT_READ,
        FaultKind.FLIPPED_BIT,
        FaultKind.HANG,
        FaultKind.WRONG_BYTES,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a plan: `kind` befalls keys of stores, of loads, or (None) wherever it can.

    Keys are counted in the order of submission, stores and loads apart. The first `after` are
    spared; of the others each is hit with probability `rate`, at most `times` of them.
    """

    kind: FaultKind
    on: str | None = None
    rate: float = 1.0
    after: int = 0
    times: int | None = None


class FaultyTier(TierWrapper):
    """Lets faults befall single keys by a plan and a seed; the rest of the batch is served.

    The same plan, seed and order of jobs give the same faults, whatever the timing. Where several
    lines of the plan would hit a key, the first one does. `counters` also has `injected_<kind>`.
    """

    def __init__(
        self, inner: Tier, context: TierContext, faults: Sequence[Fault], *, seed: int = 0
    ) -> None:
        super().__init__(inner, context)
        for fault in faults:
            possible = [on for on, kinds in _KINDS.items() if fault.kind in kinds]
            if fault.on is not None and fault.on not in possible:
                raise TierError(
                    f"fault {fault.kind.value} on {fault.on!r}, expected on {' or '.join(possible)}"
                )
        self._faults = tuple(faults)
        self._seed = seed
        self._seen = {"store": 0, "load": 0}
        self._hits = [0] * len(faults)
        self._jobs: dict[int, _Split] = {}
        self._inside: dict[int, tuple[_Split, tuple[int, ...]]] = {}
        self._inner_ids = itertools.count()
        self._set_aside: set[BlockKey] = set()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._results: list[JobResult] = []
        self._closed = False

    def release(self) -> None:
        """The storage runs again: what hangs goes on its way."""
        for split in list(self._jobs.values()):
            hung, split.hung = sorted(split.hung), set()
            self._pass_on(split, hung)

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        self._collect()
        answers = self.inner.lookup(keys)
        hung = {split.job.keys[index] for split in self._jobs.values() for index in split.hung}
        return [self._look(key, answer, hung) for key, answer in zip(keys, answers, strict=True)]

    def submit_store(self, job: Job) -> None:
        self._submit(job, "store")

    def submit_load(self, job: Job) -> None:
        self._submit(job, "load")

    def poll(self) -> Sequence[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def counters(self) -> dict[str, int]:
        counts = self.inner.counters()
        for name, more in self._counts.items():
            counts[name] = counts.get(name, 0) + more
        for fault, hits in zip(self._faults, self._hits, strict=True):
            name = f"injected_{fault.kind.value}"
            counts[name] = counts.get(name, 0) + hits
        return counts

    def drain(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            self.inner.drain(max(0.0, min(left_s, _DRAIN_STEP_S)))
            self._collect()
            if not self._jobs or left_s <= 0:
                return not self._jobs
            if not self._inside:
                time.sleep(min(left_s, _DRAIN_STEP_S))

    def close(self) -> None:
        self._closed = True
        for split in list(self._jobs.values()):
            for index in sorted(split.hung):
                self._end(split, index, Outcome.SHED, "the tier was closed")
        self.inner.close()

    def _look(self, key: BlockKey, answer: Lookup, hung: set[BlockKey]) -> Lookup:
        if key in self._set_aside:
            return Lookup.MISS
        if key in hung and answer is Lookup.MISS and not self._closed:
            return Lookup.PENDING
        return answer

    def _submit(self, job: Job, direction: str) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
        if job.job_id in self._jobs:
            raise TierError(f"job id {job.job_id} is in use; give every job its own")
        split = _Split(job, direction == "load")
        self._jobs[job.job_id] = split
        if not job.keys:
            self._finish(split)
            return
        onward = []
        for index, key in enumerate(job.keys):
            kind = self._fate(direction)
            if split.is_load and key in self._set_aside:
                self._end(split, index, Outcome.MISSING, "it was damaged and is set aside")
            elif kind is FaultKind.ERROR:
                self._end(split, index, Outcome.FAILED, "an injected input/output error")
            elif kind is FaultKind.LOST_WRITE:
                self._end(split, index, Outcome.DONE, "")
            elif kind is FaultKind.HANG:
                split.hung.add(index)
            else:
                if kind is not None:
                    split.damage[index] = kind
                onward.append(index)
        self._pass_on(split, onward)

    def _fate(self, direction: str) -> FaultKind | None:
        """What befalls the next key that goes this way."""
        number = self._seen[direction]
        self._seen[direction] += 1
        for index, fault in enumerate(self._faults):
            if fault.kind not in _KINDS[direction] or fault.on not in (None, direction):
                continue
            if number < fault.after or self._hits[index] == fault.times:
                continue
            if random.Random(f"{self._seed} {index} {direction} {number}").random() < fault.rate:
                self._hits[index] += 1
                return fault.kind
        return None

    def _pass_on(self, split: _Split, indices: Sequence[int]) -> None:
        if not indices:
            return
        inner_id = next(self._inner_ids)
        self._inside[inner_id] = (split, tuple(indices))
        keys = tuple(split.job.keys[index] for index in indices)
        rows = tuple(split.job.rows[index] for index in indices)
        submit = self.inner.submit_load if split.is_load else self.inner.submit_store
        submit(Job(inner_id, keys, rows, split.job.deadline_s))

    def _collect(self) -> None:
        for result in self.inner.poll():
            split, indices = self._inside.pop(result.job_id)
            split.bytes_moved += result.bytes_moved
            answers = zip(indices, result.outcomes, result.reasons, strict=True)
            for index, outcome, reason in answers:
                self._answer(split, index, outcome, reason)
        now_s = time.monotonic()
        for split in list(self._jobs.values()):
            deadline_s = split.job.deadline_s
            if deadline_s is not None and now_s >= deadline_s:
                for index in sorted(split.hung):
                    self._end(split, index, Outcome.LATE, "its deadline passed while it hung")

    def _answer(self, split: _Split, index: int, outcome: Outcome, reason: str) -> None:
        key, kind = split.job.keys[index], split.damage.get(index)
        if outcome is Outcome.DONE and not split.is_load:
            self._set_aside.discard(key)
        if outcome is not Outcome.DONE or kind is None:
            self._end(split, index, outcome, reason, counted=True)
            return
        block = self.context.rows.row_view(split.job.rows[index])
        place = random.Random(f"{self._seed} place {key.hash.hex()}")
        if kind is FaultKind.WRONG_BYTES:
            block[place.randrange(HEADER_BYTES, block.size)] ^= 1 << place.randrange(8)
            self._end(split, index, Outcome.DONE, "", counted=True)
            return
        found = block
        if kind is FaultKind.SHORT_READ:
            found = block[: place.randrange(block.size)]
        else:
            found[place.randrange(block.size)] ^= 1 << place.randrange(8)
        why = check(found, key, self.context.fingerprint, block.size - HEADER_BYTES)
        split.bytes_moved -= block.size
        self._counts["loaded"] -= 1
        self._set_aside.add(key)
        self._end(split, index, Outcome.CORRUPT, f"what stood there {why}")

    def _end(
        self, split: _Split, index: int, outcome: Outcome, reason: str, *, counted: bool = False
    ) -> None:
        """`counted`: the inner tier has this outcome in its counters."""
        split.hung.discard(index)
        split.outcomes[index] = outcome
        split.reasons[index] = reason
        if split.is_load and outcome is not Outcome.DONE:
            set_state(self.context.rows.row_view(split.job.rows[index]), EMPTY)
        if not counted and outcome.value in self._counts:
            self._counts[outcome.value] += 1
        if len(split.outcomes) == len(split.job.keys):
            self._finish(split)

    def _finish(self, split: _Split) -> None:
        del self._jobs[split.job.job_id]
        order = range(len(split.job.keys))
        self._results.append(
            JobResult(
                split.job.job_id,
                tuple(split.outcomes[index] for index in order),
                tuple(split.reasons[index] for index in order),
                split.bytes_moved,
                time.monotonic() - split.began_s,
            )
        )


class _Split:
    """A job whose keys fare differently. `outcomes` has those that have ended, by index."""

    __slots__ = (
        "began_s",
        "bytes_moved",
        "damage",
        "hung",
        "is_load",
        "job",
        "outcomes",
        "reasons",
    )

    def __init__(self, job: Job, is_load: bool) -> None:
        self.job = job
        self.is_load = is_load
        self.began_s = time.monotonic()
        self.bytes_moved = 0
        self.damage: dict[int, FaultKind] = {}
        self.hung: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.reasons: dict[int, str] = {}
