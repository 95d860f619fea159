"""Tiers that break the contract, each in one way; run by `test_testing_catches.py`, not collected.

`caught_by` names tests of the suite that must fail; only those are run. `directory_tier`
and its test come from docs/tiers.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from directory_tier import DirectorySettings, DirectoryTier
from test_directory_tier import DirectoryHarness

from backends.block import EMPTY, HEADER_BYTES, BlockKey, set_state
from backends.testing import (
    Fault,
    FaultKind,
    FaultyTier,
    MemoryHarness,
    MemoryTier,
    Opener,
    TierConformance,
)
from backends.testing.wrapper import TierWrapper
from backends.tier.base import (
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


class Broken(TierConformance):
    patience_s = 1.0
    caught_by: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        for name in dir(TierConformance):
            if name.startswith("test_") and name not in cls.caught_by:
                setattr(cls, name, None)


def memory(tier: type[MemoryTier]) -> type[MemoryHarness]:
    return type("Harness", (MemoryHarness,), {"tier_type": tier})


def directory(tier: type[DirectoryTier]) -> type[DirectoryHarness]:
    def opener(self: DirectoryHarness, capacity_bytes: int | None = None) -> Opener:
        return partial(tier, settings=DirectorySettings(str(self.directory)))

    return type("Harness", (DirectoryHarness,), {"opener": opener})


def wrapped(wrap: Any) -> type[MemoryHarness]:
    class Harness(MemoryHarness):
        def opener(self, capacity_bytes: int | None = None) -> Opener:
            inner = super().opener(capacity_bytes)
            return lambda context: wrap(inner(context), context)

    return Harness


class NeverChecks(MemoryTier):
    def _load(self, key: BlockKey, block: Bytes) -> tuple[Outcome, str, int]:
        found = self.read_block(key, block)
        if found is None:
            return Outcome.MISSING, "it is not there", 0
        return Outcome.DONE, "", block.size


class TestNeverChecks(Broken):
    harness_type = memory(NeverChecks)
    caught_by = ("test_a_wrong_block_is_found_and_mended", "test_a_flipped_bit_anywhere_is_found")


class DamageFailsTheBatch(TierWrapper):
    def poll(self) -> Sequence[JobResult]:
        return [self._spoilt(result) for result in self.inner.poll()]

    def submit_load(self, job: Job) -> None:
        self.rows = {job.job_id: job.rows}
        super().submit_load(job)

    def _spoilt(self, result: JobResult) -> JobResult:
        if Outcome.CORRUPT not in result.outcomes:
            return result
        for row in self.rows[result.job_id]:
            set_state(self.context.rows.row_view(row), EMPTY)
        count = len(result.outcomes)
        return JobResult(result.job_id, (Outcome.FAILED,) * count, ("bad batch",) * count, 0, 0.0)


class TestDamageFailsTheBatch(Broken):
    harness_type = wrapped(DamageFailsTheBatch)
    caught_by = ("test_a_wrong_block_is_found_and_mended",)


class LeavesDamageThere(MemoryTier):
    def set_aside(self, key: BlockKey) -> None:
        pass


class TestLeavesDamageThere(Broken):
    harness_type = memory(LeavesDamageThere)
    caught_by = (
        "test_a_wrong_block_is_found_and_mended",
        "test_a_wrong_block_nobody_has_read_does_not_stay",
    )


class TellsEvictionsAgain(MemoryTier):
    told: tuple[BlockKey, ...] = ()

    def evicted(self) -> Evicted:
        self.told += tuple(super().evicted().keys)
        return Evicted(self.told, False)


class TestTellsEvictionsAgain(Broken):
    harness_type = memory(TellsEvictionsAgain)
    caught_by = ("test_what_is_driven_out_is_told_once_and_is_gone",)


class TellsWhatIsStillThere(MemoryTier):
    def forget(self, key: BlockKey, *, evicted: bool = False) -> None:
        super().forget(key, evicted=evicted)
        if evicted:
            self._gone.take()
            self._gone.add(stored for stored, _ in self._own()[-1:])


class TestTellsWhatIsStillThere(Broken):
    harness_type = memory(TellsWhatIsStillThere)
    caught_by = ("test_what_is_driven_out_is_told_once_and_is_gone",)


class LookupWaits(MemoryTier):
    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        return [Lookup.HIT if self.has_block(key) else Lookup.MISS for key in keys]


class TestLookupWaits(Broken):
    harness_type = memory(LookupWaits)
    caught_by = ("test_no_method_waits_for_the_storage",)


class SubmitWaits(MemoryTier):
    def submit_store(self, job: Job) -> None:
        super().submit_store(job)
        self.drain(60)


class TestSubmitWaits(Broken):
    harness_type = memory(SubmitWaits)
    caught_by = ("test_no_method_waits_for_the_storage",)


class UsageWaits(MemoryTier):
    def usage(self) -> Usage:
        self._medium.access()
        return super().usage()


class TestUsageWaits(Broken):
    harness_type = memory(UsageWaits)
    caught_by = ("test_no_method_waits_for_the_storage",)


class LosesResults(TierWrapper):
    polled = 0

    def poll(self) -> Sequence[JobResult]:
        kept = []
        for result in self.inner.poll():
            self.polled += 1
            if self.polled % 7:
                kept.append(result)
        return kept


class TestLosesResults(Broken):
    harness_type = wrapped(LosesResults)
    caught_by = ("test_many_jobs_at_once_have_one_result_each",)


class AnswersTwice(TierWrapper):
    def poll(self) -> Sequence[JobResult]:
        return [result for result in self.inner.poll() for _ in range(2)]


class TestAnswersTwice(Broken):
    harness_type = wrapped(AnswersTwice)
    caught_by = ("test_stored_blocks_come_back", "test_an_empty_batch_has_an_empty_result")


class ForgetsAtClose(TierWrapper):
    closed = False

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    def poll(self) -> Sequence[JobResult]:
        return () if self.closed else self.inner.poll()


class TestForgetsAtClose(Broken):
    harness_type = wrapped(ForgetsAtClose)
    caught_by = ("test_results_are_given_after_close",)


class OneNamespace(MemoryTier):
    def _at(self, key: BlockKey) -> tuple[bytes, BlockKey]:
        return b"", key

    def _load(self, key: BlockKey, block: Bytes) -> tuple[Outcome, str, int]:
        return NeverChecks._load(self, key, block)


class TestOneNamespace(Broken):
    harness_type = memory(OneNamespace)
    caught_by = ("test_namespaces_do_not_see_each_other",)


class NoGroups(MemoryTier):
    def _at(self, key: BlockKey) -> tuple[bytes, BlockKey]:
        return self.context.fingerprint, key._replace(group=0)


class TestNoGroups(Broken):
    harness_type = memory(NoGroups)
    caught_by = ("test_the_group_is_part_of_the_key",)


class StripsZeros(MemoryTier):
    def _at(self, key: BlockKey) -> tuple[bytes, BlockKey]:
        return self.context.fingerprint, key._replace(hash=key.hash.rstrip(b"\0"))


class TestStripsZeros(Broken):
    harness_type = memory(StripsZeros)
    caught_by = ("test_every_legal_hash_is_a_key_of_its_own",)


class Overruns(MemoryTier):
    def _make_room(self, needed_bytes: int, newcomer: BlockKey | None = None) -> None:
        pass


class TestOverruns(Broken):
    harness_type = memory(Overruns)
    caught_by = (
        "test_the_capacity_is_kept_at_every_moment",
        "test_without_room_for_one_block_nothing_is_stored",
    )


class OldestFirst(MemoryTier):
    def touch(self, keys: Sequence[BlockKey]) -> None:
        super().touch(keys[::-1])


class TestOldestFirst(Broken):
    harness_type = memory(OldestFirst)
    caught_by = ("test_a_prefix_outlives_its_extension",)


class NeverEmpties(MemoryTier):
    def _end(self, task: Any, outcome: Outcome, reason: str = "", moved_bytes: int = 0) -> None:
        before = task.block.copy()
        super()._end(task, outcome, reason, moved_bytes)
        if task.state.is_load:
            task.block[:] = before


class TestNeverEmpties(Broken):
    harness_type = memory(NeverEmpties)
    caught_by = ("test_absent_keys_are_missing",)


class NoDeadlines(TierWrapper):
    def submit_load(self, job: Job) -> None:
        self.inner.submit_load(Job(job.job_id, job.keys, job.rows))

    def submit_store(self, job: Job) -> None:
        self.inner.submit_store(Job(job.job_id, job.keys, job.rows))


class TestNoDeadlines(Broken):
    harness_type = wrapped(NoDeadlines)
    caught_by = (
        "test_a_deadline_that_has_passed_makes_every_key_late",
        "test_a_load_that_comes_too_late_is_late_and_leaves_its_rows_alone",
    )


class WritesAfterItsResult(TierWrapper):
    """Gives up at the deadline and lets the read go on into the caller's row."""

    def submit_load(self, job: Job) -> None:
        self.inner.submit_load(Job(job.job_id, job.keys, job.rows))
        self.jobs = [*getattr(self, "jobs", []), job]
        self.given = getattr(self, "given", set())

    def poll(self) -> Sequence[JobResult]:
        results = [result for result in self.inner.poll() if result.job_id not in self._given()]
        for job in getattr(self, "jobs", []):
            ended = {result.job_id for result in results} | self._given()
            late = job.deadline_s is not None and time.monotonic() > job.deadline_s
            if late and job.job_id not in ended:
                results.append(self.unserved(job, Outcome.LATE, "late", is_load=True, seconds=0.0))
                self.given.add(job.job_id)
        return results

    def _given(self) -> set[int]:
        return getattr(self, "given", set())


