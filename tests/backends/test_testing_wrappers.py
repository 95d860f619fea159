"""SlowTier and FaultyTier do what they stand for, the same way every time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from backends.errors import TierError
from backends.testing import (
    Fault,
    FaultKind,
    FaultyTier,
    MemorySettings,
    MemoryTier,
    RowBuffer,
    SlowTier,
    TierBench,
    make_context,
    make_keys,
)
from backends.tier.base import Job, Lookup, Outcome, Tier, TierContext

ROW_BYTES = 8192
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
FAILED, LATE, SHED = Outcome.FAILED, Outcome.LATE, Outcome.SHED

Open = Callable[[Callable[[Tier, TierContext], Tier]], TierBench]


@pytest.fixture
def open_bench() -> Iterator[Open]:
    """A bench on a wrapped MemoryTier; checked once more at the end."""
    benches = []

    def open_bench(wrap: Callable[[Tier, TierContext], Tier]) -> TierBench:
        rows = RowBuffer(32, ROW_BYTES)
        context = make_context(rows)
        benches.append(TierBench(wrap(MemoryTier(context, MemorySettings()), context), rows))
        return benches[-1]

    yield open_bench
    for bench in benches:
        bench.close()


def slow(open_bench: Open, **settings: float) -> TierBench:
    return open_bench(lambda inner, context: SlowTier(inner, context, **settings))


def faulty(open_bench: Open, *faults: Fault, seed: int = 0) -> TierBench:
    return open_bench(lambda inner, context: FaultyTier(inner, context, faults, seed=seed))


def test_a_slow_tier_takes_its_latency(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=0.03)
    began_s = time.monotonic()
    result = bench.wait(job := bench.submit_store(make_keys("slow", 2)))[job]
    assert result.outcomes == (DONE, DONE)
    assert time.monotonic() - began_s >= 0.03
    assert result.seconds >= 0.03


def test_a_narrow_pipe_makes_jobs_wait_for_each_other(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=0.0, bytes_per_s=4 * ROW_BYTES / 0.02)
    began_s = time.monotonic()
    bench.wait(*(bench.submit_store(make_keys(f"pipe {number}", 4)) for number in range(3)))
    assert time.monotonic() - began_s >= 0.06


def test_jitter_depends_on_the_seed_alone(open_bench: Open) -> None:
    def delays_s(seed: int) -> list[float]:
        bench = slow(open_bench, latency_s=3600.0, jitter=0.5, seed=seed)
        for _ in range(8):
            bench.submit_load(make_keys("jitter", 1))
        assert isinstance(bench.tier, SlowTier)
        travelling = bench.tier._travelling.values()
        return [item.arrives_s - item.began_s for item in travelling]

    first = delays_s(1)
    assert first == pytest.approx(delays_s(1), abs=1e-3)
    assert first != pytest.approx(delays_s(2), abs=1e-3)
    assert all(1800 <= delay_s <= 5400 for delay_s in first)
    assert max(first) - min(first) > 600


def test_a_job_that_is_late_on_the_way_never_arrives(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=3600.0)
    keys = make_keys("late", 2)
    jobs = [
        submit(keys, time.monotonic() + 0.01) for submit in (bench.submit_store, bench.submit_load)
    ]
    results = bench.wait(*jobs)
    assert [results[job].outcomes for job in jobs] == [(LATE, LATE)] * 2
    assert bench.tier.counters()["late"] == 4
    assert bench.tier.counters()["stored"] == 0


def test_a_store_on_its_way_is_pending(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=0.05)
    [key] = make_keys("on its way", 1)
    assert not bench.is_hit(key)
    bench.submit_store([key])
    assert list(bench.tier.lookup([key])) == [Lookup.PENDING]
    bench.settle()
    assert list(bench.tier.lookup([key])) == [Lookup.HIT]


def test_a_slow_lookup_is_pending_before_it_is_a_miss(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=0.0, lookup_latency_s=0.03)
    [key] = make_keys("asked", 1)
    began_s = time.monotonic()
    assert list(bench.tier.lookup([key])) == [Lookup.PENDING]
    assert bench.lookup([key]) == [Lookup.MISS]
    assert time.monotonic() - began_s >= 0.03


def test_jobs_on_their_way_are_shed_when_a_slow_tier_closes(open_bench: Open) -> None:
    bench = slow(open_bench, latency_s=3600.0)
    keys = make_keys("closed", 2)
    jobs = [bench.submit_store(keys), bench.submit_load(keys)]
    bench.tier.close()
    results = bench.wait(*jobs)
    assert [results[job].outcomes for job in jobs] == [(SHED, SHED)] * 2
    with pytest.raises(TierError):
        bench.tier.submit_store(Job(99, (), ()))


@pytest.mark.parametrize("kind", [FaultKind.SHORT_READ, FaultKind.FLIPPED_BIT])
def test_damage_is_corrupt_then_a_miss_then_mended(open_bench: Open, kind: FaultKind) -> None:
    bench = faulty(open_bench, Fault(kind, after=1, times=1))
    keys = make_keys("damage", 3)
    bench.store(keys)
    assert bench.load(keys) == [DONE, CORRUPT, DONE]
    assert bench.lookup(keys) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
    assert bench.load(keys) == [DONE, MISSING, DONE]
    assert bench.store(keys) == [DONE] * 3
    assert bench.load(keys) == [DONE] * 3
    counters = bench.tier.counters()
    assert (counters["corrupt"], counters[f"injected_{kind.value}"]) == (1, 1)
    assert counters["loaded"] == 2 + 2 + 3


def test_an_error_fails_one_key_and_changes_nothing(open_bench: Open) -> None:
    bench = faulty(
        open_bench,
        Fault(FaultKind.ERROR, on="store", times=1),
        Fault(FaultKind.ERROR, on="load", after=1, times=1),
    )
    keys = make_keys("error", 3)
    assert bench.store(keys) == [FAILED, DONE, DONE]
    assert bench.lookup(keys) == [Lookup.MISS, Lookup.HIT, Lookup.HIT]
    assert bench.store(keys) == [DONE] * 3
    assert bench.load(keys) == [DONE, FAILED, DONE]
    assert bench.load(keys) == [DONE] * 3


def test_a_lost_write_is_done_and_not_there(open_bench: Open) -> None:
    bench = faulty(open_bench, Fault(FaultKind.LOST_WRITE, after=1, times=1))
    keys = make_keys("lost", 3)
    assert bench.store(keys) == [DONE] * 3
    assert bench.lookup(keys) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
    assert bench.load(keys) == [DONE, MISSING, DONE]


def test_what_hangs_goes_on_when_it_is_released(open_bench: Open) -> None:
    bench = faulty(open_bench, Fault(FaultKind.HANG, on="store", after=1, times=1))
    keys = make_keys("hang", 3)
    job = bench.submit_store(keys)
    assert not bench.tier.drain(0.05)
    assert not bench.poll()
    assert list(bench.tier.lookup(keys)) == [Lookup.HIT, Lookup.PENDING, Lookup.HIT]
    assert isinstance(bench.tier, FaultyTier)
    bench.tier.release()
    assert bench.outcomes(job) == [DONE] * 3
    assert bench.lookup(keys) == [Lookup.HIT] * 3


def test_what_hangs_ends_at_its_deadline(open_bench: Open) -> None:
    bench = faulty(open_bench, Fault(FaultKind.HANG, on="load", after=1, times=1))
    keys = make_keys("hang", 3)
    bench.store(keys)
    assert bench.outcomes(bench.submit_load(keys, time.monotonic() + 1.0)) == [DONE, LATE, DONE]
    assert bench.tier.counters()["late"] == 1


def test_what_hangs_is_shed_by_close(open_bench: Open) -> None:
    bench = faulty(open_bench, Fault(FaultKind.HANG, times=1))
    job = bench.submit_store(make_keys("hang", 2))
    bench.tier.drain(0.01)
    bench.tier.close()
    assert bench.outcomes(job)[0] is SHED


def test_wrong_bytes_are_served_as_if_they_were_right() -> None:
    rows = RowBuffer(2, ROW_BYTES)
    context = make_context(rows)
    tier = FaultyTier(
        MemoryTier(context, MemorySettings()), context, [Fault(FaultKind.WRONG_BYTES)]
    )
    keys = make_keys("wrong bytes", 1)
    rows.fill(0, keys[0])
    tier.submit_store(Job(0, keys, (0,)))
    assert tier.drain(20.0)
    tier.submit_load(Job(1, keys, (1,)))
    assert tier.drain(20.0)
    outcomes = {result.job_id: result.outcomes for result in tier.poll()}
    assert outcomes == {0: (DONE,), 1: (DONE,)}
    assert rows.wrong(0, keys[0]) is None
    assert "1 wrong payload bytes" in (rows.wrong(1, keys[0]) or "")
    tier.close()


def test_faults_depend_on_plan_and_seed_alone(open_bench: Open) -> None:
    def outcomes(seed: int, batch: int) -> list[Outcome]:
        bench = faulty(open_bench, Fault(FaultKind.ERROR, rate=0.3), seed=seed)
        keys = make_keys("seeded", 40)
        return [
            outcome
            for begin in range(0, 40, batch)
            for outcome in bench.store(keys[begin : begin + batch])
        ]

    first = outcomes(1, 4)
    assert first == outcomes(1, 8)
    assert first != outcomes(2, 4)
    assert 4 < first.count(FAILED) < 24


@pytest.mark.parametrize("seed", range(6))
def test_all_faults_together_keep_the_contract(open_bench: Open, seed: int) -> None:
    """The bench checks every result: one for each job, right bytes or an EMPTY header."""
    bench = faulty(
        open_bench,
        *(Fault(kind, rate=0.06) for kind in FaultKind if kind is not FaultKind.WRONG_BYTES),
        seed=seed,
    )
    keys = make_keys("all", 10)
    jobs = []
    for number in range(40):
        some = [keys[(number * 3 + step) % 10] for step in (0, 1, 4)]
        submit = bench.submit_load if number % 2 else bench.submit_store
        while bench.free_rows < 3:
            bench.poll()
        jobs.append(submit(some, time.monotonic() + 0.05))
    results = bench.wait(*jobs)
    assert set(results) == set(jobs)
    counters = bench.tier.counters()
    assert sum(value for name, value in counters.items() if name.startswith("injected_")) > 5


@pytest.mark.parametrize(
    ("kind", "on"), [(FaultKind.LOST_WRITE, "load"), (FaultKind.SHORT_READ, "store")]
)
def test_a_fault_that_cannot_happen_there_is_refused(kind: FaultKind, on: str) -> None:
    context = make_context(RowBuffer(1, ROW_BYTES))
    inner = MemoryTier(context, MemorySettings())
    with pytest.raises(TierError, match=f"fault {kind.value} on '{on}'"):
        FaultyTier(inner, context, [Fault(kind, on=on)])
    inner.close()
