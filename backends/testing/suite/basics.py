"""Stores, loads and lookups, key by key."""

from __future__ import annotations

import hashlib
import random

import pytest

from backends.block import EMPTY, WRITING, BlockKey, set_state
from backends.errors import TierError
from backends.testing.bench import TierBench
from backends.testing.harness import TierHarness
from backends.testing.rows import FINGERPRINT, make_keys
from backends.testing.suite.base import OpenBench, SuiteBase, needs
from backends.tier.base import COUNTERS, Job, Lookup, Outcome

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
HIT, MISS = Lookup.HIT, Lookup.MISS


class BasicTests(SuiteBase):
    def test_stored_blocks_come_back(self, bench: TierBench) -> None:
        keys = make_keys("stored", 8)
        assert bench.store(keys) == [DONE] * 8
        assert bench.lookup(keys) == [HIT] * 8
        assert bench.load(keys[::-1]) == [DONE] * 8

    def test_a_stored_key_is_a_hit_at_once(self, bench: TierBench) -> None:
        for key in make_keys("at once", 8):
            assert bench.store([key]) == [DONE]
            assert list(bench.tier.lookup([key])) == [HIT]

    def test_absent_keys_are_missing(self, bench: TierBench) -> None:
        keys = make_keys("absent", 4)
        assert bench.lookup(keys) == [MISS] * 4
        assert bench.load(keys) == [MISSING] * 4

    def test_each_key_of_a_batch_has_its_own_answer(self, bench: TierBench) -> None:
        there, absent = make_keys("there", 4), make_keys("not there", 4)
        bench.store(there)
        mixed = [key for pair in zip(there, absent, strict=True) for key in pair]
        assert bench.lookup(mixed) == [HIT, MISS] * 4
        assert bench.load(mixed) == [DONE, MISSING] * 4

    def test_an_empty_batch_has_an_empty_result(self, bench: TierBench) -> None:
        assert list(bench.tier.lookup([])) == []
        assert bench.store([]) == []
        assert bench.load([]) == []

    def test_a_key_may_stand_in_a_batch_twice(self, bench: TierBench) -> None:
        first, second = make_keys("twice", 2)
        result = bench.wait(job := bench.submit_store([first, second, first]))[job]
        assert result.outcomes == (DONE,) * 3
        assert result.bytes_moved == 2 * self.row_bytes
        assert bench.tier.counters()["stored"] == 2
        assert bench.load([first, first, second]) == [DONE] * 3

    def test_what_is_there_is_not_written_again(self, bench: TierBench) -> None:
        keys = make_keys("again", 3)
        bench.store(keys)
        before = bench.tier.counters()["stored"]
        result = bench.wait(job := bench.submit_store(keys))[job]
        assert result.outcomes == (DONE,) * 3
        assert result.bytes_moved == 0
        assert bench.tier.counters()["stored"] == before

    def test_bytes_and_counts_are_told(self, bench: TierBench) -> None:
        keys = make_keys("told", 5)
        stored = bench.wait(job := bench.submit_store(keys))[job]
        loaded = bench.wait(job := bench.submit_load([*keys, *make_keys("other", 1)]))[job]
        assert stored.bytes_moved == loaded.bytes_moved == 5 * self.row_bytes
        counters = bench.tier.counters()
        assert set(COUNTERS) <= set(counters)
        assert (counters["stored"], counters["loaded"]) == (5, 5)
        bench.until(lambda: bench.tier.usage().blocks == 5, "usage never counts 5 blocks")
        usage = bench.tier.usage()
        assert usage.bytes >= 5 * self.row_bytes
        assert usage.oldest_s is None or 0 <= usage.oldest_s <= self.patience_s

    def test_the_group_is_part_of_the_key(self, bench: TierBench) -> None:
        [first] = make_keys("group", 1, group=0)
        second = first._replace(group=1)
        bench.store([first])
        assert bench.lookup([first, second]) == [HIT, MISS]
        assert bench.load([second, first]) == [MISSING, DONE]
        bench.store([second])
        assert bench.load([first, second]) == [DONE, DONE]

    def test_every_legal_hash_is_a_key_of_its_own(self, bench: TierBench) -> None:
        hashes = (b"\0", b"\0\0", b"/", b"..", b"../../x", b"\xff" * 64, b"\xff" * 63, b"A", b"a")
        keys = [BlockKey(each, 0) for each in hashes]
        for count in range(len(keys)):
            assert bench.lookup(keys) == [HIT] * count + [MISS] * (len(keys) - count)
            assert bench.store([keys[count]]) == [DONE]
        assert bench.load(keys) == [DONE] * len(keys)

    def test_a_row_that_is_not_the_keys_block_is_not_stored(self, bench: TierBench) -> None:
        writing, emptied, other, good, foreign = keys = make_keys("unfit", 5)
        rows = bench.take(5)
        for row, key in zip(rows, keys, strict=True):
            bench.rows.fill(row, key)
        set_state(bench.rows.row_view(rows[0]), WRITING)
        set_state(bench.rows.row_view(rows[1]), EMPTY)
        bench.rows.fill(rows[2], good)
        bench.rows.scribble(rows[4])
        outcomes = bench.outcomes(bench.submit_rows(keys, rows))
        assert outcomes == [FAILED, FAILED, FAILED, DONE, FAILED]
        assert bench.lookup([writing, emptied, other, foreign]) == [MISS] * 4
        assert bench.load(keys) == [MISSING, MISSING, MISSING, DONE, MISSING]

    def test_a_row_of_another_namespace_is_not_stored(self, bench: TierBench) -> None:
        [key] = make_keys("stranger", 1)
        [row] = bench.take(1)
        bench.rows.fingerprint = hashlib.sha256(b"another namespace").digest()
        bench.rows.fill(row, key)
        bench.rows.fingerprint = FINGERPRINT
        assert bench.outcomes(bench.submit_rows([key], [row])) == [FAILED]
        assert bench.lookup([key]) == [MISS]

    def test_many_jobs_at_once_have_one_result_each(self, bench: TierBench) -> None:
        keys = make_keys("many", 12)
        jobs = []

        def has_room() -> bool:
            bench.poll()
            return bench.free_rows >= 3

        chance, stored = random.Random(3), set()
        for number in range(60):
            some = chance.sample(keys, 3)
            bench.until(has_room, "rows never come back")
            if number % 3:
                jobs.append((bench.submit_load(some), {DONE, MISSING}))
            else:
                stored.update(some)
                jobs.append((bench.submit_store(some), {DONE}))
        results = bench.wait(*(job for job, _ in jobs))
        assert all(set(results[job].outcomes) <= allowed for job, allowed in jobs)
        assert not bench.poll()
        assert bench.load(keys) == [DONE if key in stored else MISSING for key in keys]

    def test_namespaces_do_not_see_each_other(self, open_bench: OpenBench) -> None:
        keys = make_keys("shared name", 4)
        other = hashlib.sha256(b"another namespace").digest()
        ours = open_bench()
        ours.store(keys)
        ours.close()
        theirs = open_bench(fingerprint=other)
        assert theirs.lookup(keys) == [MISS] * 4
        assert theirs.load(keys) == [MISSING] * 4
        # Equal keys, other bytes: the bench would tell if these were mistaken for ours.
        assert theirs.store(keys[:2]) == [DONE] * 2
        assert theirs.load(keys) == [DONE, DONE, MISSING, MISSING]
        theirs.close()
        again = open_bench()
        expected = [DONE] * 4
        if not again.tier.capabilities.persistent:
            again.store(keys)
        assert again.load(keys) == expected

    @needs("shared")
    def test_namespaces_side_by_side_do_not_see_each_other(self, open_bench: OpenBench) -> None:
        keys = make_keys("side by side", 4)
        ours = open_bench()
        theirs = open_bench(fingerprint=hashlib.sha256(b"another namespace").digest())
        first, second = ours.submit_store(keys), theirs.submit_store(keys)
        ours.wait(first)
        theirs.wait(second)
        assert ours.load(keys) == [DONE] * 4
        assert theirs.load(keys) == [DONE] * 4

    @needs("can_stall")
    def test_a_job_id_in_use_is_the_callers_mistake(
        self, bench: TierBench, harness: TierHarness
    ) -> None:
        [key] = make_keys("in use", 1)
        harness.stall()
        job = bench.submit_store([key])
        for submit in (bench.tier.submit_store, bench.tier.submit_load):
            with pytest.raises(TierError):
                submit(Job(job, (), ()))
        harness.resume()
        assert bench.outcomes(job) == [DONE]
