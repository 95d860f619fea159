"""Several processes on one storage, some of which are killed in the middle of what they do."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

from backends.block import BlockKey
from backends.testing.harness import TierHarness
from backends.testing.peer import Peer, PeerSetup
from backends.testing.rows import FINGERPRINT, make_keys
from backends.testing.suite.base import OpenBench, SuiteBase, needs
from backends.tier.base import Lookup, Outcome

DONE, MISSING, SHED = Outcome.DONE, Outcome.MISSING, Outcome.SHED


class ProcessTests(SuiteBase):
    kills: ClassVar[int] = 5
    """How many writers are killed, at random moments."""
    killed_row_bytes: ClassVar[int] = 128 * 4096
    """Size of the blocks they write: writing should be what takes their time."""

    def peer(
        self,
        harness: TierHarness,
        capacity_bytes: int | None = None,
        row_bytes: int | None = None,
    ) -> Peer:
        return Peer(
            PeerSetup(
                harness.opener(capacity_bytes),
                rows=self.rows,
                row_bytes=row_bytes or self.row_bytes,
                fingerprint=FINGERPRINT,
                patience_s=self.patience_s,
            )
        )

    @needs("persistent")
    def test_a_killed_writer_leaves_whole_blocks_or_none(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        chance = random.Random(11)
        keys = {n: make_keys(f"killed {n}", min(self.rows, 18)) for n in range(self.kills)}
        told: list[BlockKey] = []
        # All at once: starting an interpreter takes far longer than the rest.
        peers = [self.peer(harness, None, self.killed_row_bytes) for _ in range(self.kills)]
        try:
            for number, peer in enumerate(peers):
                told += peer.ready().store_and_die(keys[number], chance.uniform(0.02, 0.45))
        finally:
            for peer in peers:
                peer.kill()
        bench = open_bench(row_bytes=self.killed_row_bytes)
        for some in _in_batches(told, 8):
            assert bench.lookup(some) == [Lookup.HIT] * len(some)
        every = [key for some in keys.values() for key in some]
        whole = set()
        for some in _in_batches(every, 8):
            outcomes = bench.load(some)
            assert set(outcomes) <= {DONE, MISSING}, "half a block was to be seen"
            whole |= {key for key, outcome in zip(some, outcomes, strict=True) if outcome is DONE}
        assert set(told) <= whole
        for some in _in_batches(every, 8):
            assert bench.store(some) == [DONE] * len(some)
        assert bench.tier.counters()["corrupt"] == 0
        bench.until(
            lambda: len(harness.raw_list()) == len(every),
            f"{len(harness.raw_list())} things are stored for {len(every)} blocks: what the dead "
            "left unfinished is not swept",
        )

    @needs("shared")
    def test_what_one_process_stores_another_finds(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        ours, theirs = make_keys("ours", 6), make_keys("theirs", 6)
        bench = open_bench()
        with self.peer(harness) as peer:
            peer.ready()
            assert bench.lookup(theirs) == [Lookup.MISS] * 6
            assert peer.lookup(ours) == [Lookup.MISS] * 6
            assert bench.store(ours) == [DONE] * 6
            assert peer.store(theirs) == [DONE] * 6
            bench.until(
                lambda: bench.lookup(theirs) == [Lookup.HIT] * 6, "another's blocks stay unseen"
            )
            bench.until(
                lambda: peer.lookup(ours) == [Lookup.HIT] * 6, "another never sees our blocks"
            )
            assert bench.load(theirs) == [DONE] * 6
            assert peer.load(ours) == [DONE] * 6
            peer.close()
        assert bench.load(theirs) == [DONE] * 6

    @needs("shared")
    def test_two_processes_may_store_the_same_keys_at_once(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        bench = open_bench()
        with self.peer(harness) as peer:
            peer.ready()
            for number in range(8):
                keys = make_keys(f"both {number}", 8)
                peer.begin("store", keys)
                stored = bench.submit_store(keys)
                loaded = bench.submit_load(keys)
                assert bench.outcomes(stored) == [DONE] * 8
                assert set(bench.outcomes(loaded)) <= {DONE, MISSING}
                assert peer.end() == [DONE] * 8
                assert bench.load(keys) == [DONE] * 8
                assert peer.load(keys) == [DONE] * 8
            assert bench.tier.counters()["corrupt"] == peer.counters()["corrupt"] == 0
            peer.close()
        if harness.capabilities.persistent:
            assert len(harness.raw_list()) == 8 * 8

    @needs("shared")
    def test_a_writer_that_died_holds_nobody_up(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        keys = make_keys("dying", 16)
        bench = open_bench()
        with self.peer(harness) as peer:
            peer.ready()
            bench.tier.lookup(keys)
            peer.store_and_die(keys, 0.3)
        assert Lookup.PENDING not in bench.lookup(keys)
        assert bench.store(keys) == [DONE] * 16
        assert bench.load(keys) == [DONE] * 16

    @needs("shared", "quota", "persistent")
    def test_two_processes_keep_one_capacity_together(
        self, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        capacity_bytes = 10 * self.row_bytes
        bench = open_bench(capacity_bytes=capacity_bytes)
        most, ended = [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.001):
                most[0] = max(most[0], sum(harness.raw_list().values()))

        watcher = threading.Thread(target=watch)
        with self.peer(harness, capacity_bytes) as peer:
            peer.ready()
            watcher.start()
            try:
                for number in range(10):
                    peer.begin("store", make_keys(f"their share {number}", 4))
                    assert set(bench.store(make_keys(f"our share {number}", 4))) <= {DONE, SHED}
                    assert set(peer.end()) <= {DONE, SHED}
            finally:
                ended.set()
                watcher.join()
            peer.close()
        assert most[0] <= capacity_bytes, f"{most[0]} bytes stored, {capacity_bytes} allowed"
        keys = [key for number in range(10) for key in make_keys(f"our share {number}", 4)]
        there = [key for key in keys if bench.is_hit(key)]
        for begin in range(0, len(there), 8):
            # What another process drove out may have looked there a moment ago.
            assert set(bench.load(there[begin : begin + 8])) <= {DONE, MISSING}


def _in_batches(keys: Sequence[BlockKey], size: int) -> Iterator[Sequence[BlockKey]]:
    return (keys[begin : begin + size] for begin in range(0, len(keys), size))
