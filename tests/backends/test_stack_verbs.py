"""What the tier stack promises, one promise a test, over real tiers in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from backends.block import (
    COMPLETE,
    HEADER_BYTES,
    WRITING,
    BlockKey,
    holds,
    read_header,
    write_header,
)
from backends.errors import ConfigError, TierError
from backends.policy.admission import open_admission
from backends.policy.registry import PolicyRegistry
from backends.stack.headers import RowHeaders
from backends.stack.measure import Breaker, LoadCost
from backends.stack.results import Found
from backends.stack.settings import Edge, StackSettings
from backends.stack.stack import TierStack
from backends.testing import (
    Fault,
    FaultKind,
    FaultyTier,
    MemoryMedium,
    MemorySettings,
    MemoryTier,
    SlowTier,
)
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context, make_keys
from backends.tier.base import Lookup, Tier

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
PATIENCE_S = 20.0
UNHURRIED = {"lookup_timeout_s": 20.0, "load_timeout_s": 20.0, "store_timeout_s": 20.0}


class Bench:
    """A stack over rows in memory, and an engine that fills and checks them at once."""

    def __init__(
        self, rows: int = 16, tiers: int = 1, groups: int = 1, edges: str = "", **settings: Any
    ) -> None:
        self.rows = RowBuffer(rows, 2 * 4096)
        self.context = make_context(self.rows)
        self.media = [MemoryMedium() for _ in range(tiers)]
        self.tiers: list[Tier] = [self.memory(number) for number in range(tiers)]
        self.settings = {"edges": tuple(map(Edge.parse, edges.split())), **UNHURRIED, **settings}
        self.groups = groups

    def memory(self, number: int, capacity: int | None = None) -> MemoryTier:
        tier = MemoryTier(self.context, MemorySettings(capacity), self.media[number])
        tier.name = f"tier{number}"
        return tier

    def open(self, rows: int | None = None, headers: RowHeaders | None = None) -> TierStack:
        count = self.rows.rows if rows is None else rows
        self.stack = TierStack(
            count,
            PolicyRegistry().open("lru", count // self.groups),
            self.tiers,
            StackSettings(**self.settings),
            groups=self.groups,
            entry_bytes=self.rows.row_bytes * self.groups,
            headers=headers,
        )
        return self.stack

    def store(self, keys: Sequence[bytes], **how: Any) -> list[bytes]:
        storing = self.stack.prepare_store(keys, **how)
        for group, rows in enumerate(storing.rows):
            for key, row in zip(storing.keys, rows, strict=True):
                self.rows.fill(row, BlockKey(key, group))
        self.stack.complete_store(storing.keys)
        return list(storing.keys)

    def put_below(self, number: int, keys: Sequence[bytes]) -> None:
        """Store through another stack, so that only this tier has them."""
        other = Bench(4 * len(keys) * self.groups, 0, self.groups)
        tier = MemoryTier(other.context, MemorySettings(), self.media[number])
        other.tiers = [tier]
        other.open()
        other.store(keys)
        assert other.stack.drain(PATIENCE_S)
        other.stack.close()

    def settled(self, keys: Sequence[bytes]) -> Found:
        until_s = time.monotonic() + PATIENCE_S
        while (found := self.stack.lookup(keys)).waits:
            assert time.monotonic() < until_s
            time.sleep(0.0005)
            self.stack.step()
        return found

    def known(self, keys: Sequence[bytes]) -> None:
        """Have the tiers find out what they hold."""
        blocks = [BlockKey(key, group) for key in keys for group in range(self.groups)]
        for tier in self.tiers:
            while PENDING in tier.lookup(blocks):
                time.sleep(0.0005)

    def load(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        """Check every byte; which of them came from a tier just now."""
        loading = self.stack.prepare_load(keys)
        for group, rows in enumerate(loading.rows):
            for key, row in zip(keys, rows, strict=True):
                assert self.rows.wrong(row, BlockKey(key, group)) is None
        self.stack.complete_load(keys)
        return loading.sources

    def below(self, number: int) -> set[bytes]:
        return {key.hash for _, key in self.media[number].blocks}


def hashes(name: str, count: int) -> list[bytes]:
    return [key.hash for key in make_keys(name, count)]


def test_what_is_stored_is_a_hit_only_when_it_is_complete() -> None:
    bench, keys = Bench(tiers=0), hashes("a", 3)
    stack = bench.open()
    assert stack.lookup(keys) == Found([MISS] * 3, None)
    storing = stack.prepare_store(keys)
    found = stack.lookup(keys)
    assert found.answers == [PENDING] * 3
    assert found.deadline_s is not None
    stack.complete_store(storing.keys[:1])
    assert stack.lookup(keys).hits == 1
    stack.complete_store(storing.keys[1:], failed=storing.keys[2:])
    assert stack.lookup(keys).answers == [HIT, HIT, MISS]
    assert stack.index.rows_free == 14


def test_an_engine_that_does_not_complete_a_store_is_not_waited_for_for_ever() -> None:
    bench, keys = Bench(tiers=0, engine_timeout_s=0.0), hashes("a", 1)
    stack = bench.open()
    storing = stack.prepare_store(keys)
    assert stack.lookup(keys).answers == [MISS]
    assert stack.prepare_store(keys).keys == ()
    stack.complete_store(storing.keys)
    assert stack.lookup(keys).answers == [HIT]


def test_rows_that_are_loaded_are_not_evicted_until_every_load_of_them_has_ended() -> None:
    bench, keys = Bench(rows=4, tiers=0), hashes("a", 4)
    stack = bench.open()
    bench.store(keys)
    stack.prepare_load(keys[:2])
    stack.prepare_load(keys[:2])
    stack.complete_load(keys[:2])
    assert len(stack.prepare_store(hashes("b", 4)).keys) == 2
    assert stack.lookup(keys).answers == [HIT, HIT, MISS, MISS]
    stack.complete_load(keys[:2])
    assert stack.prepare_store(hashes("c", 4)).evicted == [keys[1], keys[0]]


def test_a_block_that_one_rank_could_not_load_is_a_miss_and_its_row_waits_for_the_others() -> None:
    bench, keys = Bench(rows=4, tiers=0), hashes("a", 4)
    stack = bench.open()
    bench.store(keys)
    stack.prepare_load(keys)
    stack.prepare_load(keys)
    stack.complete_load(keys, failed=keys[2:3])
    assert stack.lookup(keys).answers == [HIT, HIT, MISS, HIT]
    # Another request still reads that row, so the key cannot be stored anew.
    assert (stack.index.rows_free, stack.index.rows_leaving) == (0, 1)
    assert stack.prepare_store(keys).keys == ()
    stack.complete_load(keys)
    assert stack.prepare_store(keys).keys == [keys[2]]
    assert stack.counters.errors == 1


def test_loading_what_is_not_there_is_refused_and_pins_nothing() -> None:
    bench = Bench(tiers=0)
    stack = bench.open()
    bench.store(hashes("a", 2))
    with pytest.raises(TierError, match="is not in the region"):
        stack.prepare_load(hashes("a", 3))
    assert stack.index.pinned == 0


def test_a_key_given_twice_is_refused_and_costs_no_row() -> None:
    bench, [key] = Bench(tiers=0), hashes("a", 1)
    stack = bench.open()
    with pytest.raises(ConfigError, match="give each once"):
        stack.prepare_store([key, key])
    assert stack.index.rows_free == 16
    assert stack.lookup([key]).answers == [MISS]


def test_a_prefix_that_lies_in_several_tiers_is_put_together() -> None:
    bench, keys = Bench(tiers=3), hashes("a", 8)
    bench.put_below(0, keys[2:4])
    bench.put_below(1, [keys[4], keys[6]])
    bench.put_below(2, [keys[1], keys[5]])
    stack = bench.open()
    bench.store(keys[:1])
    assert bench.settled(keys).hits == 7
    names = [None, "tier2", "tier0", "tier0", "tier1", "tier2", "tier1"]
    assert bench.load(keys[:7]) == {k: n for k, n in zip(keys, names, strict=False) if n}
    assert bench.load(keys[:7]) == {}
    assert stack.lookup(keys).answers == [HIT] * 7 + [MISS]
    # One batch for each tier, whatever the order.
    assert [c.load_latency.counts and c.hits for c in stack.tier_counters.values()] == [2, 2, 2]
    stack.close()


def test_what_lies_behind_a_gap_is_not_loaded() -> None:
    bench, keys = Bench(tiers=1), hashes("a", 6)
    bench.put_below(0, keys[3:])
    stack = bench.open()
    assert bench.settled(keys).answers == [MISS] * 6
    assert stack.tier_counters["tier0"].hits == 0
    stack.close()


def test_promotions_take_no_more_than_their_share_and_are_fetched_ahead_as_room_comes() -> None:
    bench = Bench(rows=8, tiers=1, promotion_share=0.5, hold_s=60.0)
    first, second = hashes("a", 4), hashes("b", 4)
    bench.put_below(0, first)
    bench.put_below(0, second)
    stack = bench.open()
    assert bench.settled(first).hits == 4
    bench.known(second)
    found = stack.lookup(second)
    assert found.answers == [PENDING] * 4
    assert stack.index.rows_used == 4
    # Others can store meanwhile.
    assert len(bench.store(hashes("c", 4))) == 4
    bench.load(first)
    stack.step()
    assert bench.settled(second).hits == 4
    assert stack.tier_counters["tier0"].no_room == 0
    stack.close()


def test_what_waits_for_room_in_vain_is_a_miss_by_its_deadline() -> None:
    bench = Bench(rows=8, tiers=1, promotion_share=0.5, load_timeout_s=0.05, hold_s=60.0)
    first, second = hashes("a", 4), hashes("b", 4)
    bench.put_below(0, first)
    bench.put_below(0, second)
    stack = bench.open()
    assert bench.settled(first).hits == 4
    bench.known(second)
    found = stack.lookup(second)
    assert found.deadline_s is not None
    time.sleep(max(0.0, found.deadline_s - time.monotonic()))
    stack.step()
    assert stack.lookup(second).answers == [MISS] * 4
    assert stack.tier_counters["tier0"].no_room == 4
    stack.close()


def test_what_was_there_for_one_who_waits_may_be_waited_for_by_another() -> None:
    """It left the region meanwhile, and came into nobody's way."""
    bench = Bench(rows=8, tiers=1, promotion_share=0.5, load_timeout_s=0.1, hold_s=60.0)
    first, [below, there, behind] = hashes("a", 4), hashes("b", 3)
    bench.put_below(0, [*first, below, behind])
    stack = bench.open()
    assert bench.settled(first).hits == 4
    bench.known([below, behind])
    assert len(bench.store([there])) == 1
    found = stack.lookup([below, there, behind])
    assert found.answers == [PENDING, HIT, PENDING]
    assert found.deadline_s is not None
    # As another's request would leave it.
    anothers_s = found.deadline_s + 60.0
    stack._loads._queued[there] = anothers_s
    time.sleep(max(0.0, found.deadline_s - time.monotonic()))
    stack.step()
    assert stack.tier_counters["tier0"].no_room == 2
    assert stack._loads._queued[there] == anothers_s
    stack.close()


