"""Disks that fail, fill up, vanish, hang: stores are shed, loads go on, and it comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filesystem_kit import (
    ERRNOS,
    ROW_BYTES,
    Bench,
    Faults,
    HookedIo,
    assert_counted_right,
    block_files,
    block_path,
    files_below,
    leftovers,
    make_settings,
    oserror,
)

from backends.block import BlockKey
from backends.errors import TierError
from backends.testing import FINGERPRINT, make_keys
from backends.tier.base import Lookup, Outcome
from backends.tier.filesystem import naming
from backends.tier.filesystem.io import Io, OsIo

DONE, SHED, MISSING = Outcome.DONE, Outcome.SHED, Outcome.MISSING
LATE, FAILED = Outcome.LATE, Outcome.FAILED
QUICK = {"retry_s": 0.05, "retry_most_s": 0.2}
# All that the tier asks of a filesystem when it is open, and that can fail.
CALLS = sorted(
    name
    for name in vars(Io)
    if not name.startswith("_") and name not in ("open_root", "fallocate", "close")
)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


SMALL_BYTES = 2 << 20


class SmallDisk:
    """A directory that holds 2 MiB, and the `io` to use it with."""

    def __init__(self, path: Path, io: OsIo | None) -> None:
        self.path = path
        self.io = io

    def free_bytes(self) -> int:
        if self.io is not None:
            # By inode, and twice: one walk misses a file that is renamed to where it has been.
            held = {}
            for _ in range(2):
                for file in files_below(self.path):
                    with contextlib.suppress(FileNotFoundError):
                        found = file.lstat()
                        held[found.st_ino] = found.st_blocks * 512
            return max(0, SMALL_BYTES - sum(held.values()))
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def fill(self) -> Path:
        filler = self.path / "filler"
        filler.write_bytes(bytes(self.free_bytes()))
        return filler


class SmallIo(HookedIo):
    """As a full disk does it: says what is free, and takes no more."""

    disk: SmallDisk

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def statvfs(self, fd: int) -> Any:
        frame = os.fstatvfs(fd).f_frsize
        return SimpleNamespace(f_bavail=self.disk.free_bytes() // frame, f_frsize=frame)

    def pwritev(self, fd: int, buffers: list[Any], offset: int) -> int:
        need_bytes = sum(len(memoryview(b)) for b in buffers)
        if os.fstat(fd).st_blocks * 512 < offset + need_bytes > self.disk.free_bytes():
            raise oserror(errno.ENOSPC)
        return super().pwritev(fd, buffers, offset)


@pytest.fixture(params=["mounted", "injected"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """A filesystem of 2 MiB; and the same by injection, which needs no right to mount one."""
    path = tmp_path / "small"
    path.mkdir()
    if request.param == "injected":
        io = SmallIo()
        io.disk = SmallDisk(path, io)
        yield io.disk
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES},mode=700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a filesystem")
    yield SmallDisk(path, None)
    subprocess.run(["umount", "-l", str(path)], check=True)


def comes_back(bench: Bench, label: str) -> None:
    """Stores go on before long, and what is stored can be loaded."""
    keys = make_keys(f"after {label}", 2)
    bench.until(lambda: bench.store(keys) == [DONE] * 2, f"{label}: stores do not go on")
    bench.until(lambda: bench.load(keys) == [DONE] * 2, f"{label}: loads do not go on")


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_stores_are_shed_and_counted_while_loads_go_on(disk: Path, number: int) -> None:
    """Calls fail that only stores make, the making of a file among them."""
    faults = Faults()

    class Hook(HookedIo):
        def open(self, directory: int, name: str, flags: int) -> int:
            if flags & os.O_CREAT:
                self._hook("create")
            return super().open(directory, name, flags)

    there, new = make_keys("there", 4), make_keys("new", 4)
    told: list[str] = []
    with Bench(make_settings(disk, **QUICK), io=Hook(faults)) as bench:

        def refuses() -> bool:
            # A pause may be over by the time that one looks.
            assert bench.store(new) == [SHED] * 4
            told[:] = bench.fs.describe()
            return "no stores" in told[0]

        assert bench.store(there) == [DONE] * 4
        for call in ("create", "pwritev", "publish", "lock"):
            faults.fail(call, number)
            shed = bench.count("shed")
            for _ in range(3):
                assert bench.store(new) == [SHED] * 4
                assert bench.load(there) == [DONE] * 4
            assert bench.count("shed") == shed + 12
            assert bench.lookup(new) == [Lookup.MISS] * 4
            bench.until(refuses, "nobody is told")
            assert "(injected)" in told[0] or number == errno.ENOENT
            faults.end()
            comes_back(bench, call)
            bench.until(lambda: "no stores" not in bench.fs.describe()[0], "it says so still")
        bench.until(lambda: not leftovers(disk), "something unfinished stays")
        assert_counted_right(bench, disk)


def scenario(bench: Bench, label: str) -> None:
    """A bit of everything: whatever fails meanwhile, each key ends in a way that is allowed."""
    old, new = make_keys("old", 4), make_keys(label, 4)
    stored, loaded = {DONE, SHED, FAILED}, {DONE, MISSING, SHED, FAILED}
    assert set(bench.store(old)) <= stored
    assert set(bench.load(old)) <= loaded
    assert set(bench.store(new)) <= stored
    bench.lookup([*old, *new, *make_keys("never stored", 2)])
    assert set(bench.load(new)) <= loaded


@pytest.mark.parametrize("call", CALLS)
def test_any_call_may_fail_for_a_while(disk: Path, call: str) -> None:
    """A single failure of each call is tried at every place it is made from: see
    test_filesystem_sites."""
    number = ERRNOS[len(call) % len(ERRNOS)]
    faults = Faults()
    # Eight blocks: the second half of the scenario evicts.
    settings = make_settings(
        disk, capacity=8 * ROW_BYTES, threads=2, durability="data", snapshot_interval_s=0.2, **QUICK
    )
    with Bench(settings, io=HookedIo(faults)) as bench:
        bench.ready()
        scenario(bench, "before")
        faults.fail(call, number)
        for n in range(3):
            scenario(bench, f"with faults {n}")
        faults.end()
        comes_back(bench, call)
        bench.until(lambda: not leftovers(disk), "something unfinished stays")
        assert_counted_right(bench, disk)
        assert len(block_files(disk)) <= 8
    assert list((disk / naming.WRITERS).iterdir()) == []


def test_a_full_disk_sheds_stores_until_there_is_room(small_disk: SmallDisk) -> None:
    disk = small_disk.path / "tier"
    settings = make_settings(disk, free_reserve_bytes=0, direct="off", **QUICK)
    there = make_keys("there", 8)
    with Bench(settings, io=small_disk.io, rows=128) as bench:
        assert bench.store(there) == [DONE] * 8
        filler = small_disk.fill()
        # A cache gives way: what it evicts makes room for as much, and for no more.
        outcomes = bench.store(make_keys("more", 16))
        assert set(outcomes) <= {DONE, SHED}
        assert len(block_files(disk)) <= 8
        left = [key for key in there if bench.is_hit(key)]
        assert set(bench.load(left)) <= {DONE, MISSING}
        filler.unlink()
        comes_back(bench, "a full disk")
        assert_counted_right(bench, disk)


def test_a_full_disk_with_nothing_of_ours_on_it_sheds(small_disk: SmallDisk) -> None:
    settings = make_settings(small_disk.path / "tier", free_reserve_bytes=0, direct="off", **QUICK)
    with Bench(settings, io=small_disk.io) as bench:
        bench.ready()
        filler = small_disk.fill()
        assert bench.store(make_keys("full", 4)) == [SHED] * 4
        filler.unlink()
        comes_back(bench, "a full disk")


def test_space_is_left_to_others(small_disk: SmallDisk) -> None:
    reserve = 1 << 20
    settings = make_settings(small_disk.path, free_reserve_bytes=reserve, direct="off")
    with Bench(settings, io=small_disk.io, rows=128) as bench:
        outcomes = bench.store(make_keys("many", 100))
        assert set(outcomes) == {DONE, SHED}
        assert small_disk.free_bytes() >= reserve


class ReadOnly(HookedIo):
    """A filesystem that the kernel has made read-only, as it does when it finds damage."""

    def __init__(self) -> None:
        self.on = threading.Event()
        super().__init__(self._check)

    def open(self, directory: int, name: str, flags: int) -> int:
        if self.on.is_set() and flags & (os.O_CREAT | os.O_WRONLY):
            raise oserror(errno.EROFS)
        return super().open(directory, name, flags)

    def _check(self, name: str) -> None:
        writing = ("pwritev", "publish", "replace", "unlink", "utime", "mkdir", "rmdir")
        if self.on.is_set() and name in writing:
            raise oserror(errno.EROFS)


def test_a_disk_that_becomes_read_only_sheds_stores_and_is_read(disk: Path) -> None:
    keys, io = make_keys("there", 4), ReadOnly()
    with Bench(make_settings(disk, touch_interval_s=0.0, **QUICK), io=io) as bench:
        assert bench.store(keys) == [DONE] * 4
        io.on.set()
        assert bench.store(make_keys("new", 2)) == [SHED] * 2
        assert bench.load(keys) == [DONE] * 4
        io.on.clear()
        comes_back(bench, "a read-only disk")


def test_a_wrong_file_on_a_read_only_disk_stays_a_miss(disk: Path) -> None:
    [key], io = make_keys("wrong", 1), ReadOnly()
    with Bench(make_settings(disk, **QUICK), io=io) as bench:
        assert bench.store([key]) == [DONE]
        (disk / block_path(FINGERPRINT, key)).write_bytes(bytes(ROW_BYTES))
        io.on.set()
        assert bench.load([key]) == [Outcome.CORRUPT]
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            assert bench.lookup([key]) == [Lookup.MISS]
            time.sleep(0.05)
        io.on.clear()
        bench.until(lambda: bench.store([key]) == [DONE], "it is not replaced")
        assert bench.load([key]) == [DONE]


@pytest.mark.parametrize("removed", ["everything below", "the path itself", "a leaf", "writers"])
def test_a_directory_that_is_removed_under_it_is_made_again(disk: Path, removed: str) -> None:
    keys = make_keys("there", 4)
    with Bench(make_settings(disk, **QUICK)) as bench:
        assert bench.store(keys) == [DONE] * 4
        if removed == "everything below":
            for child in disk.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        elif removed == "the path itself":
            shutil.rmtree(disk)
            assert set(bench.store(make_keys("meanwhile", 2))) == {SHED}
            assert set(bench.load(keys)) <= {MISSING, FAILED, SHED}
            assert not disk.exists(), "a path that has gone may be a disk that has"
            disk.mkdir()
        else:
            place = naming.WRITERS if removed == "writers" else block_path(FINGERPRINT, keys[0])
            shutil.rmtree((disk / place) if removed == "writers" else (disk / place).parent)
        comes_back(bench, removed)
        bench.until(lambda: bench.store(keys) == [DONE] * 4, "blocks that went are not stored")
        bench.until(lambda: bench.load(keys) == [DONE] * 4, "nor loaded")
        if removed != "a leaf":  # A few blocks that somebody deleted are found by the next start.
            assert_counted_right(bench, disk)


def test_out_of_descriptors_it_sheds_and_goes_on_when_there_are_some(disk: Path) -> None:
    """In a process of its own, with the real limit."""
    script = textwrap.dedent(
        f"""
        import os, resource, sys
        sys.path[:0] = {sys.path!r}
        from filesystem_kit import Bench, make_settings
        from backends.testing import make_keys
        from backends.tier.base import Outcome
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        keys = make_keys("there", 4)
        with Bench(make_settings({str(disk)!r}, retry_s=0.05, retry_most_s=0.2)) as bench:
            assert bench.store(keys) == [Outcome.DONE] * 4
            held = []
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            assert set(bench.store(make_keys("new", 4))) == {{Outcome.SHED}}
            assert set(bench.load(keys)) == {{Outcome.FAILED}}
            for fd in held:
                os.close(fd)
            assert bench.load(keys) == [Outcome.DONE] * 4
            new = make_keys("after", 4)
            bench.until(lambda: bench.store(new) == [Outcome.DONE] * 4, "stores do not go on")
        """
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 128
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_one_path_that_fails_is_not_the_tier_that_fails(tmp_path: Path) -> None:
    paths = [tmp_path / "good", tmp_path / "bad"]
    broken = threading.Event()

    class Hook(HookedIo):
        """Everything that concerns the second disk fails."""

        def open(self, directory: int, name: str, flags: int) -> int:
            if broken.is_set() and str(paths[1]) in os.readlink(f"/proc/self/fd/{directory}"):
                raise oserror(errno.EIO)
            return super().open(directory, name, flags)

    keys = make_keys("spread", 16)
    settings = make_settings("unused", paths=tuple(map(str, paths)), **QUICK)
    with Bench(settings, io=Hook(lambda _: None)) as bench:
        assert bench.store(keys) == [DONE] * 16
        on_good = {naming.parse_block_name(file.name) for file in block_files(paths[0])}
        assert 0 < len(on_good) < 16
        broken.set()
        outcomes = bench.load(keys)
        for key, outcome in zip(keys, outcomes, strict=True):
            assert (outcome is DONE) == (key in on_good)
        new = make_keys("new", 16)
        bench.until(lambda: bench.store(new) == [DONE] * 16, "the good path does not take over")
        assert bench.load(new) == [DONE] * 16
        known = [Lookup.HIT if key in on_good else Lookup.MISS for key in keys]

        def are_misses() -> bool:
            bench.load(keys)  # after a while a path that failed is tried again
            return bench.lookup(keys) == known

        bench.until(are_misses, "what stands on the bad path is a hit")
        broken.clear()
        bench.until(lambda: bench.load(keys) == [DONE] * 16, "the bad path does not come back")
        bench.until(
            lambda: "no stores" not in "".join(bench.fs.describe()), "it is not stored to again"
        )


def test_a_path_that_cannot_be_opened_at_the_start_is_used_when_it_can(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    bad.write_text("in the way")
    settings = make_settings("unused", paths=(str(good), str(bad)), **QUICK)
    keys = make_keys("spread", 16)
    with Bench(settings) as bench:
        assert "no stores" in bench.fs.describe()[1]
        bench.until(lambda: bench.store(keys) == [DONE] * 16, "the good path is not used")
        bad.unlink()
        bad.mkdir()
        bench.until(
            lambda: "no stores" not in "".join(bench.fs.describe()), "the other one is not opened"
        )
        more = make_keys("more", 16)
        bench.until(lambda: bench.store(more) == [DONE] * 16, "stores do not go on")
        assert block_files(bad)


def test_no_path_at_all_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"no path can be used: .*file.*mend or change paths"):
        Bench(make_settings(tmp_path / "file"))


class Hang:
    """A hook that lets calls of one name wait until `go`, from now on; by I/O threads only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Event()
        self._running.set()
        self.waiting = threading.Semaphore(0)

    def __call__(self, name: str) -> None:
        worker = threading.current_thread().name.startswith("kvquay-fs-0-")
        if name == self._name and worker and not self._running.is_set():
            self.waiting.release()
            self._running.wait()

    def hang(self) -> None:
        self._running.clear()

    def go(self) -> None:
        self._running.set()


