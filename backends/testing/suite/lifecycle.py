"""Opening, draining, closing, and opening again."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from backends.errors import TierError
from backends.testing.bench import TierBench
from backends.testing.rows import make_keys
from backends.testing.suite.base import OpenBench, SuiteBase, needs
from backends.tier.base import Job, Lookup, Outcome

DONE = Outcome.DONE
SETTLE_S = 5.0


class LifecycleTests(SuiteBase):
    @needs("persistent")
    def test_blocks_are_there_when_the_tier_is_opened_again(self, open_bench: OpenBench) -> None:
        keys = make_keys("kept", 6)
        first = open_bench()
        first.store(keys)
        first.close()
        again = open_bench()
        assert again.lookup(keys) == [Lookup.HIT] * 6
        assert again.load(keys) == [DONE] * 6
        result = again.wait(job := again.submit_store(keys))[job]
        assert result.outcomes == (DONE,) * 6
        assert result.bytes_moved == 0

    def test_drain_twice_and_close_twice(self, bench: TierBench) -> None:
        assert bench.tier.drain(0.0)
        job = bench.submit_store(make_keys("drained", 6))
        assert bench.tier.drain(self.patience_s)
        assert bench.tier.drain(0.0)
        assert [result.job_id for result in bench.poll()] == [job]
        bench.tier.close()
        bench.tier.close()
        assert bench.tier.drain(0.0)

    def test_results_are_given_after_close(self, bench: TierBench) -> None:
        keys = make_keys("unpolled", 6)
        bench.store(keys[:3])
        jobs = [
            bench.submit_load(keys[:3]),
            bench.submit_store(keys[3:]),
            bench.submit_load([]),
            bench.submit_store([]),
        ]
        bench.tier.close()
        results = bench.wait(*jobs)
        for job in jobs:
            assert set(results[job].outcomes) <= {DONE, Outcome.SHED}
        assert not bench.poll()

    def test_a_closed_tier_knows_nothing_and_takes_nothing(self, bench: TierBench) -> None:
        keys = make_keys("closed", 2)
        bench.store(keys)
        bench.tier.close()
        assert list(bench.tier.lookup(keys)) == [Lookup.MISS] * 2
        for submit in (bench.tier.submit_load, bench.tier.submit_store):
            with pytest.raises(TierError):
                submit(Job(1 << 40, (), ()))
        assert bench.tier.counters()["stored"] == 2
        bench.tier.usage()

    def test_a_closed_tier_leaves_no_thread_and_no_open_file(self, open_bench: OpenBench) -> None:
        keys = make_keys("leaks", 4)

        def count() -> tuple[int, int]:
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        def is_more(now: tuple[int, int], then: tuple[int, int]) -> bool:
            return now[0] > then[0] or now[1] > then[1]

        def cycle() -> tuple[int, int]:
            bench = open_bench()
            bench.store(keys)
            bench.load(keys)
            bench.submit_load(keys)
            bench.close()
            gc.collect()
            return count()

        # The first times may make what a library keeps for the whole process.
        before = [cycle() for _ in range(2)][-1]
        after = [cycle() for _ in range(4)][-1]
        # A network client may close its connections a moment after it was given up.
        until_s = time.monotonic() + SETTLE_S
        while is_more(after, before) and time.monotonic() < until_s:
            time.sleep(0.02)
            after = count()
        assert not is_more(after, before), (
            f"threads and open files were {before} and are {after} after four more times"
        )
