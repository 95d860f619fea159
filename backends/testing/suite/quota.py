"""A capacity is kept at every moment, and what is in the way of new blocks goes in good order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from backends.block import BlockKey
from backends.errors import KvquayError
from backends.testing.bench import TierBench
from backends.testing.harness import TierHarness
from backends.testing.rows import make_keys
from backends.testing.suite.base import OpenBench, SuiteBase, needs
from backends.tier.base import NONE_EVICTED, Lookup, Outcome

DONE, SHED = Outcome.DONE, Outcome.SHED


class QuotaTests(SuiteBase):
    capacity_blocks: ClassVar[int] = 8

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_blocks * self.row_bytes

    @needs("quota")
    def test_the_capacity_is_kept_at_every_moment(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        bench = open_bench(capacity_bytes=self.capacity_bytes)
        keys = make_keys("too many", 5 * self.capacity_blocks)
        outcomes: list[Outcome] = []
        with self._watched(harness):
            for begin in range(0, len(keys), 4):
                outcomes += bench.store(keys[begin : begin + 4])
                usage = bench.tier.usage()
                assert usage.bytes <= self.capacity_bytes
                assert usage.capacity_bytes is not None
                assert usage.capacity_bytes <= self.capacity_bytes
        assert set(outcomes) <= {DONE, SHED}
        left = [key for key in keys if bench.is_hit(key)]
        assert 0 < len(left) <= self.capacity_blocks
        _loads_or_has_evicted(bench, left)
        counters = bench.tier.counters()
        assert counters["shed"] == outcomes.count(SHED)
        assert outcomes.count(DONE) - counters["evicted"] <= len(left)

    @needs("quota")
    def test_what_was_not_stored_is_a_miss(self, open_bench: OpenBench) -> None:
        bench = open_bench(capacity_bytes=self.capacity_bytes)
        keys = make_keys("refused", 3 * self.capacity_blocks)
        outcomes = bench.store(keys)
        hits = [answer is Lookup.HIT for answer in bench.lookup(keys)]
        refused = [hit for hit, outcome in zip(hits, outcomes, strict=True) if outcome is SHED]
        assert set(outcomes) <= {DONE, SHED}
        assert not any(refused)
        assert 0 < sum(hits) <= self.capacity_blocks

    @needs("quota")
    def test_without_room_for_one_block_nothing_is_stored(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        try:
            bench = open_bench(capacity_bytes=self.row_bytes - 1)
        except KvquayError:
            return  # Refusing to open is as good.
        keys = make_keys("no room", 4)
        with self._watched(harness, 0):
            assert bench.store(keys) == [SHED] * 4
        assert bench.lookup(keys) == [Lookup.MISS] * 4

    @needs("quota")
    def test_a_full_tier_goes_on_loading(self, open_bench: OpenBench) -> None:
        bench = open_bench(capacity_bytes=self.capacity_bytes)
        for round_number in range(4):
            keys = make_keys(f"round {round_number}", 4)
            bench.store(keys)
            there = [key for key in keys if bench.is_hit(key)]
            _loads_or_has_evicted(bench, there)

    @needs("quota")
    def test_a_prefix_outlives_its_extension(self, open_bench: OpenBench) -> None:
        bench = open_bench(capacity_bytes=self.capacity_bytes)
        chain = make_keys("chain", self.capacity_blocks - 2)
        assert bench.store(chain) == [DONE] * len(chain)
        for newer in make_keys("newer", self.capacity_blocks):
            bench.store([newer])
            hits = [answer is Lookup.HIT for answer in bench.lookup(chain)]
            gone_from = hits.index(False) if False in hits else len(hits)
            assert not any(hits[gone_from:]), f"of a chain, first to last, {hits} are left"

    @needs("quota")
    def test_what_is_driven_out_is_told_once_and_is_gone(self, open_bench: OpenBench) -> None:
        """By a tier that tells of it at all."""
        bench = open_bench(capacity_bytes=self.capacity_bytes)
        keys = make_keys("told", 4 * self.capacity_blocks)
        told: list[BlockKey] = []
        stored: list[BlockKey] = []
        for key in keys:
            if bench.store([key]) == [DONE]:
                stored.append(key)
            evicted = bench.tier.evicted()
            told += evicted.keys
            assert not evicted.more
            assert set(told) <= set(stored)

        def all_told() -> bool:
            told.extend(bench.tier.evicted().keys)
            return not told or len(told) == bench.tier.counters()["evicted"]

        bench.until(all_told, "not everything that was evicted was told")
        assert len(set(told)) == len(told)
        assert not any(bench.is_hit(key) for key in told)
        assert bench.tier.evicted() == NONE_EVICTED

    @needs("quota", "persistent")
    def test_what_was_there_before_counts(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        first = open_bench()
        old = make_keys("before", 2 * self.capacity_blocks)
        first.store(old)
        first.close()
        again = open_bench(capacity_bytes=self.capacity_bytes)
        again.until(
            lambda: self._raw_bytes(harness) <= self.capacity_bytes,
            f"{self._raw_bytes(harness)} bytes were found and {self.capacity_bytes} are allowed",
        )
        new = make_keys("after", self.capacity_blocks)
        with self._watched(harness):
            again.store(new)
        there = [key for key in (*old, *new) if again.is_hit(key)]
        assert 0 < len(there) <= self.capacity_blocks
        _loads_or_has_evicted(again, there)

    @contextmanager
    def _watched(self, harness: TierHarness, limit_bytes: int | None = None) -> Iterator[None]:
        """Look at the storage from behind, again and again."""
        if not harness.capabilities.persistent:
            yield
            return
        limit = self.capacity_bytes if limit_bytes is None else limit_bytes
        ended, most = threading.Event(), [0]

        def watch() -> None:
            while not ended.wait(0.001):
                most[0] = max(most[0], self._raw_bytes(harness))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        assert most[0] <= limit, f"{most[0]} bytes were stored, {limit} are allowed"

    def _raw_bytes(self, harness: TierHarness) -> int:
        return sum(harness.raw_list().values())


def _loads_or_has_evicted(bench: TierBench, keys: Sequence[BlockKey]) -> None:
    """Of keys that were hits: a tier may evict at any time, but must not lose what it has."""
    loaded = bench.load(keys)
    assert DONE in loaded or not keys
    gone = [key for key, outcome in zip(keys, loaded, strict=True) if outcome is not DONE]
    assert not any(bench.is_hit(key) for key in gone)
