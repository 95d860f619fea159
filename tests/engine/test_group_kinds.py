"""Replicas of models whose KV-cache groups differ: real regions, real copies, a tier below."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.testing import MemoryMedium, MemorySettings, MemoryTier, SlowTier
from backends.tier.base import Tier, TierContext
from tests.engine.replica_kit import SMALL, Replica, totals
from tests.engine.test_stack import assert_nothing_held, below, memory
from tests.kit import plan_for

TIGHT = (*SMALL, "region.size=1280KiB", "workload.requests=40")
WINDOW_BESIDE_LONGER_BLOCKS = (
    "model.groups=[{name: w, kind: sliding_window, sliding_window: 100, layers: [0, 1]},"
    "{name: f, kind: full, layers: [2, 3], kv_heads: 1, tokens_per_block: 32}]"
)
MODELS = {
    "hybrid": ("model=tiny_hybrid",),
    "mla": ("model=tiny_mla",),
    "blocks": ("model=tiny_blocks", "engine.device_cache_size=700KiB"),
    "all of it": (WINDOW_BESIDE_LONGER_BLOCKS, "engine.layout=blocks_first"),
    "shared by pairs": ("model.kv_heads=2", "parallel.tensor_parallel_size=4"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_from_region_and_tier_is_right(name: str, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, *TIGHT, *MODELS[name])
    replica = Replica(plan, below=memory(MemoryMedium()))
    checked, wrong = totals(replica)
    assert wrong == 0
    assert checked > 0
    assert replica.leader is not None
    assert below(replica) > 0
    assert_nothing_held(replica)
    assert replica.stack is not None
    assert replica.stack.index.rows_total == plan.region.rows
    assert replica.stack.tier_counters["memory"].errors == 0


def test_ranks_that_hold_the_same_keep_it_once_and_the_first_of_them_writes(
    tmp_path: Path,
) -> None:
    alone = plan_for(tmp_path, *SMALL, "model=tiny_mla", "parallel=dp1_tp1")
    plan = plan_for(tmp_path, *SMALL, "model=tiny_mla")
    assert plan.region.row_bytes == alone.region.row_bytes
    assert plan.region.rows == alone.region.rows
    assert [worker.slot for worker in plan.replicas[0].workers] == [0, 0]
    replica = Replica(plan)
    assert totals(replica)[1] == 0
    stored = [replica.runners[rank].stats.stored_bytes for rank in (0, 1)]
    loaded = [replica.runners[rank].stats.loaded_bytes for rank in (0, 1)]
    assert stored[0] > 0 == stored[1]
    assert loaded[0] == loaded[1] > 0


@pytest.mark.parametrize(("tokens_per_s", "recomputes"), [(1e9, True), (1.0, False)])
def test_a_tier_that_is_slower_than_computing_is_passed_over(
    tokens_per_s: float, recomputes: bool, tmp_path: Path
) -> None:
    def open_tiers(context: TierContext) -> list[Tier]:
        inner = MemoryTier(context, MemorySettings(None), MemoryMedium())
        return [SlowTier(inner, context, latency_s=0.002, jitter=0.1, seed=1)]

    speed = (
        "tiers.load_from=recompute_if_slower",
        f"engine.prefill_tokens_per_s={tokens_per_s}",
    )
    replica = Replica(plan_for(tmp_path, *TIGHT, *speed), below=open_tiers)
    assert totals(replica)[1] == 0
    assert replica.stack is not None
    [counters] = replica.stack.tier_counters.values()
    assert (counters.passed_over > 0) == recomputes
    assert counters.hits > 0  # at least what it was measured by


def test_without_a_speed_that_is_given_the_engine_tells_its_own(tmp_path: Path) -> None:
    replica = Replica(plan_for(tmp_path, *SMALL))
    assert replica.stack is not None
    seconds = replica.stack.engine.seconds(1000)
    assert seconds is not None
    assert 0 < seconds < 60
    worker = replica.runners[0].stats
    assert worker.computed_tokens > 0
    assert worker.computed_s > 0