def test_a_prefix_longer_than_the_share_is_loaded_as_far_as_that_goes_without_waiting() -> None:
    bench, keys = Bench(rows=8, tiers=1, promotion_share=0.5, load_timeout_s=60.0), hashes("a", 7)
    bench.put_below(0, keys)
    stack = bench.open()
    bench.known(keys)
    assert stack.lookup(keys).answers == [PENDING] * 4 + [MISS] * 3
    assert bench.settled(keys).hits == 4
    stack.close()


def test_what_waits_for_room_leaves_none_for_more_of_its_own_sequence() -> None:
    bench = Bench(rows=8, tiers=1, promotion_share=0.5, load_timeout_s=60.0, hold_s=60.0)
    other, keys = hashes("a", 2), hashes("b", 6)
    bench.put_below(0, other)
    bench.put_below(0, keys)
    stack = bench.open()
    assert bench.settled(other).hits == 2
    bench.known(keys)
    for _ in range(3):  # as an engine asks again and again
        assert stack.lookup(keys).answers[2:] == [PENDING] * 2 + [MISS] * 2
        stack.step()
    bench.load(other)
    stack.step()
    assert bench.settled(keys).answers == [HIT] * 4 + [MISS] * 2
    stack.close()


def test_what_nobody_came_for_is_let_go_after_a_while() -> None:
    bench, keys = Bench(rows=8, tiers=1, hold_s=0.01), hashes("a", 4)
    bench.put_below(0, keys)
    stack = bench.open()
    assert bench.settled(keys).hits == 4
    assert stack.index.pinned == 4
    time.sleep(0.02)
    stack.step()
    assert stack.index.pinned == 0
    assert stack.lookup(keys).hits == 4
    stack.close()


