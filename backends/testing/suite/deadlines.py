"""A storage that does not answer: nobody waits for it, and rows stay safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backends.testing.bench import TierBench
from backends.testing.harness import TierHarness
from backends.testing.rows import make_keys
from backends.testing.suite.base import SuiteBase, needs
from backends.tier.base import Lookup, Outcome

DONE, LATE = Outcome.DONE, Outcome.LATE
_SHORT_S = 0.05


class DeadlineTests(SuiteBase):
    def test_a_deadline_that_has_passed_makes_every_key_late(self, bench: TierBench) -> None:
        there, absent = make_keys("in time", 3), make_keys("too late", 3)
        bench.store(there)
        past_s = time.monotonic() - 1.0
        load, store = bench.submit_load(there, past_s), bench.submit_store(absent, past_s)
        assert bench.outcomes(load) == [LATE] * 3
        assert bench.outcomes(store) == [LATE] * 3
        assert bench.tier.counters()["late"] == 6
        assert bench.load(there) == [DONE] * 3

    def test_a_deadline_far_off_changes_nothing(self, bench: TierBench) -> None:
        keys = make_keys("far off", 3)
        far_s = time.monotonic() + 3600
        assert bench.outcomes(bench.submit_store(keys, far_s)) == [DONE] * 3
        assert bench.outcomes(bench.submit_load(keys, far_s)) == [DONE] * 3

    @needs("can_stall")
    def test_no_method_waits_for_the_storage(self, bench: TierBench, harness: TierHarness) -> None:
        stored, fresh = make_keys("known", 4), make_keys("unknown", 4)
        bench.store(stored)
        harness.stall()
        self._promptly(harness, "lookup", lambda: bench.tier.lookup([*stored, *fresh]))
        self._promptly(harness, "submit_load", lambda: bench.submit_load(stored))
        self._promptly(harness, "submit_store", lambda: bench.submit_store(fresh))
        self._promptly(harness, "lookup of a key on its way", lambda: bench.tier.lookup(fresh))
        self._promptly(harness, "poll", bench.poll)
        self._promptly(harness, "touch", lambda: bench.tier.touch(stored))
        self._promptly(harness, "usage", bench.tier.usage)
        self._promptly(harness, "counters", bench.tier.counters)
        self._promptly(harness, "a drain of 10 ms", lambda: bench.tier.drain(0.01))
        harness.resume()
        bench.settle()
        assert bench.lookup(fresh) == [Lookup.HIT] * 4

    @needs("can_stall")
    def test_a_drain_that_times_out_says_so(self, bench: TierBench, harness: TierHarness) -> None:
        harness.stall()
        job = bench.submit_store(make_keys("held", 2))
        assert not bench.tier.drain(_SHORT_S)
        harness.resume()
        assert bench.tier.drain(self.patience_s)
        assert bench.outcomes(job) == [DONE] * 2

    @needs("can_stall")
    def test_a_load_that_comes_too_late_is_late_and_leaves_its_rows_alone(
        self, bench: TierBench, harness: TierHarness
    ) -> None:
        keys = make_keys("stalled", 6)
        bench.store(keys)
        harness.stall()
        job = bench.submit_load(keys, time.monotonic() + _SHORT_S)
        time.sleep(2 * _SHORT_S)
        # A tier may give the result now or when the storage is back. The bench fills the rows at
        # once with a pattern of its own, and looks at the end whether it is still there.
        bench.poll()
        harness.resume()
        assert bench.outcomes(job) == [LATE] * 6
        assert bench.tier.drain(self.patience_s)
        bench.check_free_rows()
        assert bench.load(keys) == [DONE] * 6

    @needs("can_stall")
    def test_a_store_that_comes_too_late_is_late_and_whole_or_absent(
        self, bench: TierBench, harness: TierHarness
    ) -> None:
        keys = make_keys("stalled stores", 6)
        harness.stall()
        job = bench.submit_store(keys, time.monotonic() + _SHORT_S)
        time.sleep(2 * _SHORT_S)
        bench.poll()
        harness.resume()
        assert bench.outcomes(job) == [LATE] * 6
        answers, outcomes = bench.lookup(keys), bench.load(keys)
        assert Lookup.PENDING not in answers
        assert set(outcomes) <= {DONE, Outcome.MISSING}
        assert bench.store(keys) == [DONE] * 6

    @needs("can_stall")
    def test_jobs_without_a_deadline_outlive_a_stall(
        self, bench: TierBench, harness: TierHarness
    ) -> None:
        keys = make_keys("patient", 4)
        bench.store(keys)
        harness.stall()
        load, store = bench.submit_load(keys), bench.submit_store(make_keys("patient too", 4))
        time.sleep(_SHORT_S)
        harness.resume()
        assert bench.outcomes(load) == [DONE] * 4
        assert bench.outcomes(store) == [DONE] * 4

    def _promptly(self, harness: TierHarness, what: str, call: Callable[[], object]) -> None:
        """Call it while the storage is stalled; if it waits, end the stall and fail."""
        waited = threading.Event()

        def give_up() -> None:
            waited.set()
            harness.resume()

        watch = threading.Timer(self.patience_s, give_up)
        watch.start()
        try:
            call()
        finally:
            watch.cancel()
            watch.join()
        assert not waited.is_set(), f"{what} waits for the storage"
