"""Replicas with a tier under the region: what comes back is right, a late or bad tier a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.stack.settings import StackSettings
from backends.testing import (
    Fault,
    FaultKind,
    FaultyTier,
    MemoryMedium,
    MemorySettings,
    MemoryTier,
    SlowTier,
)
from backends.tier.base import Tier, TierContext
from tests.engine.replica_kit import SMALL, Replica, totals
from tests.kit import plan_for

TIGHT = (*SMALL, "region.size=1536KiB")


def memory(medium: MemoryMedium, capacity: int | None = None) -> object:
    def open_tiers(context: TierContext) -> list[Tier]:
        return [MemoryTier(context, MemorySettings(capacity), medium)]

    return open_tiers


def below(replica: Replica) -> int:
    assert replica.leader is not None
    return replica.leader.stats.hit_tokens_below.get("memory", 0)


def assert_nothing_held(replica: Replica) -> None:
    """Every row is either free or holds a block that may be evicted."""
    assert replica.stack is not None
    index = replica.stack.index
    assert (index.pinned, index.rows_leaving) == (0, 0)
    assert index.rows_free + index.rows_used == index.rows_total


@pytest.mark.parametrize("groups", ["one", "two"])
def test_what_the_region_evicted_comes_back_from_below_and_is_right(
    groups: str, tmp_path: Path
) -> None:
    halves = "{name: a, kind: full, layers: [0, 1]}, {name: b, kind: full, layers: [2, 3]}"
    two = [f"model.groups=[{halves}]"]
    plan = plan_for(tmp_path, *TIGHT, *(two if groups == "two" else []))
    without = Replica(plan)
    replica = Replica(plan, below=memory(MemoryMedium()))
    checked, wrong = totals(replica)
    assert wrong == 0
    assert checked > totals(without)[0]
    assert below(replica) > 0
    assert replica.leader is not None
    assert without.leader is not None
    assert replica.leader.stats.hit_tokens > without.leader.stats.hit_tokens
    assert_nothing_held(replica)
    assert replica.stack is not None
    counters = replica.stack.tier_counters["memory"]
    assert counters.errors == 0
    assert counters.hits * plan.region.tokens_per_row >= below(replica)


def test_a_second_run_on_the_same_tier_starts_warm(tmp_path: Path) -> None:
    medium, plan = MemoryMedium(), plan_for(tmp_path, *SMALL)
    first = Replica(plan, below=memory(medium))
    second = Replica(plan, below=memory(medium))
    assert totals(second)[1] == 0
    assert first.leader is not None
    assert second.leader is not None
    assert below(second) > below(first)
    # Everything that can be hit by whole chunks is, but for what a prompt's last tokens are.
    assert second.leader.stats.hit_tokens > 0.85 * second.leader.stats.prompt_tokens


def test_another_models_blocks_are_not_seen(tmp_path: Path) -> None:
    medium = MemoryMedium()
    Replica(plan_for(tmp_path, *SMALL), below=memory(medium))
    other = Replica(plan_for(tmp_path, *SMALL, "model.revision=other"), below=memory(medium))
    cold = Replica(plan_for(tmp_path, *SMALL), below=memory(MemoryMedium()))
    assert totals(other)[1] == 0
    assert below(other) == below(cold)


def test_a_slow_tier_is_waited_for_and_everything_is_right(tmp_path: Path) -> None:
    def open_tiers(context: TierContext) -> list[Tier]:
        inner = MemoryTier(context, MemorySettings(None), MemoryMedium())
        return [
            SlowTier(
                inner,
                context,
                latency_s=0.01,
                jitter=0.9,
                lookup_latency_s=0.005,
                seed=1,
            )
        ]

    replica = Replica(plan_for(tmp_path, *TIGHT), below=open_tiers)
    assert totals(replica)[1] == 0
    assert_nothing_held(replica)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_no_fault_of_a_tier_makes_a_wrong_byte(kind: FaultKind, tmp_path: Path) -> None:
    def open_tiers(context: TierContext) -> list[Tier]:
        inner = MemoryTier(context, MemorySettings(None), MemoryMedium())
        return [FaultyTier(inner, context, faults=[Fault(kind, rate=0.3)], seed=3)]

    hasty = StackSettings(lookup_timeout_s=0.01, load_timeout_s=0.02, store_timeout_s=0.1)
    replica = Replica(plan_for(tmp_path, *TIGHT), below=open_tiers, stack_settings=hasty)
    assert totals(replica)[1] == 0
    assert replica.leader is not None
    assert replica.leader.stats.requests == 60
    assert_nothing_held(replica)
