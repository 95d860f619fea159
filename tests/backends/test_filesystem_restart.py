"""A new start on an old directory: what is known again, how soon, and what the dead have left."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filesystem_kit import (
    ROW_BYTES,
    Bench,
    Faults,
    HookedIo,
    assert_counted_right,
    block_files,
    leftovers,
    make_settings,
)

from backends.testing import FINGERPRINT, make_keys
from backends.tier.base import Lookup, Outcome
from backends.tier.filesystem import naming
from backends.tier.filesystem.snapshot import pack, unpack
from backends.tier.index import Columns, Index

DONE, MISSING = Outcome.DONE, Outcome.MISSING
KEYS = make_keys("before", 12)
NEW = make_keys("since", 4)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Twelve blocks, and a snapshot that knows them."""
    disk = tmp_path / "disk"
    with Bench(make_settings(disk)) as bench:
        assert bench.store(KEYS) == [DONE] * 12
    assert snapshot_of(disk).exists()
    return disk


def snapshot_of(disk: Path) -> Path:
    return disk / FINGERPRINT.hex() / naming.SNAPSHOT


@contextmanager
def without_scan(disk: Path, **changes: object) -> Iterator[Bench]:
    """A tier that gets no directory to read until it is closed, but all else."""
    go_on = threading.Event()

    def hook(name: str) -> None:
        if name == "scandir" and threading.current_thread().name.startswith("kvquay-fs-keeper"):
            go_on.wait()

    bench = Bench(make_settings(disk, **changes), io=HookedIo(hook))
    try:
        yield bench
        assert not bench.fs.wait_until_known(0.0, scanned=True)
    finally:
        go_on.set()
        bench.close()


def test_a_snapshot_tells_all_blocks_before_any_directory_is_read(disk: Path) -> None:
    with without_scan(disk) as bench:
        assert bench.fs.wait_until_known(bench.patience_s)
        assert bench.tier.lookup(KEYS) == [Lookup.HIT] * 12
        assert bench.count("probes") == 0
        assert bench.load(KEYS) == [DONE] * 12


def test_without_a_snapshot_lookups_find_blocks_before_the_scan_does(disk: Path) -> None:
    snapshot_of(disk).unlink()
    with without_scan(disk) as bench:
        assert bench.lookup([*KEYS, *NEW]) == [Lookup.HIT] * 12 + [Lookup.MISS] * 4
        assert bench.load(KEYS) == [DONE] * 12
        # What is there was counted by those before, so stores need not wait either.
        assert bench.store(NEW) == [DONE] * 4


def test_the_scan_finds_all_blocks_without_a_snapshot(disk: Path) -> None:
    snapshot_of(disk).unlink()
    with Bench(make_settings(disk)).ready() as bench:
        assert bench.tier.lookup(KEYS) == [Lookup.HIT] * 12
        assert bench.count("probes") == 0


def replaced_by(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(data(file.read_bytes())), None)[1]