def test_a_load_that_hangs_is_a_miss_and_its_rows_come_back_when_the_tier_lets_go() -> None:
    bench, keys = Bench(rows=8, tiers=1, edges="none", load_timeout_s=0.02), hashes("a", 3)
    bench.put_below(0, keys)
    stack = bench.open()
    bench.known(keys)
    bench.media[0].stall()
    assert stack.lookup(keys).answers == [PENDING] * 3
    assert bench.settled(keys).answers == [MISS] * 3
    stack.step()  # its time may have passed since the last one
    assert (stack.rows_late, stack.index.rows_free) == (3, 5)
    assert len(bench.store(keys)) == 3  # computed instead, into other rows
    bench.media[0].resume()
    assert stack.drain(PATIENCE_S)
    assert stack.rows_late == 0
    assert stack.index.rows_free == 5
    bench.load(keys)
    stack.close()


def test_a_tier_that_does_not_answer_lookups_is_passed_over_for_the_next() -> None:
    bench, keys = Bench(tiers=2, lookup_timeout_s=0.01), hashes("a", 3)
    bench.put_below(1, keys)
    bench.tiers[0] = SlowTier(
        bench.tiers[0], bench.context, latency_s=60.0, lookup_latency_s=60.0, seed=1
    )
    stack = bench.open()
    assert bench.settled(keys).hits == 3
    assert set(bench.load(keys).values()) == {"tier1"}
    assert stack.tier_counters["tier0"].late == 3
    stack.close()


