"""`region.scope: node`: what is shared is kept once, a death costs nothing but its rows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from backends.region.node.reader import Lease, NodeReader
from orchestrator.plan import Plan, read_plan
from orchestrator.problems import ConfigProblems
from orchestrator.spawn.inline import InlineSpawner
from orchestrator.validate import validate
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec
from tests.kit import REPO, compose_config, plan_for
from tests.orchestrator.harness import Launch, ahead, ran_ahead, run_launch
from tests.test_imports import Tree

__all__ = ["ran_ahead"]

NODE = "region.scope=node"
SHARED = (
    *("engine.lockstep=true", "workload.policy=round_robin", "workload.requests=60"),
    *("workload.system_prompts=3", "workload.system_prompt_tokens=1024", "region.size=16MiB"),
)


def told(run_dir: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigProblems) as caught:
        validate(compose_config(*overrides), run_dir)
    return {problem.key: str(problem) for problem in caught.value.problems}


def requests_of(plan: Plan, replica: int) -> list[set[bytes]]:
    """The chunks of each request that a replica is sent."""
    cache, found = plan.cache, []
    spec = workload_spec(plan.settings.workload, cache)
    for request in stream_for_replica(spec, plan.topology.data_parallel_size, replica):
        blocks = (request.prompt_tokens + request.output_tokens) // cache.tokens_per_block
        hashes = request.hashes[:blocks]
        found.append(set(hashes[cache.blocks_per_chunk - 1 :: cache.blocks_per_chunk]))
    return found


def results(launch: Launch) -> list[dict[str, Any]]:
    paths = sorted(launch.run.path.glob("replicas/dp*/result.json"))
    return [json.loads(path.read_text()) for path in paths]


def test_it_needs_somebody_to_share_with_and_an_engine_that_can(tmp_path: Path) -> None:
    alone = told(tmp_path, NODE, "parallel=dp1_tp2")
    assert "needs several replicas on a node" in alone["region.scope"]
    spread = ("action=plan", "spawn.check_machine=false", "spawn.nnodes=2")
    assert "on 2 nodes puts one there" in told(tmp_path, NODE, *spread)["region.scope"]
    simulated = told(tmp_path, NODE, "action=simulate")
    assert "is not simulated" in simulated["region.scope"]
    windows = told(tmp_path, NODE, "model=gpt_oss_20b", "region.size=1GiB")
    assert "sliding window" in windows["region.scope"]
    typo = told(tmp_path, "region.scope=nodes")["region.scope"]
    assert "did you mean 'node'" in typo


def test_the_plan_tells_of_the_index_and_by_default_there_is_none(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    plan, plain = plan_for(tmp_path / "with", NODE), plan_for(tmp_path / "without")
    first = plan.node_index(0)
    assert first is not None
    assert first == plan.node_index(1)
    assert plan.region.index_bytes == first.nbytes
    assert (first.replicas, first.rows) == (2, plan.region.rows)
    assert plan.run.run_id in first.name
    assert plain.settings.region.scope == "replica"
    assert (plain.node_index(0), plain.region.index_bytes) == (None, 0)
    assert plan.digest != plain.digest
    assert plan.fingerprint == plain.fingerprint


def test_replicas_of_other_nodes_have_another_index(tmp_path: Path) -> None:
    four = ("parallel.data_parallel_size=4", "spawn.nnodes=2")
    plan = plan_for(tmp_path, NODE, "action=plan", "spawn.check_machine=false", *four)
    indices = [plan.node_index(replica) for replica in range(4)]
    assert indices[0] == indices[1] != indices[2] == indices[3]


def test_rows_that_are_given_away_during_a_copy_are_computed_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other read of a neighbour is overtaken at its second row."""
    kept, calls = NodeReader.kept, count()

    def overtaken(reader: NodeReader, leases: Sequence[Lease]) -> int:
        return min(kept(reader, leases), len(leases) if next(calls) % 2 else 1)

    monkeypatch.setattr(NodeReader, "kept", overtaken)
    plan = plan_for(
        tmp_path, "profile=ci", "spawn=inline", NODE, *SHARED, "workload.requests=30", "view=quiet"
    )
    with InlineSpawner(plan) as spawner:
        until_s = time.monotonic() + 60
        while spawner.running and time.monotonic() < until_s:
            assert all(not status for _, status in spawner.poll(0.1))
    found = [json.loads(path.read_text()) for path in tmp_path.glob("replicas/dp*/result.json")]
    assert len(found) == 2
    assert sum(result["primary"]["node"]["node_lost"] for result in found) > 0
    workers = [worker["stats"] for result in found for worker in result["workers"]]
    assert sum(worker["blocks_checked"] for worker in workers) > 0
    assert sum(worker["blocks_wrong"] for worker in workers) == 0
    assert sum(worker["refused_rows"] for worker in workers) > 0


