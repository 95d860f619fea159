"""Hypothesis drives a stack in any order it can think of, over tiers that are slow and that fail.

The model knows little: which keys were ever committed, and what every key's bytes are. Whatever the
stack calls a HIT must hold exactly those bytes, from when it is prepared until it is completed.
What rules there are may not depend on what was hit: tiers have threads, and timing differs.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.policy.registry import PolicyRegistry
from backends.stack.results import Storing
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
from backends.testing.rows import RowBuffer, make_context, make_keys
from backends.tier.base import Lookup, Tier, TierContext

ROWS = 8
PATIENCE_S = 20.0
TRUNK = [key.hash for key in make_keys("trunk", 4)]
SEQUENCES = [TRUNK + [key.hash for key in make_keys(name, 4)] for name in ("left", "right")]
SEQUENCES.append([key.hash for key in make_keys("alone", 6)])
BLOCK = {key.hash: key for key in make_keys("trunk", 4) + make_keys("alone", 6)}
BLOCK |= {key.hash: key for name in ("left", "right") for key in make_keys(name, 4)}
# Those of WRONG_BYTES break a tier's contract.
FAULTS = [
    Fault(kind, rate=0.3)
    for kind in (
        FaultKind.ERROR,
        FaultKind.SHORT_READ,
        FaultKind.FLIPPED_BIT,
        FaultKind.LOST_WRITE,
        FaultKind.HANG,
    )
]
HASTY = {
    "lookup_timeout_s": 0.01,
    "load_timeout_s": 0.03,
    "engine_timeout_s": 0.05,
    "hold_s": 0.05,
    "refuse_s": 0.01,
    "breaker_failures": 3,
    "breaker_retry_s": 0.01,
    "breaker_retry_most_s": 0.05,
}
KINDS = ["healthy", "healthy", "slow", "faulty"]
EDGES = ["write_through", "write_on_evict", "write_on_evict", "write_after_hits:1", "none"]
SEQUENCE = st.sampled_from(range(len(SEQUENCES)))
LENGTH = st.integers(1, 8)


class StackMachine(RuleBasedStateMachine):
    """One leader, up to two tiers."""

    @initialize(
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
        edge=st.sampled_from(EDGES),
        resets=st.booleans(),
        second=st.sampled_from(["write_through", "write_after_hits:2", "none"]),
        eviction=st.sampled_from(PolicyRegistry().names()),
        seed=st.integers(0, 99),
    )
    def open(
        self, kinds: list[str], edge: str, resets: bool, second: str, eviction: str, seed: int
    ) -> None:
        self.resets = resets
        self.rows = RowBuffer(ROWS, 2 * 4096)
        context = make_context(self.rows)
        self.tiers = [self._tier(kind, context, seed + n) for n, kind in enumerate(kinds)]
        # Where all is well, and everything goes through, nothing that was committed may be lost.
        self.lossless = bool(kinds) and kinds[0] == "healthy"
        self.lossless &= edge in ("write_through", "write_on_evict")
        self.stack = TierStack(
            ROWS,
            PolicyRegistry().open(eviction, ROWS),
            self.tiers,
            StackSettings(
                edges=(Edge.parse(edge), Edge.parse(second)),
                store_timeout_s=PATIENCE_S if self.lossless else 0.1,
                **HASTY,  # type: ignore[arg-type]
            ),
        )
        self.committed: set[bytes] = set()
        # Found to be bad in the region by some rank, and perhaps nowhere else yet.
        self.damaged: set[bytes] = set()
        self.storing: list[Storing] = []
        self.loading: list[tuple[Sequence[bytes], list[int]]] = []

    def _tier(self, kind: str, context: TierContext, seed: int) -> Tier:
        memory = MemoryTier(context, MemorySettings(), MemoryMedium())
        memory.name = f"{kind}{seed}"
        if kind == "slow":
            return SlowTier(
                memory, context, latency_s=0.02, jitter=0.9, lookup_latency_s=0.008, seed=seed
            )
        return FaultyTier(memory, context, FAULTS, seed=seed) if kind == "faulty" else memory

    @rule(sequence=SEQUENCE)
    def store(self, sequence: int) -> None:
        """All of a sequence at once, as far as there is room."""
        keys = SEQUENCES[sequence]
        self.begin_store(sequence, 0, len(keys))
        if self.storing and self.storing[-1].keys[0] in keys:
            self.end_store(-1, 0, False)

    @rule(sequence=SEQUENCE)
    def fetch(self, sequence: int) -> None:
        """Whatever can be had of a sequence, and what is had stays as it is meanwhile."""
        self.begin_load(sequence, len(SEQUENCES[sequence]), True)

    @rule(sequence=SEQUENCE, start=st.integers(0, 3), length=LENGTH)
    def begin_store(self, sequence: int, start: int, length: int) -> None:
        keys = SEQUENCES[sequence]
        run = keys[start : start + length]
        parent = keys[start - 1] if start else None
        storing = self.stack.prepare_store(run, first=start, parent=parent, keep=keys)
        assert not set(storing.evicted) & set(keys)
        for row in storing.rows[0]:
            self.rows.scribble(row)
        if storing.keys:
            self.storing.append(storing)

    @rule(pick=st.integers(0, 9), part=st.integers(0, 8), failed=st.booleans())
    def end_store(self, pick: int, part: int, failed: bool) -> None:
        """Some of a store's blocks are written, the last of them perhaps not by every rank."""
        if not self.storing:
            return
        storing = self.storing.pop(pick % len(self.storing))
        keys, rows = list(storing.keys), storing.rows[0]
        now, later = keys[: part or len(keys)], keys[part or len(keys) :]
        if later:
            rest = Storing(later, [rows[len(now) :]], [], 0)
            self.storing.append(rest)
        lost = now[-1:] if failed else []
        for key, row in zip(now, rows, strict=False):
            if key not in lost:
                self.rows.fill(row, BLOCK[key])
        self.stack.complete_store(now, lost)
        whole = {key for key in now if key not in lost}
        self.committed |= whole
        self.damaged -= whole

    @rule(sequence=SEQUENCE, length=LENGTH)
    def lookup(self, sequence: int, length: int) -> None:
        found = self.stack.lookup(SEQUENCES[sequence][:length])
        assert len(found.answers) == len(SEQUENCES[sequence][:length])
        assert (found.deadline_s is None) == (Lookup.PENDING not in found.answers)

    @rule(sequence=SEQUENCE, length=LENGTH)
    def touch(self, sequence: int, length: int) -> None:
        self.stack.touch(SEQUENCES[sequence][:length])

    @rule(sequence=SEQUENCE, length=LENGTH, wait=st.booleans())
    def begin_load(self, sequence: int, length: int, wait: bool) -> None:
        keys = SEQUENCES[sequence][:length]
        hits = self._settled(keys) if wait else self.stack.lookup(keys).hits
        if hits:
            rows = self.stack.prepare_load(keys[:hits]).rows[0]
            self.loading.append((keys[:hits], rows))
            self._check(keys[:hits], rows)

    @rule(pick=st.integers(0, 9), failed=st.booleans())
    def end_load(self, pick: int, failed: bool) -> None:
        if not self.loading:
            return
        keys, rows = self.loading.pop(pick % len(self.loading))
        self._check(keys, rows)
        bad = keys[-1:] if failed else ()
        self.damaged.update(bad)
        self.stack.complete_load(keys, bad)

    @rule()
    def step(self) -> None:
        self.stack.step()

    @rule(seconds=st.sampled_from([0.002, 0.02, 0.06]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self.stack.step()

    @precondition(lambda self: self.resets)
    @rule()
    def reset(self) -> None:
        """The engine's answer to new weights: nothing that is in the region is right any more."""
        self.stack.reset()
        for keys in SEQUENCES:
            assert self.stack.index.ready(keys, (0,)) == [False] * len(keys)
        # What had not been written below yet is gone with it.
        self.lossless = False

    @invariant()
    def every_row_is_somewhere(self) -> None:
        index = self.stack.index
        held = index.rows_used + index.rows_leaving + self.stack.rows_late
        assert index.rows_free + held == ROWS

    @invariant()
    def nothing_waits_without_bound(self) -> None:
        for lane in self.stack._lanes:
            assert sum(len(flight.rows) for flight in lane.flights.values()) <= 2 * ROWS
            assert lane.storing_blocks <= ROWS
        assert len(self.stack._loads._queued) <= len(BLOCK)

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        while self.storing:
            self.end_store(0, 0, False)
        while self.loading:
            self.end_load(0, False)
        self._let_go()
        safe = self.committed - self.damaged
        for keys in SEQUENCES if self.lossless else ():
            whole = next((n for n, key in enumerate(keys) if key not in safe), len(keys))
            # Promotions have room for a part at a time, and a busy machine makes tiers late.
            until_s = time.monotonic() + PATIENCE_S
            while self._settled(keys) < whole and not self._given_up_stores():
                assert time.monotonic() < until_s, "a committed block is lost"
                time.sleep(0.01)
                self.stack.step()
            self._let_go()
        self.stack.close()

    def _given_up_stores(self) -> int:
        """Blocks that the first tier was not given, or not in time: those may be lost."""
        counters = self.stack.tier_counters[self.tiers[0].name]
        return counters.shed + counters.late

    def _let_go(self) -> None:
        """Everything ends, and then nothing is held."""
        for tier in self.tiers:
            if isinstance(tier, FaultyTier):
                tier.release()
        assert self.stack.drain(PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while self.stack.index.pinned and time.monotonic() < until_s:
            time.sleep(0.005)
            self.stack.step()
        index = self.stack.index
        assert (index.pinned, index.rows_leaving, self.stack.rows_late) == (0, 0, 0)

    def _settled(self, keys: Sequence[bytes]) -> int:
        """Every PENDING ends, whoever does nothing but ask; the hits then."""
        until_s = time.monotonic() + PATIENCE_S
        while (found := self.stack.lookup(keys)).waits:
            assert time.monotonic() < until_s, f"{found} never ends"
            assert found.deadline_s is not None
            time.sleep(0.001)
            self.stack.step()
        return found.hits

    def _check(self, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        for key, row in zip(keys, rows, strict=True):
            assert self.rows.wrong(row, BLOCK[key]) is None
            assert key in self.committed


TestStack: type[unittest.TestCase] = StackMachine.TestCase
TestStack.settings = settings(  # type: ignore[attr-defined]
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