def test_a_damaged_block_is_taken_from_the_next_tier_instead() -> None:
    bench, keys = Bench(tiers=2, edges="none none"), hashes("a", 3)
    bench.put_below(0, keys)
    bench.put_below(1, keys)
    bench.tiers[0] = FaultyTier(
        bench.tiers[0], bench.context, [Fault(FaultKind.FLIPPED_BIT, times=1, after=1)]
    )
    stack = bench.open()
    assert bench.settled(keys).hits == 3
    assert bench.load(keys) == {keys[0]: "tier0", keys[1]: "tier1", keys[2]: "tier0"}
    stack.close()


def test_a_tier_that_has_a_block_and_cannot_give_it_is_not_asked_again_and_again() -> None:
    bench, keys = Bench(tiers=1, edges="none"), hashes("a", 3)
    bench.put_below(0, keys)
    bench.tiers[0] = FaultyTier(bench.tiers[0], bench.context, [Fault(FaultKind.ERROR, "load")])
    stack = bench.open()
    assert bench.settled(keys).answers == [MISS] * 3
    assert stack.tier_counters["tier0"].errors == 3
    stack.close()


def test_uses_in_the_region_keep_a_block_in_the_tiers_below() -> None:
    bench, keys = Bench(rows=16, tiers=1), hashes("a", 3)
    bench.tiers = [bench.memory(0, capacity=3 * bench.rows.row_bytes)]
    stack = bench.open()
    bench.store(keys[:1])
    assert stack.drain(PATIENCE_S)
    bench.store(hashes("b", 2))
    assert stack.drain(PATIENCE_S)
    stack.touch(keys[:1])
    bench.store(hashes("c", 2))
    assert stack.drain(PATIENCE_S)
    assert bench.below(0) == {keys[0], *hashes("c", 2)}
    stack.close()


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ("write_through write_through", (4, 4)),
        ("write_through none", (4, 0)),
        ("none write_through", (0, 0)),
        ("write_on_evict write_through", (0, 0)),
        ("write_after_hits:2 none", (0, 0)),
    ],
)
def test_an_edge_decides_what_goes_down_at_once(edges: str, expected: tuple[int, int]) -> None:
    bench = Bench(tiers=2, edges=edges)
    stack = bench.open()
    bench.store(hashes("a", 4))
    assert stack.drain(PATIENCE_S)
    assert (len(bench.below(0)), len(bench.below(1))) == expected
    assert stack.index.pinned == 0
    stack.close()