def test_a_late_load_gives_its_row_back_only_when_nobody_writes_to_it(disk: Path) -> None:
    hang = Hang("preadv")
    keys = make_keys("late", 4)
    with Bench(make_settings(disk, threads=2), io=HookedIo(hang)) as bench:
        assert bench.store(keys) == [DONE] * 4
        hang.hang()
        begun = bench.submit_load(keys[:2], time.monotonic() + 0.2)
        assert hang.waiting.acquire(timeout=10)
        assert hang.waiting.acquire(timeout=10)
        # All threads hang, so these are not begun: they end at their deadline.
        not_begun = bench.submit_load(keys[2:], time.monotonic() + 0.2)
        assert bench.outcomes(not_begun) == [LATE] * 2
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            assert bench.poll() == []
            time.sleep(0.01)
        assert not bench.tier.drain(0.05)
        hang.go()
        assert bench.outcomes(begun) == [LATE] * 2
        assert bench.load(keys) == [DONE] * 4


def test_a_store_whose_deadline_has_passed_is_not_begun(disk: Path) -> None:
    keys = make_keys("too late", 4)
    with Bench(make_settings(disk)) as bench:
        job = bench.submit_store(keys, time.monotonic() - 1)
        assert bench.outcomes(job) == [LATE] * 4
        bench.until(
            lambda: bench.lookup(keys) == [Lookup.MISS] * 4, "something was stored all the same"
        )
        assert block_files(disk) == []
        assert bench.store(keys) == [DONE] * 4


