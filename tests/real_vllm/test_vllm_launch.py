"""`python launch.py engine=vllm`: two real engines, one report, and one of them killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")

from tests.real_vllm.kit import ROOT, block_files, environment, launch

pytestmark = [pytest.mark.vllm, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 600.0


def overrides(model: Path, disk: Path, requests: int) -> list[str]:
    return [
        *("engine=vllm", f"engine.model={model}", "engine.vllm.load_format=dummy"),
        *("parallel=dp2_tp1", "tiers=shm_fs", "region.size=32MiB", "region.blocks_per_chunk=2"),
        *("engine.device_cache_size=2MiB", "engine.vllm.max_model_len=992"),
        *(f"tiers.stack.fs.paths=[{disk}]", "tiers.stack.fs.capacity=256MiB", "view=plain"),
        *(f"workload.requests={requests}", "workload.conversations=8", "workload.turns=3"),
        *("workload.system_prompt_tokens=256", "workload.user_tokens=64"),
        *("workload.output_tokens=16", "workload.policy=round_robin"),
    ]


def left_behind(run_dir: Path) -> list[str]:
    """Processes of a run, and its names in shared memory."""
    named = [p.info for p in psutil.process_iter(["pid", "cmdline"])]
    found = [str(info) for info in named if str(run_dir) in " ".join(info["cmdline"] or [])]
    return found + [str(path) for path in Path("/dev/shm").glob("kvquay_*")]


def report_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "report.json").read_bytes())
    return found


def test_two_replicas_answer_as_they_do_without_offload(tiny_model: Path, tmp_path: Path) -> None:
    run_dir, disk = tmp_path / "run", tmp_path / "fs"
    done = launch(run_dir, *overrides(tiny_model, disk, requests=24))
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(run_dir)
    assert report["status"] == "ok"
    assert report["verification"]["requests_compared"] == 24
    assert report["verification"]["requests_different"] == 0
    assert "24 answers as without offload" in done.stdout
    for replica in report["replicas"]:
        told = replica["vllm"]
        assert replica["requests"] == 12
        assert len(told["ttft_s"]) == len(told["ttft_without_offload_s"]) == 12
        external = told["counters"]["vllm:external_prefix_cache_hits"]
        hits = replica["hit_tokens"]
        # The device cache holds two requests, so what is used again comes from the region.
        assert external == hits["shm"] + hits["fs"] > 0
        assert hits["device"] == told["counters"]["vllm:prefix_cache_hits"]
    assert report["tiers"]["shm"]["loaded_bytes"] > 0
    assert report["tiers"]["shm"]["load_bytes_per_s"] > 0
    assert left_behind(run_dir) == []


def events(run_dir: Path, index: int) -> list[dict[str, Any]]:
    path = run_dir / "replicas" / f"dp{index}" / "rank0.events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_killing_one_engine_leaves_the_other_its_region_files_and_answers(
    tiny_model: Path, tmp_path: Path
) -> None:
    run_dir, disk = tmp_path / "run", tmp_path / "fs"
    running = subprocess.Popen(
        [
            *(sys.executable, "launch.py", f"hydra.run.dir={run_dir}"),
            *("spawn.on_failure=continue", *overrides(tiny_model, disk, requests=60)),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until_s = time.monotonic() + START_S
        while not all(any(e["phase"] == "progress" for e in events(run_dir, n)) for n in (0, 1)):
            assert running.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.kill(events(run_dir, 1)[0]["pid"], signal.SIGKILL)
        output, _ = running.communicate(timeout=900)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1, output
    report = report_of(run_dir)
    [failure] = report["failures"]
    assert (failure["replica"], failure["message"]) == (
        1,
        "its vLLM process was killed by SIGKILL",
    )
    [survivor] = report["replicas"]
    assert survivor["data_parallel_index"] == 0
    assert survivor["requests"] == 30
    assert survivor["vllm"]["requests_different"] == 0
    assert report["tiers"]["fs"]["corrupt"] == 0
    assert list(block_files(disk))
    assert list((disk / "quarantine").iterdir()) == []
    assert left_behind(run_dir) == []