def test_a_tier_that_takes_nothing_does_not_cut_off_those_below_it() -> None:
    bench = Bench(tiers=2)
    bench.tiers[0] = FaultyTier(bench.tiers[0], bench.context, [Fault(FaultKind.ERROR, "store")])
    stack = bench.open()
    bench.store(hashes("a", 4))
    assert stack.drain(PATIENCE_S)
    assert len(bench.below(1)) == 4
    stack.close()


def test_write_on_evict_loses_nothing_and_writes_each_block_once() -> None:
    bench, every = Bench(rows=8, tiers=1, edges="write_on_evict", evict_ahead=0.0), []
    stack = bench.open()
    for number in range(6):
        keys = hashes(f"seq{number}", 4)
        every += keys
        until_s = time.monotonic() + PATIENCE_S
        while bench.store(keys) or stack.lookup(keys).hits < 4:
            assert time.monotonic() < until_s
            time.sleep(0.0005)
            stack.step()
        assert stack.drain(PATIENCE_S)
    for number in range(6):
        keys = hashes(f"seq{number}", 4)
        assert bench.settled(keys).hits == 4
        bench.load(keys)
        assert stack.drain(PATIENCE_S)
    counters = stack.tier_counters["tier0"]
    assert counters.shed == 0
    assert counters.stored_bytes == len(bench.below(0)) * bench.rows.row_bytes
    stack.close()


def test_rows_are_kept_free_ahead_of_need_where_eviction_writes() -> None:
    bench = Bench(rows=16, tiers=1, edges="write_on_evict", evict_ahead=0.25)
    stack = bench.open()
    bench.store(hashes("a", 16))
    assert stack.index.rows_free == 0
    stack.step()
    assert stack.drain(PATIENCE_S)
    assert stack.index.rows_free == 4
    assert bench.below(0) == set(hashes("a", 16)[12:])
    stack.close()


def test_write_after_hits_counts_uses_in_the_tier_above() -> None:
    bench, keys = Bench(rows=8, tiers=2, edges="write_after_hits:2 write_after_hits:1"), []
    keys = hashes("a", 3)
    stack = bench.open()
    bench.store(keys)
    stack.touch(keys)
    assert stack.drain(PATIENCE_S)
    assert bench.below(0) == set()
    stack.touch(keys[:2])
    assert stack.drain(PATIENCE_S)
    assert bench.below(0) == set(keys[:2])
    stack.reset()
    assert bench.settled(keys).hits == 2  # a use in tier0
    assert stack.drain(PATIENCE_S)
    assert bench.below(1) == set(keys[:2])
    stack.close()


def test_stores_are_shed_not_queued_when_a_tier_does_not_keep_up() -> None:
    bench = Bench(rows=16, tiers=1, store_share=0.5)
    stack = bench.open()
    bench.media[0].stall()
    bench.store(hashes("a", 6))
    bench.store(hashes("b", 6))
    assert stack.tier_counters["tier0"].shed == 4
    # The rows of the others can be had.
    assert len(bench.store(hashes("c", 8))) == 8
    bench.media[0].resume()
    assert stack.drain(PATIENCE_S)
    assert len(bench.below(0)) == 8
    stack.close()


