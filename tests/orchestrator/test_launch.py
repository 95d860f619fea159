"""What a user starts works as typed: beside other runs, on devices that lie, by hand, in sweeps."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from backends.errors import ConfigError
from orchestrator.rundir import RunDir
from orchestrator.spawn.agent import visible_devices
from tests.kit import REPO, plan_for
from tests.orchestrator.harness import (
    Launch,
    ahead,
    assert_right,
    assert_verified,
    launched,
    model_hit_tokens,
    ran_ahead,
    run_launch,
)

__all__ = ["ran_ahead"]

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


@ahead
def test_what_a_leader_prints_is_on_the_console_and_every_rank_has_a_file(home: Path) -> None:
    run = run_launch(home, environment={"TORCH_CPP_LOG_LEVEL": "INFO"})
    assert_verified(run)
    for replica in (0, 1):
        directory = run.run.replica(replica)
        for rank in (0, 1):
            assert directory.stdout(rank).is_file()
            assert directory.stderr(rank).read_text()
        for line in directory.stderr(0).read_text().splitlines():
            assert f"[dp{replica}] {line.split()[0]}" in run.out
            # What is written in pieces may come in pieces, with others' between them.
            at = 0
            for word in line.split():
                at = run.out.find(word, at)
                assert at >= 0, f"{word!r} of {line!r} is not on the console"
        assert directory.stderr(1).read_text().splitlines()[0] not in run.out


@ahead
def test_runs_side_by_side_do_not_meet(home: Path) -> None:
    """Four at once, two of each backing, two replicas each."""
    backings = ("region=default", "region=shm") * 2
    runs = [Launch(home / str(n), "profile=ci", b) for n, b in enumerate(backings)]
    try:
        for run in runs:
            run.wait_end()
        for run in runs:
            assert_verified(run)
        assert len({run.run_id for run in runs}) == len(runs)
    finally:
        for run in runs:
            run.__exit__()


@pytest.mark.parametrize(("devices", "virtual"), [([0, 2, 4, 6], "true"), ([3, 2, 1, 0], "false")])
@ahead
def test_slots_come_from_the_group_whatever_devices_and_environment_say(
    home: Path, devices: list[int], virtual: str
) -> None:
    ordinals = json.dumps(devices, separators=(",", ":"))
    options = (f"spawn.devices={ordinals}", f"spawn.virtual_local_rank={virtual}")
    run = run_launch(home, *options, environment=GARBAGE)
    assert_verified(run)
    planned = json.loads(run.run.plan.read_text())["replicas"]
    assert [w["device_index"] for r in planned for w in r["workers"]] == devices
    assert [w["slot"] for r in planned for w in r["workers"]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("device", "inherited", "visible"),
    [("cuda", None, "3,2"), ("cuda", "8, 7,6,5", "5,6"), ("cpu", "garbage", "3,2")],
)
def test_a_worker_that_sees_one_device_sees_that_of_its_replica(
    tmp_path: Path, device: str, inherited: str | None, visible: str
) -> None:
    plan = plan_for(tmp_path, "profile=ci", "spawn.devices=[1,0,3,2]")
    workers = tuple(replace(worker, device=device) for worker in plan.replicas[1].workers)
    assert visible_devices(replace(plan.replicas[1], workers=workers), inherited) == visible


def test_a_device_that_the_launcher_does_not_see_is_refused(tmp_path: Path) -> None:
    replica = plan_for(tmp_path, "profile=ci").replicas[1]
    workers = tuple(replace(worker, device="cuda") for worker in replica.workers)
    with pytest.raises(ConfigError, match=r"devices \[2, 3\].*CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        visible_devices(replace(replica, workers=workers), "4,5")


@ahead
def test_spawned_workers_do_what_forked_ones_do(home: Path) -> None:
    assert_verified(run_launch(home, "parallel=dp1_tp2", "spawn.start_method=spawn"))


@ahead
def test_threads_of_one_process_do_what_processes_do(home: Path) -> None:
    assert_verified(run_launch(home, "spawn=inline", "region=shm"))


@ahead
def test_the_planned_command_of_a_replica_works_by_hand(home: Path) -> None:
    plan = plan_for(home, "profile=ci")
    elsewhere = home / "elsewhere"
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
    result = json.loads(RunDir(home).replica(1).result.read_text())
    assert [worker["slot"] for worker in result["workers"]] == [0, 1]
    stats = result["stats"]
    hits = {"device": stats["hit_tokens_device"], "shm": stats["hit_tokens_shm"]}
    assert hits == model_hit_tokens(plan, 1)
    assert list(elsewhere.iterdir()) == []


@ahead
def test_a_run_directory_that_was_used_before_tells_of_the_new_run_alone(home: Path) -> None:
    """The events, results and failures of the first run must not be taken for the second's."""
    with launched(home / "first") as first:
        os.kill(first.wait_phase("ready", 1, 1), signal.SIGKILL)
        first.wait_end()
    assert first.run.replica(1).failure.exists()
    assert_verified(run_launch(home / "second", run_dir=first.run.path))
    assert not first.run.replica(1).failure.exists()


