"""Whatever ends a run, and whenever it does: nothing is left, and what happened is told.

Real launches, killed in the middle. The workload is far longer than any test, so a run that ends
has been ended. `region.persist_name` keeps the name of an shm region for the whole run, so that
there is something to leave behind at every moment.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from orchestrator.events import PHASES
from orchestrator.rundir import ReplicaDir
from orchestrator.spawn.agent import first_to_fail
from orchestrator.supervise import RunState, start_timeout
from tests.kit import plan_for
from tests.orchestrator.harness import Launch, ahead, launched, ran_ahead

__all__ = ["ran_ahead"]

pytestmark = pytest.mark.multiproc

BACKINGS = {"memfd": ("region=default",), "shm": ("region=shm", "region.persist_name=true")}


def wait_moment(launch: Launch, moment: str) -> None:
    """Until the zygote imports torch, the first workers have started, or all of them serve."""
    if moment == "importing":
        launch.wait_importing()
    elif moment == "serving":
        launch.wait_serving()
    else:
        launch.wait_phase("started", 0, 0)
        launch.wait_phase("started", 1, 1)


def victim_pid(launch: Launch, victim: str) -> int:
    """`parent`, `zygote`, `agent DP` or `worker DP RANK`."""
    name, *numbers = victim.split()
    if name == "parent":
        return launch.popen.pid
    if name == "zygote":
        pid = launch.zygote()
    elif name == "agent":
        pid = launch.agent(int(numbers[0]))
    else:
        pid = launch.worker(int(numbers[0]), int(numbers[1]))
    assert pid is not None
    return pid


@pytest.mark.parametrize(
    ("signum", "moment", "backing"),
    [
        (signal.SIGINT, "importing", "shm"),
        (signal.SIGTERM, "started", "shm"),
        (signal.SIGINT, "serving", "memfd"),
        (signal.SIGTERM, "serving", "shm"),
    ],
)
@ahead
def test_a_signal_to_the_launcher_ends_everything(
    home: Path, signum: signal.Signals, moment: str, backing: str
) -> None:
    with launched(home, *BACKINGS[backing]) as launch:
        wait_moment(launch, moment)
        since_s = time.monotonic()
        launch.signal(signum)
        assert launch.wait_end() == 128 + signum, launch.told()
        launch.assert_gone(since_s)
        report = launch.report()
        assert (report["status"], report["signal"]) == ("interrupted", signum.name)
        assert f"interrupted by {signum.name}" in launch.err


@ahead
def test_an_interrupt_ends_threads_of_the_launcher_too(home: Path) -> None:
    with launched(home, "spawn=inline", *BACKINGS["shm"]) as launch:
        launch.wait("progress", lambda: all(launch.reached("progress", n, 0) for n in (0, 1)))
        since_s = time.monotonic()
        launch.signal(signal.SIGINT)
        assert launch.wait_end() == 128 + signal.SIGINT, launch.told()
        launch.assert_gone(since_s)
        assert launch.report()["status"] == "interrupted"


@ahead
def test_a_launcher_under_nohup_survives_its_terminal(home: Path) -> None:
    with Launch(home, "profile=ci", through=("nohup",)) as launch:
        launch.wait_phase("started")
        launch.signal(signal.SIGHUP)
        assert launch.wait_end() == 0, launch.told()
        assert launch.report()["status"] == "ok"


@pytest.mark.parametrize(
    ("victim", "moment", "backing", "told"),
    [
        ("zygote", "importing", "memfd", "launcher process that holds all agents ended: killed by"),
        ("zygote", "serving", "shm", "launcher process that holds all agents ended: killed by"),
        ("agent 1", "started", "shm", "replica 1: its torchrun agent ended: killed by"),
        ("worker 1 1", "started", "shm", "replica 1, rank 1: killed by"),
        ("worker 1 0", "serving", "memfd", "replica 1, rank 0: killed by"),
        ("worker 0 1", "serving", "shm", "replica 0, rank 1: killed by"),
    ],
)
@ahead
def test_a_killed_child_ends_the_run_and_is_named(
    home: Path, victim: str, moment: str, backing: str, told: str
) -> None:
    with launched(home, *BACKINGS[backing]) as launch:
        wait_moment(launch, moment)
        since_s = time.monotonic()
        os.kill(victim_pid(launch, victim), signal.SIGKILL)
        assert launch.wait_end() == 1, launch.told()
        launch.assert_gone(since_s)
        report = launch.report()
        assert report["status"] == "failed"
        assert [failure["message"][-7:] for failure in report["failures"]] == ["SIGKILL"]
        assert f"{told} SIGKILL" in launch.err
        log = report["failures"][0]["log"]
        assert Path(log).is_file()
        assert f"log: {log}" in launch.err


@pytest.mark.parametrize(
    ("moment", "backing"), [("importing", "memfd"), ("started", "shm"), ("serving", "shm")]
)
@ahead
def test_a_killed_launcher_leaves_nothing(home: Path, moment: str, backing: str) -> None:
    with launched(home, *BACKINGS[backing]) as launch:
        wait_moment(launch, moment)
        since_s = time.monotonic()
        launch.signal(signal.SIGKILL)
        launch.assert_gone(since_s)


@pytest.mark.parametrize("victim", ["parent", "zygote"])
@ahead
def test_workers_that_still_import_torch_are_ended_as_well(home: Path, victim: str) -> None:
    """Started afresh and not forked, they have not yet asked to die with their agent. They are
    stopped here, so that they never will."""
    with launched(home, "parallel=dp1_tp2", "spawn.start_method=spawn") as launch:
        launch.wait("the spawned workers", lambda: len(launch.spawned()) == 2)
        for worker in launch.spawned():
            os.kill(worker, signal.SIGSTOP)
        pid = victim_pid(launch, victim)
        since_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        launch.assert_gone(since_s)


@pytest.mark.parametrize("seed", range(6))
@ahead
def test_nothing_is_left_whatever_happens_at_whatever_moment(home: Path, seed: int) -> None:
    draw = random.Random(seed)
    victim = draw.choice(["parent", "zygote", "agent 0", "worker 0 1", "worker 1 0"])
    signum = draw.choice([signal.SIGKILL, signal.SIGTERM])
    backing = draw.choice(list(BACKINGS))
    phase = draw.choice(PHASES[:4])
    delay_s = draw.uniform(0.0, 0.15)
    with launched(home, f"region.backing={backing}") as launch:
        launch.wait_phase(phase, 0, 0)
        launch.wait_phase("started", 0, 1)
        launch.wait_phase("started", 1, 0)
        time.sleep(delay_s)
        since_s = time.monotonic()
        os.kill(victim_pid(launch, victim), signum)
        launch.assert_gone(since_s)
        told = 1 if victim != "parent" else -signum if signum == signal.SIGKILL else 128 + signum
        assert launch.wait_end() == told, launch.told()


@ahead
def test_a_worker_that_raises_is_named_with_its_traceback(home: Path) -> None:
    with launched(home) as launch:
        launch.wait_importing()
        # Events are never written through a link.
        launch.run.replica(1).events(1).symlink_to(home / "elsewhere")
        assert launch.wait_end() == 1
        launch.assert_gone(time.monotonic())
        failure = launch.report()["failures"][0]
        assert (failure["replica"], failure["rank"]) == (1, 1)
        assert "replica 1, rank 1: OSError: [Errno 40]" in launch.err
        assert "Traceback (most recent call last)" in launch.err
        assert f"log: {launch.run.replica(1).stderr(1)}" in launch.err
        assert "OSError: [Errno 40]" in launch.run.replica(1).stderr(1).read_text()


@ahead
def test_a_plan_that_was_changed_under_way_is_refused_with_a_traceback(home: Path) -> None:
    with launched(home) as launch:
        launch.wait_importing()
        plan = launch.run.plan
        plan.write_text(plan.read_text().replace('"slot": 1', '"slot": 0'))
        assert launch.wait_end() == 1
        launch.assert_gone(time.monotonic())
        assert "its agent failed: PlanError" in launch.err
        assert "plan again instead of editing it" in launch.err
        assert "Traceback (most recent call last)" in launch.err


@ahead
def test_on_failure_continue_lets_the_other_replica_finish(home: Path) -> None:
    overrides = ("profile=ci", "workload.requests=1500", "spawn.on_failure=continue")
    with Launch(home, *overrides) as launch:
        os.kill(launch.wait_phase("ready", 1, 1), signal.SIGKILL)
        assert launch.wait_end() == 1, launch.told()
        launch.assert_gone(time.monotonic())
        report = launch.report()
        assert report["status"] == "failed"
        assert [replica["data_parallel_index"] for replica in report["replicas"]] == [0]
        assert report["replicas"][0]["requests"] > 0
        assert report["verification"]["blocks_wrong"] == 0
        assert "replica 1 has failed, the others go on" in launch.out
        assert "replica 1, rank 1: killed by SIGKILL" in launch.err


@ahead
def test_a_second_interrupt_kills_what_the_first_one_cannot_end(home: Path) -> None:
    with launched(home, "spawn.stop_timeout_s=100") as launch:
        launch.wait_serving()
        os.kill(launch.agent(0), signal.SIGSTOP)
        launch.signal(signal.SIGINT)
        launch.wait("the first interrupt", lambda: "stopping all workers" in launch.out)
        time.sleep(0.5)
        assert launch.popen.poll() is None, launch.told()
        since_s = time.monotonic()
        launch.signal(signal.SIGINT)
        assert launch.wait_end() == 128 + signal.SIGINT
        launch.assert_gone(since_s)


@ahead
def test_a_stopped_worker_is_named_when_start_up_takes_too_long(home: Path) -> None:
    for attempt, limit_s in enumerate((8, 30, 90)):
        timeout = f"spawn.start_timeout_s={limit_s}"
        with launched(home / str(attempt), timeout, *BACKINGS["shm"]) as launch:
            launch.wait("a worker or the deadline", lambda: launch.worker(1, 1) or launch.err)
            worker = launch.worker(1, 1)
            if worker is None:
                continue  # the machine was too busy to get that far
            os.kill(worker, signal.SIGSTOP)
            if launch.reached("ready", 1, 1):
                continue  # or to stop it in time
            assert launch.wait_end() == 1
            launch.assert_gone(time.monotonic())
            assert f"within spawn.start_timeout_s = {limit_s} s" in launch.err
            assert "replica 1 rank 1" in launch.err
            assert f"pid {worker} stopped" in launch.err
            assert launch.report()["status"] == "failed"
            return
    pytest.fail("no worker could be stopped before it was ready")


@ahead
def test_a_stopped_zygote_is_ended_at_the_deadline(home: Path) -> None:
    with launched(home, "spawn.start_timeout_s=3") as launch:
        os.kill(launch.wait_importing(), signal.SIGSTOP)
        assert launch.wait_end() == 1
        launch.assert_gone(time.monotonic())
        assert "4 of 4 workers are missing: replica 0 rank 0 (not started" in launch.err


@ahead
def test_a_hang_while_serving_ends_the_run_and_names_who_stands_still(home: Path) -> None:
    with launched(home, "spawn.group_timeout_s=6", *BACKINGS["shm"]) as launch:
        launch.wait_serving()
        worker = launch.worker(1, 1)
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        assert launch.wait_end(60) == 1
        launch.assert_gone(time.monotonic())
        failure = launch.report()["failures"][0]
        assert failure["replica"] == 1
        assert f"its peers wait for rank 1 (pid {worker}), which is stopped" in launch.err


@ahead
def test_a_worker_without_peers_that_stands_still_ends_the_run(home: Path) -> None:
    overrides = ("parallel=dp2_tp1", "spawn.group_timeout_s=1")
    with launched(home, *overrides) as launch:
        launch.wait_serving()
        worker = launch.worker(1, 0)
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        assert launch.wait_end(60) == 1
        launch.assert_gone(time.monotonic())
        assert "replica 1: nothing has moved for 6 s" in launch.err
        assert f"replica 1 rank 0 (ready, pid {worker} stopped)" in launch.err


def test_of_workers_that_ended_together_the_killed_one_failed_first(tmp_path: Path) -> None:
    directory = ReplicaDir(tmp_path)
    directory.error(0).write_text("{}")
    assert first_to_fail({0: 1, 2: -signal.SIGKILL, 3: 1}, directory) == 2


def test_of_workers_that_raised_the_first_to_write_its_error_failed_first(tmp_path: Path) -> None:
    directory = ReplicaDir(tmp_path)
    for rank, age_s in ((0, 1.0), (1, 1.5), (2, 0.5)):
        directory.error(rank).write_text("{}")
        os.utime(directory.error(rank), (1e9 - age_s, 1e9 - age_s))
    assert first_to_fail({0: 1, 1: 1, 2: 1, 3: 0}, directory) == 1


def test_a_replica_that_has_failed_is_not_waited_for_at_start_up(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "parallel=dp2_tp1")
    long_ago_s = time.monotonic() - 2 * plan.settings.spawn.start_timeout_s
    state = RunState({(0, 0): "progress", (1, 0): "started"}, started_s=long_ago_s)
    failure = start_timeout(plan, state)
    assert failure is not None
    assert "1 of 2 workers are missing: replica 1 rank 0 (started)" in str(failure)
    state.ended[1] = 1
    assert start_timeout(plan, state) is None
