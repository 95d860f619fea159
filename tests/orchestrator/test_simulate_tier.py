"""The simulated tier keeps what the filesystem tier keeps to: quota, order, who sees what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.block import BlockKey
from backends.tier.base import Job, JobResult, Lookup, Outcome
from orchestrator.simulate.clock import Clock
from orchestrator.simulate.medium import Medium
from orchestrator.simulate.tier import SimTier
from orchestrator.simulate.timing import TierTiming, Transfer

ROW_BYTES = 8192


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") + bytes(24), 0)


class Replica:
    """One that stores, loads and looks without minding jobs."""

    def __init__(self, medium: Medium, private: int | None = None) -> None:
        self.clock = Clock()
        self.tier = SimTier("fs", medium, ROW_BYTES, self.clock, TierTiming(), private=private)
        self.jobs = 0

    def _job(self, numbers: Sequence[int]) -> Job:
        self.jobs += 1
        return Job(self.jobs, tuple(map(key, numbers)), tuple(range(len(numbers))))

    def _ended(self) -> JobResult:
        [result] = self.tier.poll()
        return result

    def store(self, *numbers: int) -> JobResult:
        self.tier.submit_store(self._job(numbers))
        return self._ended()

    def load(self, *numbers: int) -> JobResult:
        self.tier.submit_load(self._job(numbers))
        return self._ended()

    def has(self, *numbers: int) -> list[bool]:
        found = self.tier.lookup([key(number) for number in numbers])
        return [answer is Lookup.HIT for answer in found]

    def touch(self, *numbers: int) -> None:
        self.tier.touch([key(number) for number in numbers])


def test_what_was_used_least_recently_goes_and_of_a_batch_the_last_one_first() -> None:
    replica = Replica(Medium(3))
    replica.store(1, 2, 3)
    replica.store(4)
    assert replica.has(1, 2, 3, 4) == [True, True, False, True]
    replica.load(2)
    replica.load(4)
    replica.store(5)
    assert replica.has(1, 2, 4, 5) == [False, True, True, True]


def test_a_store_is_written_once_and_counted_as_the_real_tier_counts_it() -> None:
    medium = Medium(None)
    one, two = Replica(medium), Replica(medium)
    assert one.store(1, 2).bytes_moved == 2 * ROW_BYTES
    result = two.store(1, 2, 3)
    assert result.outcomes == (Outcome.DONE,) * 3
    assert result.bytes_moved == ROW_BYTES
    counts = two.tier.counters()
    assert (counts["stored"], counts["dedup_skips"], counts["evicted"]) == (1, 2, 0)
    assert one.load(3, 4).outcomes == (Outcome.DONE, Outcome.MISSING)
    assert one.tier.usage().bytes == 3 * ROW_BYTES


def test_others_see_loads_and_stores_and_do_not_see_lookups_and_touches() -> None:
    medium = Medium(2)
    one, two = Replica(medium), Replica(medium)
    one.store(1)
    one.store(2)
    one.touch(1)
    one.store(3)  # it has used 1 since
    assert two.has(1, 2, 3) == [True, False, True]
    one.load(1)
    two.store(4)  # it looked 3 up before that load, which it sees
    assert two.has(1, 3, 4) == [True, False, True]


def test_isolated_replicas_share_the_capacity_and_not_the_blocks() -> None:
    medium = Medium(2)
    one, two = Replica(medium, private=0), Replica(medium, private=1)
    one.store(1)
    assert two.has(1) == [False]
    two.store(1)
    two.store(2)
    assert one.has(1) == [False]
    assert two.has(1, 2) == [True, True]


def test_a_batch_larger_than_the_capacity_keeps_its_first_blocks() -> None:
    replica = Replica(Medium(2))
    result = replica.store(1, 2, 3)
    assert result.outcomes == (Outcome.DONE, Outcome.DONE, Outcome.SHED)
    assert replica.has(1, 2, 3) == [True, True, False]


_OPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["store", "load", "touch", "has"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(_OPS, st.integers(3, 6))
def test_evictions_are_those_of_a_plain_list_of_times(
    ops: list[tuple[int, str, list[int]]], capacity: int
) -> None:
    """The model: of each block when everybody saw it used, and when each replica used it."""
    medium = Medium(capacity)
    replicas = [Replica(medium), Replica(medium)]
    seen: dict[int, int] = {}
    own: list[dict[int, int]] = [{}, {}]
    now = 0
    for who, verb, numbers in ops:
        now += 10
        getattr(replicas[who], verb)(*numbers)
        times = {number: now - at for at, number in enumerate(numbers)}
        if verb == "store":
            new = [number for number in numbers if number not in seen]
            if len(new) < len(numbers):
                own[who] |= {n: at for n, at in times.items() if n in seen}
            age = {n: max(at, own[who].get(n, 0)) for n, at in seen.items() if n not in numbers}
            for gone in sorted(age, key=age.__getitem__)[: max(0, len(seen) + len(new) - capacity)]:
                del seen[gone]
                own[0].pop(gone, None)
                own[1].pop(gone, None)
            seen |= {number: times[number] for number in new}
        elif verb == "load":
            seen |= {n: at for n, at in times.items() if n in seen}
        else:
            own[who] |= {n: at for n, at in times.items() if n in seen}
        # A block's name there is its hash's first 64 bits.
        assert {number for number in range(10) if number in medium} == set(seen)


def test_a_later_batch_waits_for_the_blocks_before_it() -> None:
    clock = Clock()
    timing = TierTiming(load=Transfer(first_s=0.010, block_s=0.002))
    medium = Medium(None)
    medium.show([0, 1, 2, 3], 1)
    tier = SimTier("fs", medium, ROW_BYTES, clock, timing)
    tier.submit_load(Job(1, (key(0), key(1), key(2)), (0, 1, 2)))
    tier.submit_load(Job(2, (key(3),), (3,)))
    assert list(tier.poll()) == []
    clock.wait()
    [first] = tier.poll()
    assert first.seconds == pytest.approx(0.010 + 2 * 0.002)
    clock.wait()
    [second] = tier.poll()
    assert (second.job_id, second.seconds) == (2, pytest.approx(0.010 + 3 * 0.002))