def test_a_path_that_hangs_is_left_alone_and_the_other_one_works(tmp_path: Path) -> None:
    hang = Hang("preadv")
    paths = tuple(str(tmp_path / name) for name in "ab")
    settings = make_settings("unused", paths=paths, stuck_s=0.2, threads=2)
    keys = make_keys("spread", 24)
    with Bench(settings, io=HookedIo(hang), rows=64) as bench:
        assert bench.store(keys) == [DONE] * 24
        on_a = {naming.parse_block_name(file.name) for file in block_files(tmp_path / "a")}
        hang.hang()
        a_key, *_ = [key for key in keys if key in on_a]
        stuck = bench.submit_load([a_key])
        assert hang.waiting.acquire(timeout=10)
        bench.until(lambda: "has not come back" in bench.fs.describe()[0], "it is not noticed")
        others = [key for key in keys if key not in on_a]
        assert bench.load(others) == [DONE] * len(others)
        answers = bench.lookup(keys)
        assert [a is Lookup.HIT for a in answers] == [key not in on_a for key in keys]
        assert bench.store(make_keys("new", 8)) == [DONE] * 8
        hang.go()
        assert bench.outcomes(stuck) == [DONE]
        assert bench.lookup(keys) == [Lookup.HIT] * 24


def test_loads_go_before_stores_and_find_a_thread(disk: Path) -> None:
    hang = Hang("pwritev")
    there, new = make_keys("there", 8), make_keys("new", 16)
    with Bench(make_settings(disk, threads=4), io=HookedIo(hang)) as bench:
        assert bench.store(there) == [DONE] * 8
        hang.hang()
        storing = bench.submit_store(new)
        assert hang.waiting.acquire(timeout=10)
        assert bench.load(there) == [DONE] * 8
        assert bench.poll() == []
        hang.go()
        assert bench.outcomes(storing) == [DONE] * 16


