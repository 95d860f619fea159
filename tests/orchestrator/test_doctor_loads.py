"""Latency by number of blocks: measured through tiers and by ranks, and what is left of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from backends.tier.filesystem.io import OsIo
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.writer import Writer, this_writer
from orchestrator.doctor import steps
from orchestrator.doctor.curve import make_curve, numbers_of_blocks
from orchestrator.doctor.host import machine_figures
from orchestrator.doctor.loads import measure_disk_loads
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import (
    FORMAT,
    Curve,
    Latency,
    MemoryFigures,
    ObjectFigures,
    Point,
    Result,
    Transfers,
)
from orchestrator.doctor.sample import Sample
from orchestrator.doctor.steps import measure_steps
from orchestrator.simulate.timing import Transfer, read_timing
from tests.orchestrator.doctor_kit import SECONDS, mounted, of, small_plan, stop

MIB = 1 << 20


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(small_plan(tmp_path_factory.mktemp("plan")))


def measure(
    sample: Sample, *paths: Path, notes: Notes | None = None, **settings: object
) -> tuple[Curve | None, Notes]:
    notes, names = notes or Notes(), tuple(map(str, paths))
    given = FilesystemSettings(names, 64 * MIB, free_reserve_bytes=0, **settings)  # type: ignore[arg-type]
    return measure_disk_loads(given, names, sample, notes, stop(), SECONDS), notes


def test_a_line_is_found_and_an_interruption_counts_for_little() -> None:
    records = [(n, 0.001 + n * 0.002) for n in (1, 2, 4, 8) for _ in range(9)]
    curve = make_curve([*records, (4, 5.0), (16, 0.1)])
    assert curve is not None
    assert [(point.blocks, point.count) for point in curve.points] == [
        *((1, 9), (2, 9), (4, 10), (8, 9))
    ]
    assert curve.points[2].p50 == pytest.approx(0.009)
    assert curve.points[2].mean == pytest.approx(1.3 * 0.009)
    exact = make_curve(records)
    assert exact is not None
    assert [exact.fixed_s, exact.per_block_s] == pytest.approx([0.001, 0.002])
    assert make_curve([(1, 0.5)]) is None


@pytest.mark.parametrize("times", [{1: 0.1, 2: 0.5}, {1: 0.3, 2: 0.1}, {3: 0.6}])
def test_no_latency_is_predicted_to_be_negative(times: dict[int, float]) -> None:
    curve = make_curve([record for record in times.items() for _ in range(2)])
    assert curve is not None
    assert min(curve.fixed_s, curve.per_block_s) >= 0


def test_sizes_double_as_far_as_there_are_blocks() -> None:
    assert numbers_of_blocks(1) == [1]
    assert numbers_of_blocks(12) == [1, 2, 4, 8]
    assert numbers_of_blocks(1000) == [1, 2, 4, 8, 16, 32]


def test_between_measured_sizes_latency_goes_straight_and_behind_them_on() -> None:
    points = tuple(Point(blocks=n, count=2, mean=s, p50=s) for n, s in ((1, 2.0), (2, 3.0), (4, 7)))
    curve = Curve(fixed_s=1.0, per_block_s=1.5, points=points)
    load = Transfer.of(curve)
    assert [load.seconds(n) for n in (0, 0.5, 1, 2, 3, 4, 6)] == [0, 2, 2, 3, 5, 7, 11]
    assert load.block_s == 2.0
    # Blocks of twice the size: their own part of the latency doubles.
    assert [Transfer.of(curve, 2.0).seconds(n) for n in (1, 2)] == [3.0, 5.0]
    late = Curve(fixed_s=1.0, per_block_s=1.5, points=points[1:])
    assert Transfer.of(late).seconds(1) == 2.5


def test_a_tier_is_measured_on_all_paths_and_nothing_is_left(
    sample: Sample, tmp_path: Path
) -> None:
    used = Place(str(tmp_path / "used"), this_writer(), OsIo(), flush_directories=False)
    used.open(make=True)
    before = sorted(tmp_path.rglob("*"))
    try:
        curve, notes = measure(sample, tmp_path / "used", tmp_path / "new")
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        used.close()
    assert curve is not None, notes.checks
    assert [point.blocks for point in curve.points][:2] == [1, 2]
    assert all(point.mean > 0 for point in curve.points)
    assert of(notes, "fs.loads").verdict == "ok"


def test_one_that_has_no_room_is_told_and_leaves_nothing(sample: Sample, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", f"size={sample.block_bytes // 2}") as disk:
        curve, notes = measure(sample, disk)
        assert curve is None
        assert of(notes, "fs.loads").verdict == "warn"
        assert "not measured: a store was " in of(notes, "fs.loads").found
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("step", ["storing", "loading"])
def test_one_that_is_stopped_takes_away_what_it_wrote(
    sample: Sample, tmp_path: Path, step: str
) -> None:
    asked = stop()
    notes = Notes("", lambda doing: asked.ask() if doing.startswith(step) else None)
    names = (str(tmp_path / "kv"),)
    given = FilesystemSettings(names, 64 * MIB)
    assert measure_disk_loads(given, names, sample, notes, asked, SECONDS) is None
    assert list(tmp_path.iterdir()) == []


def test_what_killed_doctors_left_goes_and_what_living_ones_use_stays(
    sample: Sample, tmp_path: Path
) -> None:
    own = this_writer()
    for writer in (own, Writer(own.host, 2**22 + 1, 1, 7)):
        leaf = tmp_path / "doctor" / writer.name / "ab" / "cd"
        leaf.mkdir(parents=True)
        (leaf / "block").write_bytes(b"x")
    measure(sample, tmp_path)
    assert [path.name for path in (tmp_path / "doctor").iterdir()] == [own.name]


def test_ranks_copy_together_and_end(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    children = psutil.Process().children()
    found = measure_steps(plan, stop(), SECONDS)
    assert found is not None
    assert found.workers == plan.topology.world_size
    assert found.load.points[0].blocks == 1
    assert found.load.points[0].count >= 2 * found.workers
    assert psutil.Process().children() == children


def test_a_rank_that_dies_is_no_figure_and_takes_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(steps, "follow", dying)
    children = psutil.Process().children()
    assert measure_steps(small_plan(tmp_path), stop(), SECONDS) is None
    assert psutil.Process().children() == children


def test_a_run_is_timed_by_the_curves_and_without_one_by_a_lone_block() -> None:
    curve = Curve(
        fixed_s=1.0, per_block_s=2.0, points=(Point(blocks=1, count=2, mean=3.0, p50=3.0),)
    )
    lone = Latency(p50=0.5, p99=0.5, mean=0.5)
    memory = MemoryFigures(
        chunk_bytes=64,
        kernel="numpy",
        threads=1,
        workers=1,
        load_bytes_per_s=128.0,
        load_latency_s=lone,
    )
    objects = ObjectFigures(
        url="file:/x",
        block_bytes=100,
        load_bytes_per_s=100.0,
        alone=Transfers(depth=1, load_latency_s=lone),
    )
    plain = read_timing(result(memory, objects), 100)
    assert plain.copied_s(3 * 64) == 0.5 + 2 * 0.5
    assert plain.tier("object").load.seconds(3) == 0.5 + 2 * 1.0
    curved = read_timing(
        result(
            replace(memory, load_curve=curve, step_chunk_bytes=32),
            replace(objects, load_curve=curve),
        ),
        200,
    )
    assert curved.copied_s(3 * 32) == 3.0 + 2 * 2.0
    assert curved.tier("object").load.seconds(3) == 1.0 + 3 * 2 * 2.0
    assert curved.timed == {"shm", "object"}


def result(memory: MemoryFigures, objects: ObjectFigures) -> Result:
    return Result(
        format=FORMAT,
        version="0",
        run_id="r",
        created_s=0.0,
        seconds=1.0,
        plan_digest="d",
        reproduce="",
        machine=machine_figures(),
        memory=memory,
        tiers=(objects,),
        checks=(),
    )
