"""The published trace, run for real: every byte verified, hits those of an independent model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.plan import Plan, read_plan
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec
from tests.kit import REPO
from tests.models.cache_model import HitRecord, ReplicaCacheModel

pytestmark = pytest.mark.multiproc


def model_of(plan: Plan, index: int) -> HitRecord:
    """What a simple model of one replica's caches counts for the requests it is sent."""
    model = ReplicaCacheModel(
        plan.device_blocks,
        plan.region.rows,
        plan.cache.tokens_per_block,
        plan.cache.blocks_per_chunk,
        plan.cache.tokens_per_hash,
        len(plan.groups),
        plan.settings.tiers.stack.shm.eviction,
    )
    spec = workload_spec(plan.settings.workload, plan.cache)
    for request in stream_for_replica(spec, plan.topology.data_parallel_size, index):
        model.process(
            request.prompt_tokens, request.output_tokens, request.hashes, request.arrival_s
        )
    return model.totals()


@pytest.fixture(scope="module")
def trace_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, Any]]:
    trace = REPO.parent / "shared" / "traces" / "conversation_trace.jsonl"
    if not trace.is_file():
        pytest.skip(f"the published trace is not at {trace}")
    run_dir = tmp_path_factory.mktemp("trace")
    command = [
        *(sys.executable, "launch.py", "workload=trace", f"workload.path={trace}"),
        *("workload.requests=500", f"hydra.run.dir={run_dir}"),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((run_dir / "report.json").read_text())
    return read_plan(run_dir / "plan.json"), report


def test_500_requests_of_the_trace_run_verified(trace_run: tuple[Plan, dict[str, Any]]) -> None:
    _, report = trace_run
    assert report["status"] == "ok"
    assert sum(replica["requests"] for replica in report["replicas"]) == 500
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0


def test_hit_tokens_of_the_trace_are_those_of_an_independent_model(
    trace_run: tuple[Plan, dict[str, Any]],
) -> None:
    plan, report = trace_run
    evictions = 0
    for replica in report["replicas"]:
        expected = model_of(plan, replica["data_parallel_index"])
        assert replica["prompt_tokens"] == expected.prompt_tokens
        assert replica["hit_tokens"] == {
            "device": expected.hit_tokens_device,
            "shm": expected.hit_tokens_region,
        }
        assert expected.hit_tokens_region > 0
        evictions += expected.evicted_chunks
    assert report["tiers"]["shm"]["evictions"] == evictions


def test_the_report_has_every_promised_field(trace_run: tuple[Plan, dict[str, Any]]) -> None:
    plan, report = trace_run
    assert report["plan_digest"] == plan.digest
    assert report["run_id"] == plan.run.run_id
    assert 0 < report["ready_s"] < report["duration_s"]
    replicas = {replica["engine_id"] for replica in report["replicas"]}
    assert replicas == {replica.engine_id for replica in plan.replicas}
    tier = report["tiers"]["shm"]
    for name in ("lookups", "hits", "stored_bytes", "loaded_bytes", "usage_bytes"):
        assert tier[name] > 0, name
    for name in ("store_bytes_per_s", "load_bytes_per_s"):
        assert tier[name] > 1e6, name
    assert 0 < tier["load_latency_s"]["p50"] <= tier["load_latency_s"]["p95"]
    assert tier["load_latency_s"]["p95"] <= tier["load_latency_s"]["p99"]
    assert tier["usage_bytes"] <= tier["capacity_bytes"]
    assert tier["errors"] == 0