def test_a_full_queue_sheds_at_once(disk: Path) -> None:
    hang = Hang("pwritev")
    with Bench(make_settings(disk, threads=2, queue_blocks=6), io=HookedIo(hang)) as bench:
        hang.hang()
        first = bench.submit_store(make_keys("waiting", 4))
        second = bench.submit_store(make_keys("too many", 4))
        third = bench.submit_store(make_keys("far too many", 4))
        assert bench.outcomes(third) == [SHED] * 4
        hang.go()
        assert bench.outcomes(first) == [DONE] * 4
        assert bench.outcomes(second) == [DONE] * 2 + [SHED] * 2


def test_loads_that_are_too_many_are_shed_too(disk: Path) -> None:
    hang = Hang("preadv")
    keys = make_keys("there", 12)
    with Bench(make_settings(disk, threads=2, queue_blocks=8), io=HookedIo(hang)) as bench:
        assert bench.store(keys[:6]) == bench.store(keys[6:]) == [DONE] * 6
        hang.hang()
        first, second = bench.submit_load(keys[:6]), bench.submit_load(keys[6:])
        third = bench.submit_load(keys[:2])
        assert bench.outcomes(third) == [SHED] * 2
        hang.go()
        assert bench.outcomes(first) == [DONE] * 6
        assert bench.outcomes(second) == [DONE] * 2 + [SHED] * 4
        assert bench.load(keys[:6]) == [DONE] * 6