class TestWritesAfterItsResult(Broken):
    harness_type = wrapped(WritesAfterItsResult)
    caught_by = ("test_a_load_that_comes_too_late_is_late_and_leaves_its_rows_alone",)


class StoresAnything(MemoryTier):
    def _store(self, key: BlockKey, block: Bytes) -> tuple[Outcome, str, int]:
        self.write_block(key, block)
        return Outcome.DONE, "", block.size


class TestStoresAnything(Broken):
    harness_type = memory(StoresAnything)
    caught_by = (
        "test_a_row_that_is_not_the_keys_block_is_not_stored",
        "test_a_row_of_another_namespace_is_not_stored",
        "test_what_is_there_is_not_written_again",
    )


class TouchesTheNextRow(MemoryTier):
    def read_block(self, key: BlockKey, into: Bytes) -> int | None:
        found = super().read_block(key, into)
        self.context.rows.row_view(self.context.rows.rows - 1)[-1] = 0  # type: ignore[attr-defined]
        return found


class TestTouchesTheNextRow(Broken):
    harness_type = memory(TouchesTheNextRow)
    caught_by = ("test_stored_blocks_come_back",)


class AlwaysPending(MemoryTier):
    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        answers = super().lookup(keys)
        return [Lookup.PENDING if answer is Lookup.MISS else answer for answer in answers]


