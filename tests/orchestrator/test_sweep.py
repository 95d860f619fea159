"""Sweeps: what is compared, who stops whom, and launchers that run jobs in other processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import __version__
from orchestrator.job import Outcome
from orchestrator.launching import JobEntry
from orchestrator.sweep.compare import DIED, OBJECTIVES, JobResult, compare, mark_pareto
from orchestrator.sweep.record import NOT_RUN, Records
from orchestrator.sweep.resume import find_good
from orchestrator.sweep.sweep import Sweep
from tests.kit import REPO

SWEPT = (("a=1", "b=x", "c=0"), ("a=1", "b=y", "c=0"), ("a=2", "b=x", "c=0"))


def end(records: Records, home: Path, number: int, overrides: Sequence[str], status: int) -> None:
    run_dir = home / str(number)
    run_dir.mkdir()
    record = records.begin(number, f"r-{number}", run_dir, overrides)
    records.end(record, Outcome(status, None, "why" if status else "", log="the log"))


def test_failed_jobs_come_first_with_reason_and_log_then_those_that_never_ran(
    tmp_path: Path,
) -> None:
    records = Records(tmp_path, "s")
    end(records, tmp_path, 0, SWEPT[0], 0)
    end(records, tmp_path, 1, SWEPT[1], 1)
    found = compare(records.read(), SWEPT)
    assert [(job.number, job.status) for job in found.jobs] == [
        (1, "failed"),
        (2, NOT_RUN),
        (0, "ok"),
    ]
    assert (found.jobs[0].reason, found.jobs[0].log) == ("why", "the log")
    assert [(axis.key, axis.values) for axis in found.axes] == [
        ("a", ("1", "2")),
        ("b", ("x", "y")),
    ]
    assert found.common == ("c=0",)
    assert found.jobs[1].settings == {"a": "2", "b": "x"}


def test_a_job_whose_process_died_is_not_taken_for_one_that_ended(tmp_path: Path) -> None:
    records = Records(tmp_path, "s")
    records.begin(0, "r-0", tmp_path / "0", ("a=1",))
    (job,) = compare(records.read(), ()).jobs
    assert job.status == DIED
    assert "without a word" in job.reason
    assert job.log == str(tmp_path / "0")


def test_what_an_earlier_sweep_left_in_the_directory_is_not_of_this_one(tmp_path: Path) -> None:
    end(Records(tmp_path, "before"), tmp_path, 0, SWEPT[0], 1)
    Records(tmp_path, "before").stop(0)
    (tmp_path / ".jobs" / "9.json").write_text("{")
    now = Records(tmp_path, "now")
    assert now.read() == []
    assert now.stopped_by() is None


def result(number: int, **values: float | None) -> JobResult:
    return JobResult(number, "ok", {}, values=values)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=12))
def test_the_pareto_set_is_what_no_other_job_beats(points: list[tuple[int, ...]]) -> None:
    keys = [objective.key for objective in OBJECTIVES]
    jobs = [result(n, **dict(zip(keys, point, strict=True))) for n, point in enumerate(points)]
    mark_pareto(jobs)

    def beats(other: tuple[int, ...], mine: tuple[int, ...]) -> bool:
        better = [
            (b - a) if objective.larger else (a - b)
            for a, b, objective in zip(mine, other, OBJECTIVES, strict=True)
        ]
        return min(better) >= 0 and max(better) > 0

    for job, mine in zip(jobs, points, strict=True):
        assert job.pareto == (not any(beats(other, mine) for other in points))


def report(home: Path, name: str, **changed: Any) -> None:
    (home / name).mkdir(parents=True, exist_ok=True)
    good = {"plan_digest": "d", "status": "ok", "version": __version__}
    (home / name / "report.json").write_text(json.dumps(good | changed))


def test_only_a_good_report_of_the_same_plan_and_version_is_found(tmp_path: Path) -> None:
    sweep, run = tmp_path / "now", tmp_path / "now" / "0"
    report(tmp_path, "before/0", status="failed")
    report(tmp_path, "before/1", version="0.0")
    report(tmp_path, "before/2", plan_digest="e")
    report(tmp_path, "before/3", status="wrong_bytes")
    (tmp_path / "before/4").mkdir()
    (tmp_path / "before/4/report.json").write_text("[1")
    assert find_good(sweep, run, "d") is None
    report(tmp_path, "before/5")
    found = find_good(sweep, run, "d")
    assert found is not None
    assert found[0] == tmp_path / "before/5"


def test_what_goes_to_another_process_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
    sent = pickle.dumps(JobEntry("the-id", False))
    assert b"hunter2" not in sent
    there = pickle.loads(sent)
    assert pickle.dumps(there) == sent


def test_the_directory_is_settled_before_any_job_is_composed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHERE", "it's here")
    argv = ["-m", "a.b=1,2", "hydra.sweep.dir=x/${oc.env:WHERE}"]
    sweep = Sweep.asked_for(argv, "the-id")
    assert sweep is not None
    assert sweep.argv == ["-m", "a.b=1,2", r"hydra.sweep.dir='x/it\'s here'"]
    bare = Sweep.asked_for(["hydra.mode=MULTIRUN", "a.b=1,2"], "the-id")
    assert bare is not None
    assert bare.argv[-1] == "hydra.sweep.dir='multirun/the-id'"
    assert Sweep.asked_for(["region.size=1GiB"], "the-id") is None
    assert Sweep.asked_for(["-m", "--cfg", "job"], "the-id") is None


def sweep(directory: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "launch.py", "-m", f"hydra.sweep.dir={directory}"),
            *("action=plan", "view=quiet", *overrides),
        ],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def jobs(directory: Path) -> list[tuple[int, str]]:
    told = json.loads((directory / "sweep.json").read_text())["jobs"]
    return [(job["number"], job["status"]) for job in told]


@pytest.mark.multiproc
def test_after_a_failure_no_job_begins_where_that_is_asked_for(tmp_path: Path) -> None:
    axes = "parallel.tensor_parallel_size=1,3,2"
    done = sweep(tmp_path, axes, "sweep.on_failure=stop")
    assert done.returncode == 2, done.stderr
    assert jobs(tmp_path) == [(1, "invalid_configuration"), (2, NOT_RUN), (0, "ok")]
    assert "sweep.on_failure=stop, and job 1 had failed" in done.stdout
    assert not (tmp_path / "2" / "plan.json").exists()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("launcher", "sizes", "ended"),
    [
        ("joblib", "3,2", [(0, "invalid_configuration"), (1, "ok")]),
        ("submitit_local", "3", [(0, "invalid_configuration")]),
    ],
)
def test_jobs_in_other_processes_end_on_the_same_page(
    tmp_path: Path, launcher: str, sizes: str, ended: list[tuple[int, str]]
) -> None:
    typed = (f"parallel.tensor_parallel_size={sizes}", f"hydra/launcher={launcher}")
    done = sweep(tmp_path, *typed, AWS_SECRET_ACCESS_KEY="hunter2-secret")
    assert done.returncode == 2, done.stdout + done.stderr
    assert jobs(tmp_path) == ended
    assert "job 0 (invalid_configuration): 1 problem in the configuration" in done.stdout
    assert (tmp_path / "sweep.html").is_file()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
