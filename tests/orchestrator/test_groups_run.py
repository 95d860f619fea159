"""Models whose KV-cache groups differ, launched as a user does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan import Plan, read_plan
from tests.orchestrator.harness import ahead, ran_ahead, run_launch

__all__ = ["ran_ahead"]
pytestmark = pytest.mark.multiproc

SMALL = ("workload.requests=60", "engine.device_cache_size=640KiB", "region.size=2MiB")


def run(home: Path, *overrides: str) -> tuple[Plan, dict[str, Any]]:
    """The plan and the report of a run that ends verified, with hits, in the rows of its plan."""
    disk = ("tiers=shm_fs", f"tiers.stack.fs.paths=[{home / 'disk'}]")
    launch = run_launch(home, *SMALL, *disk, "tiers.stack.fs.capacity=256MiB", *overrides)
    assert launch.popen.returncode == 0, launch.told()
    assert launch.left() == []
    plan, report = read_plan(launch.run.plan), launch.report()
    assert report["status"] == "ok"
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    for replica in report["replicas"]:
        assert replica["hit_tokens"]["shm"] + replica["hit_tokens"]["fs"] > 0
    shm = report["tiers"]["shm"]
    rows = plan.region.rows * len(plan.replicas)
    assert shm["capacity_bytes"] == rows * plan.region.row_bytes
    assert 0 < shm["usage_bytes"] <= shm["capacity_bytes"]
    return plan, report


@ahead
def test_a_hybrid_of_full_and_sliding_window_layers(home: Path) -> None:
    plan, report = run(home, "model=tiny_hybrid", "parallel=dp1_tp2")
    assert [column.reach for column in plan.columns] == [2, None]
    # Full layers are stored for every chunk, windows for the few that a hit can end with.
    tier = report["tiers"]["fs"]
    assert tier["stored_bytes"] < 2 * tier["stores"] * plan.region.row_bytes


@ahead
def test_latent_attention_is_kept_once_for_two_tensor_parallel_ranks(home: Path) -> None:
    plan, report = run(home, "model=tiny_mla", "parallel=dp1_tp2")
    workers = report["replicas"][0]["workers"]
    assert [worker["slot"] for worker in workers] == [0, 0]
    assert workers[0]["stats"]["stored_bytes"] > 0 == workers[1]["stats"]["stored_bytes"]
    assert plan.region.row_bytes < 2 * plan.region.slot_bytes


@ahead
def test_two_groups_with_blocks_of_different_sizes(home: Path) -> None:
    device = "engine.device_cache_size=700KiB"
    plan, report = run(home, "model=tiny_blocks", "parallel=dp2_tp1", device)
    # 16 blocks of 16 tokens in two rows beside 8 of 32 in one, and no row is half empty.
    assert [(c.group, c.part) for c in plan.columns] == [(0, 0), (1, 0), (0, 1)]
    blocks = set(plan.replicas[0].workers[0].worker_bytes_per_block)
    assert {count * plan.cache.blocks_per_chunk for count in blocks} == {plan.region.slot_bytes}
    used = report["tiers"]["shm"]["usage_bytes"]
    assert used > 0.9 * report["tiers"]["shm"]["capacity_bytes"]