class TestAlwaysPending(Broken):
    harness_type = memory(AlwaysPending)
    caught_by = ("test_absent_keys_are_missing",)


class LeaksAThread(MemoryTier):
    def close_storage(self) -> None:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


class TestLeaksAThread(Broken):
    harness_type = memory(LeaksAThread)
    caught_by = ("test_a_closed_tier_leaves_no_thread_and_no_open_file",)


class LeaksAFile(MemoryTier):
    kept: ClassVar[list[int]] = []

    def close_storage(self) -> None:
        self.kept.append(os.open("/proc/self/stat", os.O_RDONLY))


class TestLeaksAFile(Broken):
    harness_type = memory(LeaksAFile)
    caught_by = ("test_a_closed_tier_leaves_no_thread_and_no_open_file",)


class TakesJobsWhenClosed(TierWrapper):
    closed = False

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    def submit_load(self, job: Job) -> None:
        if not self.closed:
            self.inner.submit_load(job)


class TestTakesJobsWhenClosed(Broken):
    harness_type = wrapped(TakesJobsWhenClosed)
    caught_by = ("test_a_closed_tier_knows_nothing_and_takes_nothing",)


def _losing_writes(inner: Tier, context: TierContext) -> Tier:
    return FaultyTier(inner, context, [Fault(FaultKind.LOST_WRITE)])


class TestLosesWrites(Broken):
    harness_type = wrapped(_losing_writes)
    caught_by = ("test_stored_blocks_come_back", "test_a_stored_key_is_a_hit_at_once")


def _wrong_bytes(inner: Tier, context: TierContext) -> Tier:
    return FaultyTier(inner, context, [Fault(FaultKind.WRONG_BYTES, after=3, times=1)])


class TestServesWrongBytes(Broken):
    harness_type = wrapped(_wrong_bytes)
    caught_by = ("test_stored_blocks_come_back",)


class WritesInPlace(DirectoryTier):
    def write_block(self, key: BlockKey, block: Bytes) -> None:
        with open(self._file(key), "wb", buffering=0) as file:
            for begin in range(0, block.size, 16 * 4096):
                file.write(block.data[begin : begin + 16 * 4096])


class TestWritesInPlace(Broken):
    harness_type = directory(WritesInPlace)
    caught_by = ("test_a_killed_writer_leaves_whole_blocks_or_none",)


class NeverSweeps(DirectoryTier):
    def _sweep(self) -> None:
        pass


class TestNeverSweeps(Broken):
    harness_type = directory(NeverSweeps)
    caught_by = ("test_a_killed_writer_leaves_whole_blocks_or_none",)


class StartsAnew(DirectoryTier):
    def _sweep(self) -> None:
        for path in self._blocks.iterdir():
            path.unlink(missing_ok=True)


class TestStartsAnew(Broken):
    harness_type = directory(StartsAnew)
    caught_by = ("test_blocks_are_there_when_the_tier_is_opened_again",)


class SeesNobodyElse(DirectoryTier):
    def has_block(self, key: BlockKey) -> bool:
        mine = self.__dict__.setdefault("mine", set())
        return key in mine

    def write_block(self, key: BlockKey, block: Bytes) -> None:
        super().write_block(key, block)
        self.__dict__.setdefault("mine", set()).add(key)


class TestSeesNobodyElse(Broken):
    harness_type = directory(SeesNobodyElse)
    caught_by = ("test_what_one_process_stores_another_finds",)


class OneTemporaryName(DirectoryTier):
    def write_block(self, key: BlockKey, block: Bytes) -> None:
        temporary = self._blocks / "0.tmp"
        with open(temporary, "wb") as file:
            file.write(block.data[:HEADER_BYTES])
            time.sleep(0.005)  # so that the other one comes in between
            file.write(block.data[HEADER_BYTES:])
        temporary.rename(self._file(key))


class TestOneTemporaryName(Broken):
    harness_type = directory(OneTemporaryName)
    caught_by = ("test_two_processes_may_store_the_same_keys_at_once",)
