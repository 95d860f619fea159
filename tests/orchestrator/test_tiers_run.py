"""A filesystem tier under the regions of real replicas: warm starts, sharing, damage, Ctrl-C."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from backends.tier.registry import TierRegistry
from orchestrator.lower_tiers import lower_tiers
from orchestrator.plan import read_plan
from tests.kit import plan_for
from tests.orchestrator.harness import ahead, launched, ran_ahead, run_launch

__all__ = ["ran_ahead"]
pytestmark = pytest.mark.multiproc


def on_disk(home: Path) -> tuple[str, ...]:
    """A filesystem tier in `home / "disk"`."""
    paths = f"tiers.stack.fs.paths=[{home / 'disk'}]"
    return ("tiers=shm_fs", paths, "tiers.stack.fs.capacity=256MiB")


def run(home: Path, name: str, *overrides: str) -> dict[str, Any]:
    """The report of a run that ends well; runs of one `home` share its disk."""
    (home / name).mkdir()
    launch = run_launch(home / name, *on_disk(home), *overrides)
    assert launch.popen.returncode == 0, launch.told()
    assert launch.left() == []
    assert unfinished(home) == []
    report = launch.report()
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    return report


def blocks(home: Path) -> list[Path]:
    disk = home / "disk"
    return sorted(path for path in disk.rglob("*.kvb") if path.parent != disk / "quarantine")


def unfinished(home: Path) -> list[Path]:
    return list((home / "disk" / "writers").rglob("*"))


def hits(report: dict[str, Any], source: str) -> int:
    return sum(replica["hit_tokens"][source] for replica in report["replicas"])


def all_hits(report: dict[str, Any]) -> int:
    return sum(sum(replica["hit_tokens"].values()) for replica in report["replicas"])


@ahead
def test_a_second_run_starts_warm_and_damaged_files_are_misses(home: Path) -> None:
    first = run(home, "first")
    tier = first["tiers"]["fs"]
    assert tier["stores"] > 0
    assert (
        tier["stored_bytes"] == tier["usage_bytes"] == sum(p.stat().st_size for p in blocks(home))
    )
    assert 0 < tier["usage_bytes"] <= tier["capacity_bytes"]
    assert tier["store_bytes_per_s"] > 0
    assert tier["errors"] == tier["corrupt"] == 0

    second = run(home, "second")
    assert hits(second, "fs") > hits(first, "fs")
    assert all_hits(second) > all_hits(first)
    total = sum(replica["prompt_tokens"] for replica in second["replicas"])
    # Everything but the last, partial chunk of each prompt has been seen before.
    assert all_hits(second) > 0.9 * total
    tier = second["tiers"]["fs"]
    assert tier["hits"] > 0
    assert tier["loaded_bytes"] > 0
    assert tier["load_bytes_per_s"] > 0
    assert tier["load_latency_s"]["p50"] > 0

    for path in blocks(home)[::3]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    third = run(home, "third")
    tier = third["tiers"]["fs"]
    assert tier["corrupt"] > 0
    # Found wrong by a load, or by a store that would have left it alone.
    assert tier["counters"]["quarantined"] == len(list((home / "disk" / "quarantine").iterdir()))
    assert tier["counters"]["quarantined"] > 0
    assert 0 < hits(third, "fs") < hits(second, "fs")


@ahead
def test_replicas_write_a_shared_prompt_once_and_another_number_of_them_finds_it(
    home: Path,
) -> None:
    four = run(home, "four", "experiment=shared_prompts", "parallel=dp4_tp1")
    tier = four["tiers"]["fs"]
    assert [replica["stored"] > 0 for replica in tier["replicas"]].count(True) > 1
    # What one of them had stored already was stored again by others, and not written.
    assert tier["counters"]["dedup_skips"] > 0
    assert tier["counters"]["stored"] == len(blocks(home))

    two = run(home, "two", "experiment=shared_prompts", "parallel=dp2_tp1")
    for replica in two["replicas"]:
        assert replica["hit_tokens"]["fs"] > 0
    assert all_hits(two) > all_hits(four)


@ahead
def test_ctrl_c_leaves_no_unfinished_file(home: Path) -> None:
    long = "workload.conversations=4000"
    with launched(home, *on_disk(home), "parallel=dp2_tp1", long) as launch:
        launch.wait_serving()
        launch.wait("stores", lambda: unfinished_files(home))
        launch.signal(signal.SIGINT)
        since_s = time.monotonic()
        assert launch.wait_end() == 128 + signal.SIGINT
        launch.assert_gone(since_s)
        assert unfinished(home) == []
        assert blocks(home)


def unfinished_files(home: Path) -> bool:
    return any(path.is_file() for path in unfinished(home))


def test_workers_are_told_which_path_is_near_to_which_replica(tmp_path: Path) -> None:
    """Numbers are keys here, and a plan is JSON."""
    paths, near = "tiers.stack.fs.paths=[/a,/b]", "tiers.stack.fs.affinity={1:/b,0:/a}"
    there = (paths, "tiers=shm_fs", "spawn.check_machine=false")
    plan_for(tmp_path, *there, near)
    plan = read_plan(tmp_path / "plan.json")
    settings = TierRegistry().find("fs").settings(lower_tiers(plan.settings)["fs"])
    assert settings.affinity == {0: "/a", 1: "/b"}
    again = plan_for(tmp_path, *there, "tiers.stack.fs.affinity={0:/a,1:/b}")
    assert again.digest == plan.digest != plan_for(tmp_path, *there).digest
