"""The conformance suite and the state machine on the tier in memory, with and without wrappers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from backends.testing import (
    FaultyTier,
    MemoryHarness,
    Opener,
    SlowTier,
    TierConformance,
    TierMachine,
    machine_test,
)
from backends.tier.base import Tier, TierContext

Wrap = Callable[[Tier, TierContext], Tier]


def _open_wrapped(context: TierContext, *, opener: Opener, wrap: Wrap) -> Tier:
    return wrap(opener(context), context)


class TestMemoryTier(TierConformance):
    harness_type = MemoryHarness


class SlowHarness(MemoryHarness):
    def opener(self, capacity_bytes: int | None = None) -> Opener:
        wrap = partial(
            SlowTier,
            latency_s=0.002,
            bytes_per_s=2e9,
            jitter=0.5,
            lookup_latency_s=0.001,
            seed=1,
        )
        return partial(_open_wrapped, opener=super().opener(capacity_bytes), wrap=wrap)


class TestSlowTierIsATier(TierConformance):
    harness_type = SlowHarness


class FaultlessHarness(MemoryHarness):
    def opener(self, capacity_bytes: int | None = None) -> Opener:
        wrap = partial(FaultyTier, faults=[])
        return partial(_open_wrapped, opener=super().opener(capacity_bytes), wrap=wrap)


class TestFaultyTierIsATier(TierConformance):
    harness_type = FaultlessHarness


class MemoryMachine(TierMachine):
    harness_type = MemoryHarness


class SmallMemoryMachine(TierMachine):
    harness_type = MemoryHarness
    capacity_blocks = 4


class SlowMachine(TierMachine):
    harness_type = SlowHarness


TestMemoryMachine = machine_test(MemoryMachine, examples=30, steps=25)
TestSmallMemoryMachine = machine_test(SmallMemoryMachine, examples=30, steps=25)
TestSlowMachine = machine_test(SlowMachine, examples=10, steps=20)
