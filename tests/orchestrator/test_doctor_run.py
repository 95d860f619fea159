"""`action=doctor` as a whole: verdicts and exit status, time limits, signals, what is left."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from backends import machine
from backends.errors import RegionError
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.object.settings import ObjectSettings
from orchestrator.doctor import action
from orchestrator.doctor.action import doctor
from orchestrator.doctor.bounded import Bounds, Interrupted, NoAnswer, Stop
from orchestrator.doctor.disk import measure_path
from orchestrator.doctor.drive import drive, latency
from orchestrator.doctor.memory import measure_memory
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.objects import measure_store
from orchestrator.doctor.result import (
    DoctorError,
    FsFigures,
    Latency,
    ObjectFigures,
    PathFigures,
    Result,
    read_result,
)
from orchestrator.doctor.sample import Sample
from orchestrator.job import Job, Outcome
from orchestrator.plan import Plan
from tests.kit import REPO
from tests.orchestrator.doctor_kit import of, small_plan
from tests.orchestrator.harness import Launch

QUICK_S = 0.03


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMORY_S", "STORE_S", "DISKS_S", "LOADS_S"):
        monkeypatch.setattr(action, name, QUICK_S)


def tiers(home: Path) -> dict[str, Any]:
    return {
        "tiers__order": ["shm", "fs", "object"],
        "tiers__stack__fs__paths": [str(home / "disk"), str(home / "more")],
        "tiers__stack__object__url": f"file://{home}/objects",
    }


def run(plan: Plan, width: int = 100, **environment: str) -> tuple[Outcome, str]:
    said = io.StringIO()
    console = Console(file=said, width=width)
    job = Job(plan.run.run_id, Path(plan.run.run_dir), ("action=doctor",), environment)
    return doctor(plan, job, console, console), said.getvalue()


def test_a_sound_machine_has_figures_of_everything_and_exit_status_0(
    tmp_path: Path, quick: None
) -> None:
    plan = small_plan(tmp_path / "run", **tiers(tmp_path))
    outcome, said = run(plan)
    found = read_result(tmp_path / "run")
    assert outcome.exit_status == 0, said
    assert found.verdict in ("ok", "warn")
    assert (found.run_id, found.plan_digest) == (plan.run.run_id, plan.digest)
    assert found.reproduce == "python launch.py action=doctor"
    assert found.memory is not None
    assert found.memory.copy_bytes_per_s
    assert found.memory.together_bytes_per_s
    assert found.memory.workers == 4
    assert found.memory.step_workers == 2
    assert found.memory.load_curve is not None
    fs, objects = found.tiers
    assert isinstance(fs, FsFigures)
    assert isinstance(objects, ObjectFigures)
    assert [path.path for path in fs.paths] == plan.settings.tiers.stack.fs.paths
    for curve in (fs.load_curve, objects.load_curve):
        assert curve is not None
        assert [point.blocks for point in curve.points][:3] == [1, 2, 4]
    assert fs.block_bytes == objects.block_bytes == plan.region.row_bytes
    names = {check.name for check in found.checks}
    assert {"memory.copy", "rendezvous", "fs.bandwidth", "object.latency"} <= names
    for check in found.checks:
        assert check.name in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    plain = json.loads((tmp_path / "run" / "doctor.json").read_text())
    assert [tier["name"] for tier in plain["tiers"]] == ["fs", "object"]
    assert set(plain["tiers"][0]["paths"][0]["store_latency_s"]) == {"p50", "p99", "mean"}


def test_whatever_is_wrong_is_told_together_with_fixes_and_exit_status_1(
    tmp_path: Path, quick: None
) -> None:
    (tmp_path / "more").write_text("a file")
    plan = small_plan(tmp_path / "run", **tiers(tmp_path), engine__device="cuda")
    outcome, said = run(plan, width=80)
    found = read_result(tmp_path / "run")
    wrong = [check for check in found.checks if check.verdict == "fail"]
    assert outcome.exit_status == 1
    # The device is told once, by the probe that wanted it, and not by the configuration again.
    assert sorted(check.name for check in wrong) == ["fs.directory", "memory.copy"]
    for check in wrong:
        assert check.fix
        assert check.fix in said
    assert found.memory is None
    assert said.index("to mend") < said.index("1. fail")
    assert said.count("2 fail") == 1


def test_what_a_run_would_be_refused_for_and_no_probe_saw_is_told(
    tmp_path: Path, quick: None
) -> None:
    plan = small_plan(tmp_path / "run", spawn__check_machine=False, engine__device_cache_size="9TB")
    outcome, _ = run(plan)
    [wrong] = [check for check in read_result(tmp_path / "run").checks if check.verdict == "fail"]
    assert outcome.exit_status == 1
    assert wrong.name == "engine.device_cache_size"
    assert "this node needs" in wrong.found


def test_a_disk_that_hangs_is_a_verdict_and_the_others_have_their_turn(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def hanging(path: str, settings: Any, sample: Any, notes: Notes, *_: Any) -> PathFigures:
        if path.endswith("more"):
            return PathFigures(path=path, o_direct=True)
        notes.doing("asking for free space")
        os.open(fifo, os.O_RDONLY)  # for ever, as a mount does whose server is gone
        raise AssertionError

    monkeypatch.setattr(action, "measure_path", hanging)
    monkeypatch.setattr(action, "FS_LIMIT_S", 0.0)
    monkeypatch.setattr(action, "Bounds", lambda limit_s: Bounds(limit_s, grace_s=0.1))
    try:
        outcome, _ = run(small_plan(tmp_path / "run", **tiers(tmp_path)))
    finally:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    found = read_result(tmp_path / "run")
    [wrong] = [check for check in found.checks if check.verdict == "fail"]
    assert outcome.exit_status == 1
    assert (wrong.name, wrong.where) == ("fs.answer", str(tmp_path / "disk"))
    assert "no answer while asking for free space" in wrong.found
    assert "network filesystem that hangs" in wrong.fix
    fs = found.tiers[0]
    assert isinstance(fs, FsFigures)
    assert [path.o_direct for path in fs.paths] == [False, True]


def test_a_probe_that_cannot_go_on_is_a_verdict_with_what_it_was_doing(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(plan: Plan, notes: Notes) -> None:
        notes.doing("looking at memory")
        raise RegionError("there is none; add some")

    monkeypatch.setattr(action, "check_host", failing)
    outcome, _ = run(small_plan(tmp_path / "run"))
    [wrong] = [check for check in read_result(tmp_path / "run").checks if check.verdict == "fail"]
    assert outcome.exit_status == 1
    assert (wrong.name, wrong.fix) == ("machine.error", "add some")
    assert wrong.found == "there is none, while looking at memory"


def test_large_blocks_are_measured_as_many_at_a_time_as_there_is_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(small_plan(tmp_path))
    for blocks, depth in ((0, 1), (3, 3), (100, 8)):
        available = 4 * blocks * sample.block_bytes
        monkeypatch.setattr(machine, "memory_available_bytes", lambda nbytes=available: nbytes)
        assert sample.depth(8) == depth


def test_a_chunk_too_large_for_memory_is_not_copied(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 4096)
    assert measure_memory(small_plan(tmp_path), notes, Stop(10), QUICK_S) is None
    assert of(notes, "memory.copy").verdict == "warn"


def test_no_secret_of_the_environment_is_written_or_shown(tmp_path: Path, quick: None) -> None:
    secret = "s3cr3tMARKER"
    plan = small_plan(
        tmp_path / "run",
        tiers__order=["shm", "object"],
        tiers__stack__object__url="s3://bucket/p",
        tiers__stack__object__endpoint="http://127.0.0.1:1",
        tiers__stack__object__allow_http=True,
    )
    outcome, said = run(plan, AWS_ACCESS_KEY_ID="AKIA", AWS_SECRET_ACCESS_KEY=secret)
    assert outcome.exit_status == 1
    assert secret not in said
    assert secret not in (tmp_path / "run" / "doctor.json").read_text()


class TestBounds:
    def test_a_probe_that_hears_ends_with_what_it_has(self) -> None:
        def probe(stop: Stop) -> str:
            while not stop.asked():
                time.sleep(0.001)
            return "half"

        assert Bounds(60.0).run(probe, 0.05) == "half"

    def test_one_that_does_not_is_left_behind(self) -> None:
        hanging = threading.Event()
        with pytest.raises(NoAnswer):
            Bounds(60.0, grace_s=0.05).run(lambda stop: hanging.wait(), 0.05)
        hanging.set()

    def test_all_probes_together_have_a_limit(self) -> None:
        bounds, seen = Bounds(0.0, grace_s=1.0), list[float]()
        bounds.run(lambda stop: seen.append(stop.remaining_s()), 30.0)
        assert seen == [0.0]

    def test_an_error_is_passed_on(self) -> None:
        def probe(stop: Stop) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            Bounds(60.0).run(probe, 1.0)

    def test_a_signal_ends_a_probe_and_handlers_are_put_back(self) -> None:
        bounds, before = Bounds(60.0), signal.getsignal(signal.SIGTERM)
        cleaned = threading.Event()

        def probe(stop: Stop) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.asked():
                time.sleep(0.001)
            cleaned.set()

        with bounds.signals(), pytest.raises(Interrupted) as caught:
            bounds.run(probe, 30.0)
        assert caught.value.signum == signal.SIGTERM
        assert cleaned.is_set()
        assert signal.getsignal(signal.SIGTERM) is before


def test_calls_are_made_in_order_and_side_by_side() -> None:
    both, numbers = threading.Barrier(2, timeout=20), list[int]()

    def call(number: int) -> None:
        numbers.append(number)
        both.wait()

    found = drive(call, depth=2, most=6, seconds=60, nbytes=10, stop=Stop(60))
    assert found is not None
    assert (found.count, sorted(numbers)) == (6, list(range(6)))
    assert drive(call, depth=2, most=6, seconds=60, nbytes=10, stop=Stop(0)) is None
    assert drive(numbers.append, depth=2, most=6, seconds=0, nbytes=1, stop=Stop(60)).count == 1  # type: ignore[union-attr]


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert latency([4.0, 1.0, 3.0, 2.0]) == Latency(p50=2.0, p99=4.0, mean=2.5)
    assert latency([7.0]) == Latency(p50=7.0, p99=7.0, mean=7.0)


def test_a_file_that_is_no_doctors_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match=r"cannot be read.*action=doctor"):
        read_result(tmp_path)
    (tmp_path / "doctor.json").write_text('{"format": 99}')
    with pytest.raises(DoctorError, match="has format 99, expected 2"):
        read_result(tmp_path / "doctor.json")
    (tmp_path / "doctor.json").write_text('{"format": 2}')
    with pytest.raises(DoctorError, match=r"is not a doctor\.json"):
        read_result(tmp_path)


def test_figures_of_a_later_version_do_not_make_a_file_unreadable() -> None:
    fs = {"name": "fs", "block_bytes": 1, "paths": [], "new": 2}
    assert msgspec.convert(fs, FsFigures) == FsFigures(block_bytes=1)
    assert Result.__struct_fields__[0] == "format"


@pytest.mark.parametrize("kind", ["disk", "objects"])
@pytest.mark.parametrize("step", ["storing 3", "loading 3"])
def test_one_that_is_stopped_in_the_middle_takes_away_what_it_wrote(
    tmp_path: Path, kind: str, step: str
) -> None:
    place, stop, seen = tmp_path / kind, Stop(60), list[int]()

    def tell(doing: str) -> None:
        if doing.startswith(step):
            seen.append(len(files(place, "[0-9]*")))
            stop.ask()

    sample, notes = Sample(small_plan(tmp_path / "run")), Notes(str(place), tell)
    if kind == "disk":
        disk = FilesystemSettings(paths=(str(place),), capacity=1 << 20, threads=3)
        measure_path(str(place), disk, sample, notes, stop, QUICK_S)
    else:
        store = ObjectSettings(f"file:{place}", concurrency=3)
        measure_store(store, "", {}, sample, notes, stop, QUICK_S, QUICK_S)
    assert seen
    assert seen[0] > 0
    assert not place.exists()


KILLED = """
import sys
from pathlib import Path
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.object.settings import ObjectSettings
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.disk import measure_path
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.objects import measure_store
from orchestrator.doctor.sample import Sample
from orchestrator.plan import read_plan
sample, where, notes = Sample(read_plan(Path(sys.argv[1]))), sys.argv[3], Notes()
if sys.argv[2] == "disk":
    settings = FilesystemSettings(paths=(where,), capacity=1 << 20)
    measure_path(where, settings, sample, notes, Stop(60), 60)