def sweep(home: Path, *overrides: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    directory = home / "sweep"
    command = [sys.executable, "launch.py", "-m", f"hydra.sweep.dir={directory}", *overrides]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=250)
    return done, directory


def table_rows(out: str) -> dict[str, str]:
    """First lines of the last table's rows, by job number; a narrow console folds the rest."""
    lines = out[out.rindex("\njob  ") :].split("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line for line in lines if line[:1].isdigit()}


@ahead
def test_a_sweep_runs_every_job_and_ends_with_a_table(home: Path) -> None:
    axes = ("parallel.data_parallel_size=1,2", "parallel.tensor_parallel_size=1,2")
    done, directory = sweep(home, "profile=ci", *axes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(table_rows(done.stdout)) == ["0", "1", "2", "3"]
    assert "4 jobs, 0 failed" in done.stdout
    shapes = []
    for job in range(4):
        run = RunDir(directory / str(job))
        assert_right(run)
        replicas = json.loads(run.report.read_text())["replicas"]
        shapes.append((len(replicas), len(replicas[0]["workers"])))
    assert shapes == [(1, 1), (1, 2), (2, 1), (2, 2)]


@ahead
def test_an_interrupt_ends_the_whole_sweep(home: Path) -> None:
    directory = home / "sweep"
    overrides = ("profile=ci", "parallel=dp1_tp1", "workload.requests=500000,500001")
    sweeping = ("-m", f"hydra.sweep.dir={directory}")
    with Launch(home, *sweeping, *overrides, run_dir=directory / "0") as launch:
        launch.wait_serving()
        since_s = time.monotonic()
        launch.signal(signal.SIGINT)
        assert launch.wait_end() == 128 + signal.SIGINT, launch.told()
        launch.assert_gone(since_s)
        assert "interrupted by SIGINT" in launch.err
        assert "2 jobs, 2 failed" in launch.out
        assert "job 1 (not run)" in launch.out
        assert not (directory / "1").exists()


@ahead
def test_a_sweep_outlives_the_process_it_keeps_and_nothing_outlives_the_sweep(home: Path) -> None:
    """The kept process dies in the first job, the second has a new one and goes well, and in the
    third the launcher itself is killed."""
    directory = home / "sweep"
    overrides = ("profile=ci", "parallel=dp1_tp1", "workload.requests=500000,40,500001")
    sweeping = ("-m", f"hydra.sweep.dir={directory}")
    with Launch(home, *sweeping, *overrides, run_dir=directory / "0") as launch:
        launch.wait_serving()
        kept = launch.zygote()
        assert kept is not None
        os.kill(kept, signal.SIGKILL)
        launch.wait("the second job's end", (directory / "1" / "report.html").exists)
        assert_right(RunDir(directory / "1"))
        launch.run = RunDir(directory / "2")
        launch.wait_serving()
        again = launch.zygote()
        assert again not in (None, kept)
        since_s = time.monotonic()
        launch.signal(signal.SIGKILL)
        launch.assert_gone(since_s)
    failed = json.loads((directory / "0" / "report.json").read_text())
    assert failed["status"] == "failed"
    assert "the launcher process that holds all agents ended" in failed["failures"][0]["message"]
