"""What a doctor finds out about a directory of the filesystem tier, on real filesystems."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from backends.tier.filesystem.io import Io, OsIo
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.writer import Writer, this_writer
from orchestrator.doctor.blockfiles import BlockFiles
from orchestrator.doctor.disk import measure_path
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import PathFigures
from orchestrator.doctor.sample import Sample
from tests.orchestrator.doctor_kit import SECONDS, mounted, of, small_plan, stop, verdicts

MIB = 1 << 20


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(small_plan(tmp_path_factory.mktemp("plan")))


def measure(sample: Sample, path: Path, **settings: object) -> tuple[PathFigures, Notes]:
    given = {"capacity": MIB, "threads": 3, "free_reserve_bytes": 0, **settings}
    notes = Notes(str(path))
    found = measure_path(
        str(path),
        FilesystemSettings(paths=(str(path),), **given),  # type: ignore[arg-type]
        sample,
        notes,
        stop(),
        SECONDS,
    )
    return found, notes


def test_a_directory_is_measured_and_is_not_there_afterwards_if_it_was_not_before(
    sample: Sample, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "kv"
    found, notes = measure(sample, path)
    assert set(verdicts(notes).values()) <= {"ok", "warn"}
    assert found.depth == 3
    assert found.alone is not None
    for figures in (found, found.alone):
        assert figures.store_bytes_per_s
        assert figures.load_bytes_per_s
        for latency in (figures.store_latency_s, figures.load_latency_s):
            assert latency is not None
            assert 0 < latency.p50 <= latency.p99
    assert found.fsync_s
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_in_use_is_left_as_it_was(sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    place = Place(str(path), this_writer(), OsIo(), flush_directories=False)
    place.open(make=True)
    place.write_file(".", "usage", b"ledger")
    before = sorted(path.rglob("*"))
    try:
        _, notes = measure(sample, path)
        assert of(notes, "fs.space").verdict == "ok"
        assert sorted(path.rglob("*")) == before
        assert not place.needs_opening()
    finally:
        place.close()


def test_a_full_disk_is_found_and_explained(sample: Sample, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as disk:
        with open(disk / "others", "wb") as file:
            file.write(bytes(MIB - 8192))
        found, notes = measure(sample, disk)
        check = of(notes, "fs.space")
        assert check.verdict == "fail"
        assert "the disk is full: 8 KiB free of 1 MiB" in check.found
        assert "room for a block of" in check.expected
        assert "tiers.stack.fs.paths" in check.fix
        assert found.store_bytes_per_s is None
        assert [path.name for path in disk.iterdir()] == ["others"]


def test_a_filesystem_that_tells_no_size_is_of_no_use(sample: Sample, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ramfs", "mode=0700") as disk:
        _, notes = measure(sample, disk)
        check = of(notes, "fs.space")
        assert (check.verdict, check.found) == ("fail", "this filesystem does not tell its size")


def test_a_disk_without_inodes_is_as_good_as_full(sample: Sample, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=4m,nr_inodes=1") as disk:
        _, notes = measure(sample, disk)
        assert "no inode is free" in of(notes, "fs.space").found


def test_a_disk_smaller_than_the_capacity_is_told_with_a_capacity_that_fits(
    sample: Sample, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=16m") as disk:
        found, notes = measure(sample, disk, capacity=64 * MIB)
        check = of(notes, "fs.space")
        assert (check.verdict, found.free_bytes) == ("warn", 16 * MIB)
        assert "set tiers.stack.fs.capacity=16MiB or less" in check.fix
        assert of(notes, "fs.medium").verdict == "warn"
        assert found.load_bytes_per_s


def test_a_disk_that_fills_up_meanwhile_is_told_and_freed(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=2m") as disk:
        # As if others had taken what was free a moment ago.
        roomy = os.statvfs(tmp_path)
        monkeypatch.setattr("orchestrator.doctor.disk.os.statvfs", lambda _: roomy)
        _, notes = measure(sample, disk)
        check = of(notes, "fs.space")
        assert check.verdict == "fail"
        assert "ENOSPC" in check.found
        assert "while storing" in check.found
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize(("mode", "verdict"), [("auto", "warn"), ("on", "fail"), ("off", "ok")])
def test_a_path_without_o_direct_is_told_and_measured_through_the_page_cache(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, verdict: str
) -> None:
    # The one filesystem that every kernel has and that takes no O_DIRECT; it tells no size, though.
    roomy = os.statvfs(tmp_path)
    monkeypatch.setattr("orchestrator.doctor.disk.os.statvfs", lambda _: roomy)
    monkeypatch.setattr("orchestrator.doctor.disk._MOST_CACHED_BYTES", 4 * MIB)
    with mounted(tmp_path / "disk", "ramfs", "mode=0700") as disk:
        found, notes = measure(sample, disk, direct=mode)
        check = of(notes, "fs.o_direct")
        assert check.verdict == verdict, check
        assert "buffered" in check.found
        if mode != "off":
            assert "ramfs" in check.fix
        assert not found.o_direct
        assert found.store_bytes_per_s
        assert found.load_bytes_per_s


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_in_the_directorys_place_is_told(sample: Sample, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    _, notes = measure(sample, Path(f"{tmp_path}/file{below}"))
    check = of(notes, "fs.directory")
    assert check.verdict == "fail"
    assert "name a directory in tiers.stack.fs.paths" in check.fix
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_disk_is_told(sample: Sample, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=4m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        _, notes = measure(sample, disk)
        check = of(notes, "fs.directory")
        assert check.verdict == "fail"
        assert "EROFS" in check.found
        assert "mount it for writing" in check.fix


def test_what_a_doctor_left_that_was_killed_is_swept_and_a_living_one_is_not(
    sample: Sample, tmp_path: Path
) -> None:
    own = this_writer()
    dead = Writer(own.host, 2**22 + 1, 1, 7)
    for writer in (own, dead):
        directory = tmp_path / "writers" / writer.name
        directory.mkdir(parents=True)
        (directory / "3.kvb").write_bytes(b"block")
    _, notes = measure(sample, tmp_path)
    assert of(notes, "fs.leftovers").found == "removed 1 unfinished files of dead writers"
    assert [path.name for path in (tmp_path / "writers").iterdir()] == [own.name]


class _FlippingIo(OsIo):
    """A disk that gives back other bytes than it took."""

    def preadv(self, fd: int, buffers: list, offset: int) -> int:  # type: ignore[type-arg]
        got = super().preadv(fd, buffers, offset)
        memoryview(buffers[0])[got // 2] ^= 1
        return got


def test_bytes_that_come_back_changed_are_a_failure(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.doctor.disk.OsIo", _FlippingIo)
    _, notes = measure(sample, tmp_path, direct="off")
    check = of(notes, "fs.bytes")
    assert check.verdict == "fail"
    assert "damaged payload" in check.found


def test_no_two_blocks_share_a_page(sample: Sample, tmp_path: Path) -> None:
    io: Io = OsIo()
    place = Place(str(tmp_path), this_writer(), io, flush_directories=False)
    place.open(make=False)
    try:
        files = BlockFiles(place, sample, False, "full")
        files.store(0)
        files.store(1)
        one, other = (
            (tmp_path / "writers" / place.writer.name / f"{number}.kvb").read_bytes()
            for number in (0, 1)
        )
    finally:
        place.empty_writer(place.writer)
        place.close()
    assert len(one) == len(other) == sample.block_bytes
    pages = range(0, len(one), 4096)
    assert all(one[at : at + 4096] != other[at : at + 4096] for at in pages)