def test_a_tier_is_given_no_more_than_it_writes_in_the_backlog_time() -> None:
    bench = Bench(rows=64, tiers=1, backlog_s=0.0)
    stack = bench.open()
    bench.store(hashes("a", 8))
    assert stack.drain(PATIENCE_S)
    assert len(bench.below(0)) == 8  # nothing was measured before
    bench.store(hashes("b", 8))
    assert stack.drain(PATIENCE_S)
    assert len(bench.below(0)) == 9  # never nothing: else it would not be measured again
    assert stack.tier_counters["tier0"].shed == 7
    stack.close()


@pytest.mark.parametrize("load_from", ["fastest", "recompute_if_slower"])
def test_a_tier_slower_than_computing_is_passed_over_only_where_that_is_asked_for(
    load_from: str,
) -> None:
    bench = Bench(tiers=1, load_from=load_from, tokens_per_entry=16)
    for name in "abc":
        bench.put_below(0, hashes(name, 2))
    bench.tiers[0] = SlowTier(bench.tiers[0], bench.context, latency_s=0.02)
    stack = bench.open()
    stack.engine.add(tokens=10_000_000, seconds=1.0)
    found = [bench.settled(hashes(name, 2)).hits for name in "abc"]
    # The first load measures it.
    assert found == ([2, 2, 2] if load_from == "fastest" else [2, 0, 0])
    assert stack.tier_counters["tier0"].passed_over == (0 if load_from == "fastest" else 4)
    stack.close()


def test_a_reset_forgets_the_region_and_what_was_on_its_way_to_it() -> None:
    bench, keys = Bench(tiers=1, edges="none"), hashes("a", 4)
    bench.put_below(0, hashes("b", 2))
    stack = bench.open()
    bench.store(keys[:2])
    storing = stack.prepare_store(keys, first=0)
    stack.prepare_load(keys[:1])
    stack.lookup(hashes("b", 2))
    stack.reset()
    stack.complete_store(storing.keys)
    stack.complete_load(keys[:1])
    assert bench.settled(keys).answers == [MISS] * 4
    assert stack.drain(PATIENCE_S)
    assert (stack.index.rows_free, stack.index.pinned) == (16, 0)
    stack.close()


def test_an_entry_has_a_row_in_each_group_and_all_of_them_go_together() -> None:
    bench, keys = Bench(rows=9, groups=2, tiers=1, store_share=1.0), hashes("a", 4)
    stack = bench.open()
    assert len(bench.store(keys)) == 4
    assert stack.index.rows_free == 1
    assert stack.drain(PATIENCE_S)
    bench.store(hashes("b", 2))
    assert stack.index.rows_free == 1
    assert bench.settled(keys).hits == 4
    assert bench.load(keys) == {keys[2]: "tier0", keys[3]: "tier0"}
    stack.close()


def test_groups_whose_chunks_are_longer_have_rows_for_some_entries_only() -> None:
    """Group 1 has a chunk for every second entry; capacity is not divided among groups."""
    bench, keys = Bench(rows=6, groups=2, tiers=0), hashes("a", 4)
    stack = bench.open()
    one = stack.prepare_store(keys, groups=(0,))
    two = stack.prepare_store(keys[1::2], groups=(1,))
    assert (len(one.keys), len(two.keys), stack.index.rows_free) == (4, 2, 0)
    stack.complete_store(one.keys, groups=(0,))
    stack.complete_store(two.keys, groups=(1,))
    assert stack.lookup(keys, groups=(0,)).hits == 4
    assert stack.lookup(keys[1::2], groups=(1,)).hits == 2
    assert stack.lookup(keys).answers == [MISS, HIT, MISS, HIT]
    # An entry that goes gives back the rows of both.
    assert stack.prepare_store(hashes("b", 2), groups=(0,)).evicted == [keys[3]]
    assert stack.index.rows_free == 0


def test_only_what_admission_lets_in_is_stored() -> None:
    keys = hashes("a", 3)
    admission = open_admission("second_hit", 16)
    stack = TierStack(16, PolicyRegistry().open("lru", 16), admission=admission)
    stack.touch([], keys)
    assert not stack.prepare_store(keys).keys
    stack.touch([], keys[:2])
    assert stack.prepare_store(keys).keys == keys[:2]
    assert stack.counters.refused == 4


