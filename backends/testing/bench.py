"""A tier on a test bench: it is driven as an engine drives it, and watched at every result.

What the contract says of every result is checked at every result here, so that no test has to:
one result a job and never another, an outcome and a reason for each key, right bytes in a row that
is DONE, an EMPTY header in a row that is not, and not a byte changed in any other row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.block import EMPTY, HEADER_BYTES, BlockKey, read_header, slot_lengths
from backends.testing.rows import RowBuffer
from backends.tier.base import Bytes, Job, JobResult, Lookup, Outcome, Tier

POLL_INTERVAL_S = 0.0005
_UNTOUCHED = 0xA5
_LOAD_ONLY = (Outcome.MISSING, Outcome.CORRUPT)


class ContractBroken(AssertionError):
    """A tier did what the contract forbids."""


@dataclass(frozen=True, slots=True)
class _Open:
    job: Job
    is_load: bool
    before: tuple[Bytes, ...]


class TierBench:
    """Drives one tier from one thread. Rows are taken as they are needed and given back.

    `patience_s` is how long anything may take before it counts as never.
    """

    def __init__(self, tier: Tier, rows: RowBuffer, patience_s: float = 20.0) -> None:
        self.tier = tier
        self.rows = rows
        self.patience_s = patience_s
        self.results: dict[int, JobResult] = {}
        self._ids = itertools.count()
        self._free = list(range(rows.rows))
        self._open: dict[int, _Open] = {}
        for row in self._free:
            rows.scribble(row, _UNTOUCHED)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """What becomes of each key: asks until nothing is PENDING."""
        answers: list[Lookup] = []

        def known() -> bool:
            answers[:] = self.tier.lookup(keys)
            require(len(answers) == len(keys), f"{len(answers)} answers for {len(keys)} keys")
            return Lookup.PENDING not in answers

        self.until(known, "a lookup stays PENDING")
        return answers

    def is_hit(self, key: BlockKey) -> bool:
        return self.lookup([key]) == [Lookup.HIT]

    def store(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.outcomes(self.submit_store(keys))

    def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.outcomes(self.submit_load(keys))

    def outcomes(self, job_id: int) -> list[Outcome]:
        return list(self.wait(job_id)[job_id].outcomes)

    def submit_store(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> int:
        """The job's id. Rows are filled with the keys' blocks."""
        rows = self.take(len(keys))
        for row, key in zip(rows, keys, strict=True):
            self.rows.fill(row, key)
        return self.submit_rows(keys, rows, deadline_s)

    def submit_rows(
        self, keys: Sequence[BlockKey], rows: Sequence[int], deadline_s: float | None = None
    ) -> int:
        """Store these rows, which were taken, as they are."""
        job = Job(next(self._ids), tuple(keys), tuple(rows), deadline_s)
        before = tuple(self.rows.row_view(row).copy() for row in rows)
        self._open[job.job_id] = _Open(job, False, before)
        self.tier.submit_store(job)
        return job.job_id

    def submit_load(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> int:
        job = Job(next(self._ids), tuple(keys), tuple(self.take(len(keys))), deadline_s)
        self._open[job.job_id] = _Open(job, True, ())
        self.tier.submit_load(job)
        return job.job_id

    def poll(self) -> list[JobResult]:
        """Results that came now, each checked."""
        results = list(self.tier.poll())
        for result in results:
            require(
                result.job_id in self._open,
                f"a result for job {result.job_id}, which "
                + ("has had one" if result.job_id in self.results else "was never submitted"),
            )
            self._check(result)
        return results

    def wait(self, *job_ids: int) -> dict[int, JobResult]:
        """The results of these jobs, by id. Results of others are taken and kept."""

        def all_there() -> bool:
            self.poll()
            return all(job_id in self.results for job_id in job_ids)

        self.until(all_there, f"jobs {sorted(self._open)} have no result")
        return {job_id: self.results[job_id] for job_id in job_ids}

    def settle(self) -> dict[int, JobResult]:
        """The results of all jobs that have none yet."""
        return self.wait(*self._open)

    def until(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Ask again and again, for `patience_s`."""
        end_s = time.monotonic() + self.patience_s
        while not happened():
            require(time.monotonic() < end_s, f"{otherwise}, after {self.patience_s:g} s")
            time.sleep(POLL_INTERVAL_S)

    def take(self, count: int) -> list[int]:
        """Rows of one's own; those of a job are given back with its result."""
        require(count <= len(self._free), f"{count} rows wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def check_free_rows(self) -> None:
        """Not a byte of a row that is in no job has changed."""
        for row in self._free:
            changed = (self.rows.row_view(row) != _UNTOUCHED).sum()
            require(not changed, f"row {row} is in no job and {changed} of its bytes changed")

    def close(self) -> None:
        self.tier.close()
        for result in self.tier.poll():
            require(result.job_id in self._open, f"a result too many, for job {result.job_id}")
            self._check(result)
        self.check_free_rows()

    def _check(self, result: JobResult) -> None:
        opened = self._open.pop(result.job_id)
        self.results[result.job_id] = result
        job, count = opened.job, len(opened.job.keys)
        require(
            len(result.outcomes) == len(result.reasons) == count,
            f"{len(result.outcomes)} outcomes and {len(result.reasons)} reasons for {count} keys",
        )
        require(result.bytes_moved >= 0 and result.seconds >= 0, f"{result} moved less than none")
        for index, (outcome, reason) in enumerate(
            zip(result.outcomes, result.reasons, strict=True)
        ):
            row = job.rows[index]
            require(
                (outcome is Outcome.DONE) == (reason == ""), f"{outcome} with reason {reason!r}"
            )
            if opened.is_load:
                self._check_loaded(row, job.keys[index], outcome)
            else:
                self._check_stored(row, opened.before[index], outcome)
        for row in job.rows:
            self.rows.scribble(row, _UNTOUCHED)
        self._free.extend(job.rows)

    def _check_loaded(self, row: int, key: BlockKey, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            why = self.rows.wrong(row, key)
            require(why is None, f"a load is DONE and {why}")
        else:
            state = self.rows.state(row)
            require(state == EMPTY, f"a load is {outcome} and its row has state {state}, not EMPTY")

    def _check_stored(self, row: int, before: Bytes, outcome: Outcome) -> None:
        require(outcome not in _LOAD_ONLY, f"a store is {outcome}")
        now = self.rows.row_view(row)
        same = (
            _without_seal(before) == _without_seal(now)
            and (before[HEADER_BYTES:] == now[HEADER_BYTES:]).all()
        )
        require(same, f"a store changed more of row {row} than its seal")


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractBroken(otherwise)


def _without_seal(block: Bytes) -> tuple[object, ...]:
    header = read_header(block)
    lengths = slot_lengths(block) if header.slots * 4 < HEADER_BYTES // 2 else ()
    return (*header._replace(flags=0, payload_checksum=0), *lengths)
