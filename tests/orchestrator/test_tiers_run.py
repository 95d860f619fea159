"""A filesystem tier under the regions of real replicas: warm starts, and damage on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import REPO

pytestmark = pytest.mark.multiproc


def run(disk: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    command = [
        *(sys.executable, "launch.py", "profile=ci", "tiers=shm_fs"),
        *(f"tiers.stack.fs.paths=[{disk}]", "tiers.stack.fs.capacity=256MiB"),
        *(f"hydra.run.dir={run_dir}", *overrides),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    return report


def hits(report: dict[str, Any], source: str) -> int:
    return sum(replica["hit_tokens"][source] for replica in report["replicas"])


def test_a_second_run_starts_warm_and_damaged_files_are_misses(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    first = run(disk, tmp_path / "first")
    tier = first["tiers"]["fs"]
    assert tier["stores"] > 0
    assert 0 < tier["usage_bytes"] <= tier["capacity_bytes"]
    assert tier["errors"] == tier["corrupt"] == 0

    second = run(disk, tmp_path / "second")
    assert hits(second, "fs") > hits(first, "fs")
    total = sum(replica["prompt_tokens"] for replica in second["replicas"])
    found = sum(hits(second, source) for source in ("device", "shm", "fs"))
    # Everything but the last, partial chunk of each prompt has been seen before.
    assert found > 0.9 * total
    assert second["tiers"]["fs"]["loaded_bytes"] > 0

    blocks = sorted(disk.rglob("*.kvb"))
    assert blocks
    for path in blocks[::3]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    third = run(disk, tmp_path / "third")
    assert third["tiers"]["fs"]["corrupt"] > 0
    assert 0 < hits(third, "fs") < hits(second, "fs")


def test_replicas_share_what_one_of_them_stored(tmp_path: Path) -> None:
    """Another number of replicas on the same directory finds the same blocks."""
    disk = tmp_path / "disk"
    run(disk, tmp_path / "first", "parallel=dp1_tp2")
    report = run(disk, tmp_path / "second", "parallel=dp2_tp2")
    for replica in report["replicas"]:
        assert replica["hit_tokens"]["fs"] > 0