@pytest.mark.multiproc
@ahead
def test_what_replicas_share_is_kept_once_per_node(home: Path) -> None:
    launch = run_launch(home, *SHARED, NODE, "parallel=dp2_tp2")
    assert launch.popen.returncode == 0, launch.told()
    assert launch.left() == []
    plan, report = read_plan(launch.run.plan), launch.report()
    requests = [requests_of(plan, replica) for replica in range(2)]
    first, second = (set().union(*of_replica) for of_replica in requests)
    # When the last request is served, by replica 1, the other may have ended, and its rows with it.
    last = len(requests[1][-1])
    assert len(first & second) >= 3 * 1024 // plan.region.tokens_per_row > 2 * last
    used = [result["rows_used"] for result in results(launch)]
    assert len(first | second) <= sum(used) <= len(first | second) + last
    counters = report["tiers"]["shm"]["counters"]
    assert counters["rows_shared"] == sum(used)
    assert counters["node_held"] >= len(first & second) - last
    assert counters["neighbours_lost"] == 0
    assert all(replica["hit_tokens"]["node"] > 0 for replica in report["replicas"])
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0


def test_who_shares_nothing_loads_nothing_of_it() -> None:
    reached = Tree(REPO).reached("orchestrator.worker")
    loaded = {module for module in reached if module.startswith("backends.region.node")}
    assert {module for module in loaded if (REPO / f"{module.replace('.', '/')}.py").exists()} == {
        "backends.region.node.spec"
    }
    assert "backends.stack.node" not in reached


@pytest.mark.multiproc
@ahead
def test_by_default_each_replica_keeps_its_own(home: Path) -> None:
    launch = run_launch(home, *SHARED, "parallel=dp2_tp1")
    assert launch.popen.returncode == 0, launch.told()
    plan, report = read_plan(launch.run.plan), launch.report()
    used = [result["rows_used"] for result in results(launch)]
    assert used == [len(set().union(*requests_of(plan, replica))) for replica in range(2)]
    assert report["tiers"]["shm"]["counters"] == {}
    assert all("node" not in replica["hit_tokens"] for replica in report["replicas"])


@pytest.mark.multiproc
@ahead
def test_rows_that_their_owner_gives_away_while_they_are_wanted_bring_no_wrong_byte(
    home: Path,
) -> None:
    """Far more is shared than fits, so that each evicts all the time what the other is to read."""
    launch = run_launch(
        home,
        *("profile=ci", NODE, "parallel=dp2_tp1", "workload.policy=round_robin"),
        *("workload.requests=3000", "workload.system_prompts=24"),
    )
    assert launch.popen.returncode == 0, launch.told()
    report = launch.report()
    assert report["tiers"]["shm"]["counters"]["node_hits"] > 100
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0


@pytest.mark.multiproc
@ahead
def test_a_replica_killed_while_the_other_reads_its_rows_costs_no_wrong_byte(home: Path) -> None:
    overrides = (
        *("profile=ci", NODE, "parallel=dp2_tp1"),
        *("workload.policy=round_robin", "workload.requests=3000", "workload.system_prompts=8"),
        "spawn.on_failure=continue",
    )
    with Launch(home, *overrides) as launch:
        victim = launch.wait_phase("ready", 0, 0)
        reader = launch.wait_phase("ready", 1, 0)
        launch.wait("dp1 to read dp0's rows", lambda: maps_region(reader, of_replica=0))
        os.kill(victim, signal.SIGKILL)
        launch.wait("dp1 to let go of them", lambda: not maps_region(reader, of_replica=0))
        assert launch.wait_end() == 1, launch.told()
        launch.assert_gone(time.monotonic())
        report = launch.report()
        assert [replica["data_parallel_index"] for replica in report["replicas"]] == [1]
        assert report["verification"]["blocks_checked"] > 0
        assert report["verification"]["blocks_wrong"] == 0
        counters = report["tiers"]["shm"]["counters"]
        assert counters["neighbours_lost"] == 1
        assert counters["node_hits"] > 0
        assert report["replicas"][0]["requests"] > 0


def maps_region(pid: int, of_replica: int) -> bool:
    """Whether a process has mapped the region of a replica, which is a memory file."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return False
    return any("/memfd:kvquay_" in line and f"_dp{of_replica} " in line for line in lines)
