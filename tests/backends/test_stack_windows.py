"""Groups that keep a sliding window: what a hit needs, what is stored, what goes first."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from backends.block import BlockKey
from backends.policy.registry import PolicyRegistry
from backends.stack.primary import NO_ROW
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
from backends.tier.base import Tier

FULL, WINDOW = 0, 1
REACH = (None, 2)
PATIENCE_S = 20.0
UNHURRIED = {"lookup_timeout_s": 20.0, "load_timeout_s": 20.0, "store_timeout_s": 20.0}


def hashes(label: str, count: int) -> list[bytes]:
    return [key.hash for key in make_keys(label, count)]


class Windowed:
    """A stack whose second group keeps a window of two entries, and an engine that has all bytes
    that it asks to store."""

    def __init__(
        self,
        rows: int = 32,
        media: Sequence[MemoryMedium] = (),
        reach: Sequence[int | None] = REACH,
        edge: str = "write_through",
        **settings: float,
    ) -> None:
        self.rows = RowBuffer(rows, 2 * 4096)
        self.context = make_context(self.rows)
        self.tiers: list[Tier] = []
        for number, medium in enumerate(media):
            tier = MemoryTier(self.context, MemorySettings(), medium)
            tier.name = f"tier{number}"
            self.tiers.append(tier)
        self.reach, self.edge = reach, edge
        self.settings = {**UNHURRIED, **settings}

    def open(self) -> TierStack:
        self.stack = TierStack(
            self.rows.rows,
            PolicyRegistry().open("lru", self.rows.rows),
            self.tiers,
            StackSettings(edges=(Edge.parse(self.edge),), **self.settings),  # type: ignore[arg-type]
            groups=len(self.reach),
            reach=self.reach,
            entry_bytes=self.rows.row_bytes,
        )
        return self.stack

    def store(self, keys: Sequence[bytes], hit: int = 0, parted: int = 0) -> None:
        """As an engine does at the end of a request that hit so much, and has all of its bytes."""
        self.stack.touch(keys[:hit], keys)
        storing = self.stack.prepare_store(keys, keep=keys, parted=parted)
        for group, rows in enumerate(storing.rows):
            for key, row in zip(storing.keys, rows, strict=True):
                if row != NO_ROW:
                    self.rows.fill(row, BlockKey(key, group))
        self.stack.complete_store(storing.keys)

    def settled(self, keys: Sequence[bytes]) -> Found:
        until_s = time.monotonic() + PATIENCE_S
        while (found := self.stack.lookup(keys, keep=keys)).waits:
            assert time.monotonic() < until_s, f"{found} never ends"
            assert found.deadline_s is not None
            time.sleep(0.0005)
            self.stack.step()
        return found

    def load(self, keys: Sequence[bytes]) -> list[list[int]]:
        """The rows of a hit, whose bytes are right."""
        rows = self.stack.prepare_load(keys).rows
        for group, of_group in enumerate(rows):
            for key, row in zip(keys, of_group, strict=True):
                if row != NO_ROW:
                    assert self.rows.wrong(row, BlockKey(key, group)) is None
        self.stack.complete_load(keys)
        return rows

    def has(self, keys: Sequence[bytes], group: int) -> list[int]:
        """Which of these entries have a row in this group."""
        return [at for at, ok in enumerate(self.stack.index.ready(keys, (group,))) if ok]

    def let_go(self) -> None:
        assert self.stack.drain(PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while self.stack.index.pinned and time.monotonic() < until_s:
            time.sleep(0.002)
            self.stack.step()
        index = self.stack.index
        assert (index.pinned, index.rows_leaving, self.stack.rows_late) == (0, 0, 0)
        assert index.rows_free + index.rows_used == index.rows_total


def test_a_request_stores_no_more_of_a_window_than_a_later_hit_can_need() -> None:
    bench, keys = Windowed(), hashes("a", 8)
    stack = bench.open()
    bench.store(keys)
    assert bench.has(keys, FULL) == list(range(8))
    # Two for a hit of all of it, and one more for the same prompt, whose last token is computed.
    assert bench.has(keys, WINDOW) == [5, 6, 7]
    assert stack.index.rows_used == 11
    assert stack.lookup(keys).hits == 8
    assert stack.lookup(keys[:7]).hits == 7


def test_a_hit_needs_its_last_entries_alone_and_loads_no_others() -> None:
    bench, keys = Windowed(), hashes("a", 8)
    bench.open()
    bench.store(keys)
    rows = bench.load(keys)
    assert NO_ROW not in rows[FULL]
    assert [row != NO_ROW for row in rows[WINDOW]] == [False] * 6 + [True] * 2


def test_where_no_window_is_there_is_no_hit_and_it_is_told_how_far_the_others_go() -> None:
    bench, keys = Windowed(), hashes("a", 8)
    stack = bench.open()
    bench.store(keys)
    other = keys[:4] + hashes("b", 4)
    found = stack.lookup(other)
    assert (found.hits, found.whole) == (0, 4)
    bench.store(other, parted=found.whole)
    assert bench.has(keys, WINDOW) == [2, 3, 5, 6, 7]
    assert stack.lookup(keys[:4] + hashes("c", 4)).hits == 4


def test_what_a_window_has_left_goes_before_any_entry_does() -> None:
    bench, keys = Windowed(rows=16), hashes("a", 8)
    stack = bench.open()
    bench.store(keys[:4])
    bench.store(keys, hit=4)
    assert bench.has(keys, WINDOW) == [1, 2, 3, 5, 6, 7]
    assert stack.index.rows_free == 2
    bench.store(hashes("b", 2))  # takes four rows
    assert stack.counters.rows_left == 2
    assert stack.counters.evictions == 0
    assert bench.has(keys, FULL) == list(range(8))
    assert stack.lookup(keys).hits == 8


def test_a_window_that_others_begin_with_too_stays_when_it_is_left() -> None:
    bench, prompt = Windowed(rows=64), hashes("system", 4)
    stack = bench.open()
    for name in ("a", "b", "c", "d"):
        keys = prompt + hashes(name, 2)
        found = stack.lookup(keys)
        bench.store(keys, hit=found.hits, parted=found.whole if found.whole > found.hits else 0)
    bench.store(prompt + hashes("a", 8), hit=6)
    assert stack.index.release is not None
    assert stack.index.release(64, ()) == 2  # the end of "a" as it was
    assert bench.has(prompt, WINDOW) == [2, 3]
    assert stack.lookup(prompt + hashes("e", 2)).hits == 4


def test_a_group_with_a_window_of_one_token_needs_nothing() -> None:
    bench, keys = Windowed(reach=(None, 0)), hashes("a", 4)
    stack = bench.open()
    bench.store(keys)
    assert stack.index.rows_used == 4
    assert stack.lookup(keys[:2]).hits == 2


def test_groups_of_windows_alone_hit_without_what_is_before_them() -> None:
    bench, keys = Windowed(reach=(2,)), hashes("a", 8)
    stack = bench.open()
    bench.store(keys)
    assert stack.index.rows_used == 3
    assert stack.lookup(keys).hits == 8
    assert bench.load(keys)[0][:6] == [NO_ROW] * 6


def test_only_what_a_hit_needs_comes_back_from_a_tier() -> None:
    medium, keys = MemoryMedium(), hashes("a", 8)
    first = Windowed(media=[medium])
    first.open()
    first.store(keys)
    first.let_go()
    second = Windowed(media=[medium])
    stack = second.open()
    assert second.settled(keys).hits == 8
    assert second.has(keys, FULL) == list(range(8))
    assert second.has(keys, WINDOW) == [6, 7]
    assert stack.tier_counters["tier0"].loaded_bytes == 10 * second.rows.row_bytes
    second.load(keys)
    second.let_go()


def test_a_tier_that_has_a_shorter_hit_gives_that_one() -> None:
    medium, keys = MemoryMedium(), hashes("a", 8)
    first = Windowed(media=[medium])
    first.open()
    first.store(keys[:5])
    first.store(keys, hit=5)
    first.let_go()
    for at in (5, 6, 7):
        assert medium.blocks.pop((FINGERPRINT, BlockKey(keys[at], WINDOW)))
    second = Windowed(media=[medium])
    second.open()
    found = second.settled(keys)
    assert (found.hits, found.whole) == (5, 8)
    second.load(keys[:5])
    second.let_go()


def test_a_window_that_is_stored_later_goes_below_as_well() -> None:
    medium, keys = MemoryMedium(), hashes("a", 8)
    bench = Windowed(media=[medium])
    bench.open()
    bench.store(keys)
    bench.let_go()
    bench.store(keys[:4] + hashes("b", 4), parted=4)
    bench.let_go()
    other = Windowed(media=[medium])
    other.open()
    assert other.settled(keys[:4] + hashes("c", 4)).hits == 4


@pytest.mark.parametrize("kind", ["slow", "faulty"])
@pytest.mark.parametrize("edge", ["write_through", "write_on_evict", "write_after_hits:1"])
@pytest.mark.parametrize("reach", [(None, 2), (2, None, 3, None)])
def test_no_tier_makes_a_wrong_hit_and_nothing_stays_held(
    kind: str, edge: str, reach: tuple[int | None, ...]
) -> None:
    rng = random.Random(f"{kind} {edge} {reach}")
    hasty = {"lookup_timeout_s": 0.005, "load_timeout_s": 0.01, "hold_s": 0.01, "refuse_s": 0.01}
    bench = Windowed(24, [MemoryMedium(), MemoryMedium()], reach, edge, **hasty)
    inner = bench.tiers[0]
    if kind == "slow":
        bench.tiers[0] = SlowTier(
            inner, bench.context, latency_s=0.004, jitter=0.9, lookup_latency_s=0.002, seed=1
        )
    else:
        kinds = (FaultKind.ERROR, FaultKind.SHORT_READ, FaultKind.FLIPPED_BIT, FaultKind.LOST_WRITE)
        faults = [Fault(fault, rate=0.2) for fault in kinds]
        bench.tiers[0] = FaultyTier(inner, bench.context, faults, seed=1)
    stack = bench.open()
    trunk = hashes("trunk", 4)
    sequences = [trunk + hashes(name, 5) for name in ("a", "b")] + [hashes("alone", 8)]
    hits = 0
    for _ in range(60):
        keys = rng.choice(sequences)[: rng.randrange(1, 10)]
        found = bench.settled(keys)
        # What ends in a failed load is a miss for all ranks.
        rows = bench.load(keys[: found.hits])
        hits += found.hits
        if found.hits and rng.random() < 0.1:
            stack.prepare_load(keys[: found.hits])
            stack.complete_load(keys[: found.hits], keys[found.hits - 1 : found.hits])
            continue
        assert len(rows) == len(reach)
        bench.store(keys, found.hits, found.whole if found.whole > found.hits else 0)
        if rng.random() < 0.3:
            time.sleep(0.002)
        stack.step()
    assert hits > 0
    if isinstance(bench.tiers[0], FaultyTier):
        bench.tiers[0].release()
    bench.let_go()
    stack.close()