else:
    measure_store(ObjectSettings("file:" + where), "", {}, sample, notes, Stop(60), 60, 60)
"""


@pytest.mark.multiproc
def test_what_one_leaves_that_is_killed_goes_at_the_next_start(tmp_path: Path, quick: None) -> None:
    plan = small_plan(tmp_path / "run", **tiers(tmp_path))
    places = {"disk": tmp_path / "disk", "objects": tmp_path / "objects"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, f"{plan.run.run_dir}/plan.json", kind, str(place)],
            cwd=REPO,
        )
        for kind, place in places.items()
    ]
    try:
        until_s = time.monotonic() + 60
        while not all(any(files(place, "[0-9]*")) for place in places.values()):
            assert time.monotonic() < until_s, "nothing is ever written"
            assert all(child.poll() is None for child in children)
            time.sleep(0.005)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert all(files(place) for place in places.values())
    outcome, said = run(plan)
    assert outcome.exit_status == 0, said
    assert "unfinished files of dead writers" in said
    assert "objects of doctors that were killed" in said
    assert not any(files(place) for place in places.values())


def files(place: Path, pattern: str = "*") -> list[Path]:
    return [path for path in place.rglob(pattern) if path.is_file()]


@pytest.mark.multiproc
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    overrides = ("action=doctor", "profile=ci", "tiers=shm_fs", f"tiers.stack.fs.paths=[{disk}]")
    with Launch(tmp_path / "home", *overrides) as launch:
        launch.wait("blocks on the disk", lambda: files(disk, "*.kvb"))
        launch.signal(signal.SIGINT)
        since_s = time.monotonic()
        assert launch.wait_end() == 130, launch.told()
        launch.assert_gone(since_s, within_s=10)
    assert "interrupted by SIGINT" in launch.err
    assert not (launch.run.path / "doctor.json").exists()
    assert not disk.exists()