def test_rows_are_named_before_they_are_written_and_whole_only_after() -> None:
    bench, keys = Bench(tiers=0), hashes("a", 2)
    views = [bench.rows.row_view(row) for row in range(16)]
    headers = RowHeaders(bench.rows._rows, FINGERPRINT, [[4096]])
    stack = TierStack(16, PolicyRegistry().open("lru", 16), headers=headers)
    storing = stack.prepare_store(keys)
    [rows] = storing.rows
    for key, row in zip(keys, rows, strict=True):
        assert holds(views[row], BlockKey(key, 0))
        assert read_header(views[row]).state == WRITING
    stack.complete_store(keys)
    assert all(read_header(views[row]).state == COMPLETE for row in rows)


def test_a_header_says_nothing_of_what_stood_in_its_row_before() -> None:
    """Be it of an earlier owner of the memory, or of a tier that loaded into it."""
    bench, old, new = Bench(rows=8, tiers=1), hashes("old", 4), hashes("new", 8)
    bench.put_below(0, old)
    every = bench.rows._rows
    every[:] = 0xEE
    headers = RowHeaders(every, FINGERPRINT, [[4096]])
    stack = bench.open(headers=headers)
    for loads in (False, True, True):
        if loads:
            assert bench.settled(old).hits == 4
            [rows] = stack.prepare_load(old).rows
            stack.complete_load(old)
            every[rows, 1000:1008] = 0xEE  # a block of a tier that was wrong, say
            stack.reset()
        storing = stack.prepare_store(new)
        assert len(storing.keys) == 8
        for key, row in zip(storing.keys, storing.rows[0], strict=True):
            found = every[row][:HEADER_BYTES]
            plain = np.full(HEADER_BYTES, 0xEE, np.uint8)
            write_header(
                plain,
                BlockKey(key, 0),
                fingerprint=FINGERPRINT,
                slot_lengths=[4096],
                created_ns=read_header(found).created_ns,
                state=WRITING,
            )
            assert (found == plain).all()
        stack.complete_store(storing.keys, failed=storing.keys)
        assert stack.drain(PATIENCE_S)
    stack.close()


def test_closing_ends_everything_while_stores_are_under_way() -> None:
    bench = Bench(tiers=2)
    stack = bench.open()
    bench.store(hashes("a", 8))
    stack.close()
    assert stack.index.pinned == 0
    assert not stack.busy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"load_from": "nearest"}, "load_from is 'nearest'"),
        ({"promotion_share": 0.0}, "promotion_share is 0.0"),
        ({"hold_s": -1.0}, "hold_s is -1.0"),
        ({"batch_blocks": 0}, "batch_blocks is 0"),
        ({"edges": (Edge(), Edge.parse("write_on_evict"))}, "does not tell what it is about to"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StackSettings(**settings)


@pytest.mark.parametrize("text", ["", "always", "write_after_hits", "write_after_hits:0"])
def test_an_unknown_edge_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        Edge.parse(text)


def test_load_cost_tells_latency_from_bandwidth() -> None:
    cost = LoadCost()
    assert cost.seconds(1) is None
    for nbytes in (1 << 20, 4 << 20, 2 << 20, 8 << 20):
        cost.add(nbytes, 0.01 + nbytes / 100e6)
    assert cost.seconds(16 << 20) == pytest.approx(0.01 + (16 << 20) / 100e6)


def test_a_tier_whose_jobs_all_fail_is_left_alone_and_tried_again_ever_more_rarely() -> None:
    breaker = Breaker(failures=2, retry_s=1.0, most_s=4.0)
    breaker.ended(0.0, worked=False)
    assert breaker.allows(0.0)
    breaker.ended(0.0, worked=False)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)  # one try
    assert not breaker.allows(1.0)
    breaker.ended(1.0, worked=False)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    breaker.ended(3.0, worked=True)
    assert breaker.state == "closed"