def test_no_lookup_is_pending_for_ever_though_every_thread_hangs(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.tier.filesystem.tier._PENDING_S", 0.3)
    running = threading.Event()
    running.set()

    def hook(_: str) -> None:
        if threading.current_thread().name.startswith("kvquay-fs"):
            running.wait()

    stored, storing, unknown = make_keys("hang", 3)
    with Bench(make_settings(disk, threads=2, stuck_s=60), io=HookedIo(hook)) as bench:
        assert bench.store([stored]) == [DONE]
        running.clear()
        job = bench.submit_store([storing])
        keys = [stored, storing, unknown]
        assert bench.tier.lookup(keys) == [Lookup.HIT, Lookup.PENDING, Lookup.PENDING]
        assert bench.lookup(keys) == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
        running.set()
        assert bench.outcomes(job) == [DONE]
        assert bench.lookup(keys) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]


def test_a_queue_is_bounded_in_bytes_too(disk: Path) -> None:
    hang = Hang("pwritev")
    settings = make_settings(disk, threads=2, queue_bytes=4 * ROW_BYTES)
    with Bench(settings, io=HookedIo(hang)) as bench:
        hang.hang()
        job = bench.submit_store(make_keys("waiting", 6))
        hang.go()
        assert bench.outcomes(job) == [DONE] * 4 + [SHED] * 2


def test_a_block_that_cannot_be_read_is_a_miss_until_it_is_stored_again(disk: Path) -> None:
    faults = Faults()
    [key] = make_keys("bad sector", 1)
    with Bench(make_settings(disk), io=HookedIo(faults)) as bench:
        assert bench.store([key]) == [DONE]
        faults.fail("preadv", errno.EIO)
        assert bench.load([key]) == [FAILED]
        assert bench.lookup([key]) == [Lookup.MISS]
        assert bench.store([key])[0] in (DONE, SHED)
        faults.end()
        bench.until(lambda: bench.store([key]) == [DONE], "it is not stored again")
        assert bench.load([key]) == [DONE]


def test_rows_that_are_not_right_are_failed_and_stored_nowhere(disk: Path) -> None:
    right, wrong = make_keys("right", 2)
    stranger = BlockKey(b"stranger", 0)
    with Bench(make_settings(disk)) as bench:
        rows = bench.take(2)
        bench.rows.fill(rows[0], right)
        bench.rows.fill(rows[1], stranger)
        assert bench.outcomes(bench.submit_rows([right, wrong], rows)) == [DONE, FAILED]
        assert len(block_files(disk)) == 1