def made_anew(make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda file: (file.unlink(), make(file), None)[2]


def of_others(_: bytes) -> bytes:
    """A right snapshot of blocks that are not here."""
    index = Index()
    space = naming.Namespace("another")
    for key in make_keys("elsewhere", 20):
        index.add(space.block_id(key), key, 0, 0, 1)
    return pack(index.columns(0, 0))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("calls", ["mkdir", "create", "pwritev"])
def test_on_a_disk_that_takes_nothing_it_starts_and_loads(
    disk: Path, calls: str, number: int
) -> None:
    faults = Faults()

    class Hook(HookedIo):
        def open(self, directory: int, name: str, flags: int) -> int:
            if flags & os.O_CREAT:
                self._hook("create")
            return super().open(directory, name, flags)

    faults.fail(calls, number)
    with Bench(make_settings(disk, retry_s=0.05, retry_most_s=0.1), io=Hook(faults)) as bench:
        assert bench.lookup(KEYS) == [Lookup.HIT] * 12
        assert bench.load(KEYS) == [DONE] * 12
        assert bench.store(NEW) == [Outcome.SHED] * 4
        assert "no stores" in bench.fs.describe()[0]
        faults.end()
        bench.until(lambda: bench.store(NEW) == [DONE] * 4, "stores do not begin")
        assert bench.load(NEW) == [DONE] * 4
        assert_counted_right(bench, disk)


SNAPSHOTS: dict[str, Callable[[Path], None]] = {
    "empty": replaced_by(lambda b: b""),
    "cut off": replaced_by(lambda b: b[:-1]),
    "cut off in the header": replaced_by(lambda b: b[:20]),
    "longer": replaced_by(lambda b: b + b"x"),
    "a flipped bit": replaced_by(lambda b: b[:50] + bytes([b[50] ^ 1]) + b[51:]),
    "another version": replaced_by(lambda b: b[:8] + struct.pack("<I", 9) + b[12:]),
    "a count without end": replaced_by(lambda b: b[:16] + struct.pack("<Q", 2**60) + b[24:]),
    "anything": replaced_by(lambda b: os.urandom(len(b))),
    "another tier's": replaced_by(of_others),
    "a directory": made_anew(lambda file: file.mkdir()),
    "a link": made_anew(lambda file: file.symlink_to("/etc/hostname")),
    "a fifo": made_anew(lambda file: os.mkfifo(file)),
}


@pytest.mark.parametrize("what", SNAPSHOTS)
def test_a_snapshot_that_is_wrong_does_no_harm(disk: Path, what: str) -> None:
    SNAPSHOTS[what](snapshot_of(disk))
    with Bench(make_settings(disk, capacity=12 * ROW_BYTES)).ready() as bench:
        assert bench.tier.lookup(KEYS) == [Lookup.HIT] * 12
        assert bench.load(KEYS) == [DONE] * 12
        # Blocks that only a snapshot knows are not evicted in the place of real ones.
        assert bench.store(NEW) == [DONE] * 4
        assert "no stores" not in bench.fs.describe()[0]
        assert bench.fs.usage().blocks == len(block_files(disk)) == 12
        assert_counted_right(bench, disk)
    with Bench(make_settings(disk)).ready() as again:
        assert again.load(NEW) == [DONE] * 4


def test_a_snapshot_that_is_out_of_date_costs_a_miss_and_a_probe(disk: Path) -> None:
    before = snapshot_of(disk).read_bytes()
    with Bench(make_settings(disk)) as bench:
        assert bench.store(NEW) == [DONE] * 4
    for file in block_files(disk):
        if naming.parse_block_name(file.name) in KEYS[:3]:
            file.unlink()
    snapshot_of(disk).write_bytes(before)
    with without_scan(disk) as bench:
        assert bench.fs.wait_until_known(bench.patience_s)
        assert bench.load(KEYS) == [MISSING] * 3 + [DONE] * 9
        assert bench.lookup(KEYS[:3]) == [Lookup.MISS] * 3
        assert bench.lookup(NEW) == [Lookup.HIT] * 4


def test_snapshots_are_made_meanwhile_too_so_that_a_killed_process_has_one(disk: Path) -> None:
    snapshot_of(disk).unlink()
    with Bench(make_settings(disk, snapshot_interval_s=0.05)).ready() as bench:
        bench.until(snapshot_of(disk).exists, "no snapshot is made")
        columns = unpack(snapshot_of(disk).read_bytes())
        assert isinstance(columns, Columns)
        assert columns.ids.size == 12


WRITING_FOR_EVER = """
import sys, threading
sys.path[:0] = sys.argv[2:]
from filesystem_kit import Bench, HookedIo, make_settings
from backends.testing import make_keys
def hook(name):
    if name == "utime":
        print("writing", flush=True)
        threading.Event().wait()
bench = Bench(make_settings(sys.argv[1], threads=2), io=HookedIo(hook))
bench.store(make_keys("unfinished", 1))
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("ledger_is_lost", [False, True])
def test_unfinished_files_are_swept_when_their_writer_is_dead_and_not_before(
    disk: Path, ledger_is_lost: bool
) -> None:
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    command = [sys.executable, "-c", textwrap.dedent(WRITING_FOR_EVER), str(disk), *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            [file] = leftovers(disk)
            with Bench(make_settings(disk)).ready() as bench:
                assert bench.store(NEW) == [DONE] * 4
                bench.until(lambda: bench.fs._lanes[0].keeper._next_sweep_s > 0, "no sweep")
            assert leftovers(disk) == [file]
        finally:
            process.kill()
    if ledger_is_lost:
        (disk / naming.LEDGER).unlink()
    with Bench(make_settings(disk)).ready() as bench:
        bench.until(lambda: not leftovers(disk), "what the dead was writing stays")
        assert bench.count("swept") == 1
        assert_counted_right(bench, disk)
    assert list((disk / naming.WRITERS).iterdir()) == []


def test_what_somebody_else_put_among_unfinished_files_stops_nothing(disk: Path) -> None:
    [name] = [f"{1:016x}-1-1-{1:016x}"]
    dead = disk / naming.WRITERS / name
    (dead / "a directory").mkdir(parents=True)
    (dead / "7").write_bytes(bytes(100))
    (disk / naming.WRITERS / "not a writer").mkdir()
    os.utime(dead, (0, 0))
    with Bench(make_settings(disk)).ready() as bench:
        bench.until(lambda: not (dead / "7").exists(), "the file of a writer elsewhere stays")
        assert bench.store(NEW) == [DONE] * 4
        assert "no stores" not in bench.fs.describe()[0]
    shutil.rmtree(dead)
