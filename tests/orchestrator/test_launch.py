"""What a user starts works as typed: beside other runs, with devices that lie, by hand, in sweeps."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit import REPO, plan_for
from tests.orchestrator.harness import (
    Launch,
    assert_verified,
    hit_tokens,
    launched,
    run_launch,
)

pytestmark = pytest.mark.multiproc

# What a scheduler, another torchrun or a careless shell may have left behind.
GARBAGE = {
    "RANK": "7",
    "LOCAL_RANK": "5",
    "WORLD_SIZE": "many",
    "LOCAL_WORLD_SIZE": "0",
    "GROUP_RANK": "-1",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "another",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/nonexistent/error.json",
    "CUDA_VISIBLE_DEVICES": "garbage",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One DP2 x TP2 run on the defaults, its libraries made talkative."""
    environment = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    return run_launch(tmp_path_factory.mktemp("plain"), environment=environment)


def test_a_run_ends_well_and_leaves_nothing_but_its_results(plain: Launch) -> None:
    assert_verified(plain)
    assert plain.left() == []


def test_what_a_leader_prints_is_on_the_console_and_every_rank_has_a_file(plain: Launch) -> None:
    for replica in (0, 1):
        directory = plain.run.replica(replica)
        for rank in (0, 1):
            assert directory.stdout(rank).is_file()
            assert directory.stderr(rank).read_text()
        for line in directory.stderr(0).read_text().splitlines():
            assert f"[dp{replica}] {line}" in plain.out.splitlines()
        assert directory.stderr(1).read_text().splitlines()[0] not in plain.out


def test_runs_side_by_side_do_not_meet(tmp_path: Path, plain: Launch) -> None:
    """Four at once, two of each backing, two replicas each."""
    backings = ("region=default", "region=shm") * 2
    runs = [Launch(tmp_path / str(n), "profile=ci", b) for n, b in enumerate(backings)]
    try:
        for run in runs:
            run.wait_end()
            assert_verified(run)
            assert hit_tokens(run.report()) == hit_tokens(plain.report())
        for run in runs:
            assert run.left() == []
        assert len({run.run_id for run in runs}) == len(runs)
    finally:
        for run in runs:
            run.__exit__()


@pytest.mark.parametrize(
    ("devices", "virtual"), [([0, 2, 4, 6], "true"), ([3, 2, 1, 0], "false")]
)
def test_slots_come_from_the_group_whatever_devices_and_environment_say(
    tmp_path: Path, plain: Launch, devices: list[int], virtual: str
) -> None:
    ordinals = json.dumps(devices, separators=(",", ":"))
    run = run_launch(
        tmp_path,
        f"spawn.devices={ordinals}",
        f"spawn.virtual_local_rank={virtual}",
        environment=GARBAGE,
    )
    assert_verified(run)
    assert hit_tokens(run.report()) == hit_tokens(plain.report())
    planned = json.loads(run.run.plan.read_text())["replicas"]
    assert [w["device_index"] for r in planned for w in r["workers"]] == devices
    found = [w["slot"] for r in run.report()["replicas"] for w in r["workers"]]
    assert found == [0, 1, 0, 1]


def test_spawned_workers_do_what_forked_ones_do(tmp_path: Path) -> None:
    """Half the replicas, because each worker imports torch by itself."""
    spawned = run_launch(tmp_path / "spawn", "parallel=dp1_tp2", "spawn.start_method=spawn")
    assert_verified(spawned, replicas=(0,))
    assert spawned.left() == []
    inline = run_launch(tmp_path / "inline", "parallel=dp1_tp2", "spawn=inline")
    assert_verified(inline, replicas=(0,))
    assert hit_tokens(spawned.report()) == hit_tokens(inline.report())


def test_threads_of_one_process_do_what_processes_do(tmp_path: Path, plain: Launch) -> None:
    run = run_launch(tmp_path, "spawn=inline", "region=shm")
    assert_verified(run)
    assert hit_tokens(run.report()) == hit_tokens(plain.report())
    assert run.left() == []


def test_the_planned_command_of_a_replica_works_by_hand(tmp_path: Path, plain: Launch) -> None:
    plan = plan_for(tmp_path, "profile=ci")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = shlex.split(plan.replicas[1].command)
    assert command[0] == "torchrun"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=elsewhere,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "replicas" / "dp1" / "result.json").read_text())
    assert [worker["slot"] for worker in result["workers"]] == [0, 1]
    stats = result["stats"]
    hits = {"device": stats["hit_tokens_device"], "shm": stats["hit_tokens_shm"]}
    assert hits == plain.report()["replicas"][1]["hit_tokens"]
    assert list(elsewhere.iterdir()) == []


def test_a_run_directory_that_was_used_before_tells_of_the_new_run_alone(
    tmp_path: Path, plain: Launch
) -> None:
    """The events, results and failures of the first run must not be taken for the second's."""
    with launched(tmp_path / "first") as first:
        os.kill(first.wait_phase("ready", 1, 1), signal.SIGKILL)
        first.wait_end()
    assert first.run.replica(1).failure.exists()
    again = run_launch(tmp_path / "second", f"hydra.run.dir={first.run.path}")
    assert again.popen.returncode == 0, again.told()
    report = first.report()
    assert report["run_id"] != json.loads(plain.run.plan.read_text())["run"]["run_id"]
    assert report["status"] == "ok"
    assert report["failures"] == []
    assert hit_tokens(report) == hit_tokens(plain.report())
    assert not first.run.replica(1).failure.exists()


def sweep(home: Path, *overrides: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    directory = home / "sweep"
    command = [sys.executable, "launch.py", "-m", f"hydra.sweep.dir={directory}", *overrides]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=250)
    return done, directory


def table_rows(out: str) -> dict[str, list[str]]:
    """Words of the last table's rows, by job number."""
    lines = out[out.rindex("job  overrides") :].splitlines()[1:]
    rows = (line.split() for line in lines)
    return {words[0]: words for words in rows if words and words[0].isdigit()}


def test_a_sweep_runs_every_job_and_ends_with_a_table(tmp_path: Path) -> None:
    done, directory = sweep(
        tmp_path,
        "profile=ci",
        "parallel.data_parallel_size=1,2",
        "parallel.tensor_parallel_size=1,2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(table_rows(done.stdout)) == ["0", "1", "2", "3"]
    assert "4 jobs, 0 failed" in done.stdout
    shapes = []
    for job in range(4):
        report = json.loads((directory / str(job) / "report.json").read_text())
        assert report["status"] == "ok"
        assert report["verification"]["blocks_wrong"] == 0
        replicas: list[dict[str, Any]] = report["replicas"]
        shapes.append((len(replicas), len(replicas[0]["workers"])))
    assert shapes == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_bad_job_does_not_hide_the_others_and_is_named(tmp_path: Path) -> None:
    done, directory = sweep(
        tmp_path, "profile=ci", "parallel=dp1_tp1", "region.size=1KiB,16MiB"
    )
    assert done.returncode == 2, done.stdout + done.stderr
    rows = table_rows(done.stdout)
    assert "invalid_configuration" in rows["0"]
    assert "ok" in rows["1"]
    assert "2 jobs, 1 failed" in done.stdout
    reason = done.stdout[done.stdout.rindex("job 0 (invalid_configuration)") :]
    assert "region.size" in reason
    assert "1KiB" in reason
    assert json.loads((directory / "1" / "report.json").read_text())["status"] == "ok"


def test_an_interrupt_ends_the_whole_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    overrides = ("-m", f"hydra.sweep.dir={directory}", "profile=ci", "parallel=dp1_tp1")
    with Launch(tmp_path, *overrides, "workload.requests=500000,500001") as launch:
        launch.wait_in(directory / "0").wait_serving()
        since_s = time.monotonic()
        launch.signal(signal.SIGINT)
        assert launch.wait_end() == 128 + signal.SIGINT, launch.told()
        launch.assert_gone(since_s)
        assert "interrupted by SIGINT" in launch.err
        assert "1 jobs, 1 failed" in launch.out
        assert not (directory / "1").exists()
