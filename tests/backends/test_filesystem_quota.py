"""The capacity: what counts against it, what is evicted for it, and who keeps it together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filesystem_kit import (
    ROW_BYTES,
    Bench,
    Faults,
    FilesystemHarness,
    HookedIo,
    assert_counted_right,
    block_files,
    block_path,
    ledger_of,
    leftovers,
    make_settings,
    statuses,
)

from backends.block import HEADER_BYTES
from backends.testing import FINGERPRINT, make_keys, stored_block
from backends.tier.base import NONE_EVICTED, Lookup, Outcome
from backends.tier.filesystem import keeper, naming
from backends.tier.filesystem.keeper import Keeper
from backends.tier.filesystem.volume import Volume

DONE, SHED, MISSING = Outcome.DONE, Outcome.SHED, Outcome.MISSING
OTHER = bytes(reversed(FINGERPRINT))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def blocks(count: int) -> int:
    return count * ROW_BYTES


def test_the_least_recent_go_first_and_loads_and_touches_count(disk: Path) -> None:
    keys = make_keys("lru", 8)
    with Bench(make_settings(disk, capacity=blocks(8))) as bench:
        for key in keys:
            assert bench.store([key]) == [DONE]
        assert bench.load([keys[0]]) == [DONE]
        bench.fs.touch([keys[1]])
        assert bench.is_hit(keys[2])
        assert bench.store(make_keys("newer", 4)) == [DONE] * 4
        hits = {i for i, a in enumerate(bench.lookup(keys)) if a is Lookup.HIT}
        assert hits == {0, 1, 2, 7}
        assert bench.count("evicted") == 4


def test_of_a_batch_that_is_too_large_the_front_is_kept(disk: Path) -> None:
    keys = make_keys("batch", 20)
    with Bench(make_settings(disk, capacity=blocks(8), threads=1)) as bench:
        outcomes = bench.store(keys)
        assert outcomes == [DONE] * 8 + [SHED] * 12
        assert bench.load(keys[:8]) == [DONE] * 8


def test_who_evicts_tells_of_it_whoever_had_stored_the_block(disk: Path) -> None:
    old, new = make_keys("told old", 8), make_keys("told new", 4)
    with Bench(make_settings(disk, capacity=blocks(8))) as first:
        for key in old:
            assert first.store([key]) == [DONE]
        with Bench(make_settings(disk, capacity=blocks(8))) as second:
            assert second.fs.settle(10.0)
            for key in new:
                assert second.store([key]) == [DONE]
            told = second.fs.evicted()
            assert set(told.keys) == set(old[: len(told.keys)])
            assert len(told.keys) == second.count("evicted") >= 4
        assert first.fs.evicted() == NONE_EVICTED


def test_blocks_of_others_that_have_other_keys_are_not_told(disk: Path) -> None:
    with Bench(make_settings(disk, capacity=blocks(8)), fingerprint=OTHER) as other:
        for key in make_keys("theirs", 8):
            assert other.store([key]) == [DONE]
    with Bench(make_settings(disk, capacity=blocks(8))) as bench:
        assert bench.fs.settle(10.0)
        assert bench.store(make_keys("ours", 4)) == [DONE] * 4
        assert bench.count("evicted") >= 4
        assert bench.fs.evicted() == NONE_EVICTED


def test_above_the_high_watermark_it_evicts_to_the_low_one_in_the_background(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_SPARES_S", 1.0)
    settings = make_settings(
        disk, capacity=blocks(100), high_watermark=0.9, low_watermark=0.5, threads=2
    )
    keys = make_keys("watermarks", 95)
    with Bench(settings, rows=95) as bench:
        assert bench.store(keys[:88]) == [DONE] * 88
        time.sleep(0.5)
        assert bench.fs.usage().blocks == 88
        assert bench.store(keys[88:]) == [DONE] * 7
        bench.until(lambda: bench.count("evicted") == 45, "it is not evicted to 50 blocks")
        assert bench.fs.usage().blocks == 50
        bench.until(lambda: not leftovers(disk), "spare files stay")
        # In one batch the earlier keys are the more recent ones.
        left = [i for i, a in enumerate(bench.lookup(keys)) if a is Lookup.HIT]
        assert left == [*range(43), *range(88, 95)]
        assert_counted_right(bench, disk)


def test_blocks_of_other_namespaces_count_and_are_evicted_when_they_are_older(disk: Path) -> None:
    with Bench(make_settings(disk), fingerprint=OTHER) as before:
        before.store(make_keys("another model", 6))
    with Bench(make_settings(disk, capacity=blocks(8))) as bench:
        bench.ready()
        assert bench.fs.usage().blocks == 6
        keys = make_keys("this model", 8)
        for key in keys:
            assert bench.store([key]) == [DONE]
        assert bench.lookup(keys) == [Lookup.HIT] * 8
        assert bench.fs.usage().blocks == len(block_files(disk)) == 8
        assert bench.count("evicted") == 6


def test_blocks_of_another_size_count_as_what_they_are(disk: Path) -> None:
    with Bench(make_settings(disk), fingerprint=OTHER, row_bytes=2 * ROW_BYTES) as before:
        before.store(make_keys("larger", 3))
    with Bench(make_settings(disk, capacity=blocks(8))) as bench:
        bench.ready()
        assert bench.fs.usage().bytes == blocks(6)
        for key in make_keys("smaller", 4):
            assert bench.store([key]) == [DONE]
        assert bench.fs.usage().bytes <= blocks(8)
        assert_counted_right(bench, disk)


@pytest.mark.parametrize("cut", [False, True])
def test_the_quarantine_is_inside_the_capacity(disk: Path, cut: bool) -> None:
    settings = make_settings(disk, capacity=blocks(8), quarantine_limit_bytes=blocks(3))
    keys = make_keys("some wrong", 8)
    with Bench(settings) as bench:
        bench.store(keys)
        for key in keys[:3]:
            with (disk / block_path(FINGERPRINT, key)).open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(b"!")
                if cut:
                    file.truncate()
        assert bench.load(keys[:3]) == [Outcome.CORRUPT] * 3
        assert bench.fs.usage().bytes <= blocks(8)
        assert cut or bench.fs.usage().bytes == blocks(8)
        assert_counted_right(bench, disk)
        for key in make_keys("more", 5):
            bench.store([key])
        held = sum(found.st_size for found in statuses(disk.rglob("*.kvb")).values())
        assert held <= blocks(8)
        assert_counted_right(bench, disk)


def test_a_copy_that_somebody_linked_is_not_written_over(disk: Path, tmp_path: Path) -> None:
    old, new = make_keys("linked", 4), make_keys("after", 8)
    with Bench(make_settings(disk, capacity=blocks(4))) as bench:
        bench.store(old)
        copies = tmp_path / "copies"
        copies.mkdir()
        for file in block_files(disk):
            os.link(file, copies / file.name)
        for key in new:
            assert bench.store([key]) == [DONE]
    for key in old:
        copy = (copies / naming.block_name(key)).read_bytes()
        assert copy == stored_block(key, FINGERPRINT, ROW_BYTES).tobytes()


def test_files_of_evicted_blocks_are_written_over(disk: Path) -> None:
    with Bench(make_settings(disk, capacity=blocks(4))) as bench:
        bench.store(make_keys("first", 4))
        inodes = {file.stat().st_ino for file in block_files(disk)}
        for key in make_keys("second", 8):
            assert bench.store([key]) == [DONE]
        assert {file.stat().st_ino for file in block_files(disk)} == inodes


@pytest.mark.parametrize("verify", [True, False])
def test_a_block_that_is_written_over_while_it_is_read_is_a_miss_and_not_damage(
    disk: Path, verify: bool
) -> None:
    """The reader has opened the file when its block is evicted and another one written there."""
    [victim], more = make_keys("victim", 1), make_keys("more", 4)
    opened, go_on = threading.Event(), threading.Event()

    def hook(name: str) -> None:
        if name == "fstat" and threading.current_thread().name.startswith("kvquay-fs-0-"):
            opened.set()
            assert go_on.wait(20)

    reader = Bench(make_settings(disk, verify=verify), io=HookedIo(hook))
    with Bench(make_settings(disk, capacity=blocks(4))) as writer, reader:
        assert writer.store([victim]) == [DONE]
        assert reader.is_hit(victim)
        job = reader.submit_load([victim])
        assert opened.wait(20)
        for key in more:
            assert writer.store([key]) == [DONE]
        go_on.set()
        assert reader.outcomes(job) == [MISSING]
        assert (reader.count("corrupt"), reader.count("quarantined")) == (0, 0)
        assert writer.load(more) == [DONE] * 4


def test_what_another_process_uses_is_not_evicted_first(disk: Path) -> None:
    settings = make_settings(disk, capacity=blocks(8), touch_interval_s=0.0)
    keys = make_keys("theirs", 8)
    with Bench(settings) as first, Bench(settings) as second:
        for key in keys:
            first.store([key])
        assert second.lookup(keys[:2]) == [Lookup.HIT] * 2
        assert second.load(keys[:2]) == [DONE] * 2
        assert first.store(make_keys("new", 3)) == [DONE] * 3
        assert second.load(keys[:2]) == [DONE] * 2
        assert first.load(keys[2:5]) == [MISSING] * 3


def test_a_process_learns_of_blocks_that_others_stored_before_it_evicts(disk: Path) -> None:
    """Else it would drive out its own new blocks and keep the others' old ones."""
    settings = make_settings(disk, capacity=blocks(16))
    with Bench(settings) as theirs, Bench(settings) as ours:
        ours.ready()
        theirs.store(make_keys("their old ones", 12))
        keys = make_keys("our new ones", 12)
        for key in keys:
            assert ours.store([key]) == [DONE]
            ours.until(lambda: len(block_files(disk)) <= 16, "too many")
        ours.until(lambda: len(ours.fs._index) >= 16, "the others' blocks stay unknown")
        for key in keys:
            ours.store([key])
        assert ours.lookup(keys) == [Lookup.HIT] * 12


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.25), (0.5, 0.5)])
def test_the_watermarks_of_two_paths_are_one(tmp_path: Path, high: float, low: float) -> None:
    """Also where one of them has much more than the other: no prefix goes before its extension."""
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    settings = make_settings(
        "unused", paths=paths, capacity=blocks(32), high_watermark=high, low_watermark=low
    )
    with Bench(settings) as bench:
        here, there = [], []
        for key in make_keys("uneven", 200):
            (here if bench.fs._order(bench.fs._namespace.block_id(key))[0] else there).append(key)
        chain = [*here[:9], *there[:3], *here[9:11], *there[3:5]]
        assert bench.store(chain[:16]) == [DONE] * 16
        time.sleep(0.3)
        assert bench.lookup(chain) == [Lookup.HIT] * 16
        assert bench.store(here[20:24]) == [DONE] * 4
        evicted = 20 - round(32 * low)
        bench.until(lambda: bench.count("evicted") == evicted, "it is not evicted to its part")
        assert bench.fs.usage().blocks == round(32 * low)
        hits = [answer is Lookup.HIT for answer in bench.lookup(chain)]
        assert hits == [True] * (round(32 * low) - 4) + [False] * (20 - round(32 * low))


@pytest.mark.parametrize("size", [1, 24])
def test_what_a_path_has_above_its_part_is_room_that_others_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Where the capacity was larger before, and the background has not come to evicting yet."""
    monkeypatch.setattr(Keeper, "_evict", lambda keeper: None)
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    here, there = [], []
    with Bench(make_settings("unused", paths=paths, capacity=blocks(16 * size))) as bench:
        for key in make_keys("uneven", 60 * size):
            (here if bench.fs._order(bench.fs._namespace.block_id(key))[0] else there).append(key)
        for n in range(size):
            assert bench.store(there[7 * n : 7 * n + 7]) == [DONE] * 7
        assert len(block_files(tmp_path / "a")) == 7 * size
    with Bench(make_settings("unused", paths=paths, capacity=blocks(8 * size))) as bench:
        # Also where the path above its part stores, which makes room by files to be written over.
        for n in range(4 * size):
            bench.store([there[7 * size + n]])
            bench.store([here[n]])
            assert sum(blocks_on(tmp_path / name) for name in "ab") <= 8 * size
        assert bench.lookup(here[4 * size - 1 : 4 * size]) == [Lookup.HIT]


def blocks_on(path: Path) -> int:
    """Files with a block's size, whether they have a name, are spare, or are being written."""
    files = [*block_files(path), *leftovers(path)]
    return sum(found.st_size == blocks(1) for found in statuses(files).values())


def test_what_one_path_has_no_room_for_waits_until_another_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    settings = make_settings("unused", paths=paths, capacity=blocks(8))
    ended_s = time.monotonic() + 0.3

    def counted_late(told: Any) -> Any:
        def asked(volume: Volume, *given: Any) -> Any:
            return (volume.number == 0 or time.monotonic() > ended_s) and told(volume, *given)

        return asked

    for name in ("is_counted", "has_room"):
        monkeypatch.setattr(Volume, name, counted_late(getattr(Volume, name)))
    with Bench(settings) as bench:
        keys = [
            key
            for key in make_keys("here", 100)
            if bench.fs._order(bench.fs._namespace.block_id(key))[0] == 0
        ]
        assert bench.store(keys[:6]) == [DONE] * 6
        assert bench.lookup(keys[:6]) == [Lookup.HIT] * 6


@pytest.mark.parametrize("threads", [1, 4])
def test_two_paths_are_one_capacity(tmp_path: Path, threads: int) -> None:
    """However their keys fall: all of it is used, and the oldest of all goes first."""
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    settings = make_settings("unused", paths=paths, capacity=blocks(16), threads=threads)
    keys = make_keys("spread", 24)
    with Bench(settings) as bench:
        for key in keys[:16]:
            assert bench.store([key]) == [DONE]
        assert bench.lookup(keys[:16]) == [Lookup.HIT] * 16
        for key in keys[16:]:
            assert bench.store([key]) == [DONE]
        hits = [answer is Lookup.HIT for answer in bench.lookup(keys[:16])]
        # The lookup of all made the first keys the most recent.
        assert hits == [True] * 8 + [False] * 8
        assert bench.load([*keys[:8], *keys[16:]]) == [DONE] * 16
        assert len(block_files(tmp_path / "a")) == len(block_files(tmp_path / "b")) == 8


def test_a_lost_ledger_is_made_again_and_everything_counted(disk: Path) -> None:
    with Bench(make_settings(disk, capacity=blocks(12))) as bench:
        bench.store(make_keys("before", 8))
        (disk / naming.LEDGER).unlink()
        for key in make_keys("after", 8):
            bench.until(lambda key=key: bench.store([key]) == [DONE], "stores do not go on")
        assert len(block_files(disk)) <= 12
        assert_counted_right(bench, disk)


@pytest.mark.parametrize("damage", [b"", b"KVQUSAGE", os.urandom(600000)])
def test_a_damaged_ledger_is_made_again_at_the_start(disk: Path, damage: bytes) -> None:
    with Bench(make_settings(disk)) as bench:
        bench.store(make_keys("before", 6))
    (disk / naming.LEDGER).write_bytes(damage)
    with Bench(make_settings(disk, capacity=blocks(8))) as bench:
        for key in make_keys("after", 8):
            assert bench.store([key]) == [DONE]
        assert len(block_files(disk)) == 8
        assert_counted_right(bench, disk)


def test_what_somebody_deleted_or_brought_is_found_by_the_next_start(disk: Path) -> None:
    keys = make_keys("before", 8)
    with Bench(make_settings(disk)) as bench:
        bench.store(keys)
    for file in block_files(disk)[:4]:
        file.unlink()
    for key in make_keys("brought", 2):
        file = disk / block_path(FINGERPRINT, key)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(stored_block(key, FINGERPRINT, ROW_BYTES).tobytes())
    with Bench(make_settings(disk)).ready() as again:
        assert again.fs.usage().blocks == 6
        assert_counted_right(again, disk)


def test_a_pile_of_reservations_of_the_dead_is_given_back(disk: Path) -> None:
    """Killed in the middle of a write, with space reserved; others go on meanwhile."""
    settings = make_settings(disk, capacity=blocks(8))
    script = textwrap.dedent(
        """
        import os, signal, sys
        sys.path[:0] = [sys.argv[2], sys.argv[3]]
        from filesystem_kit import Bench, HookedIo, make_settings, blocks_of
        from backends.testing import make_keys
        started = []
        def hook(name):
            if name == "utime":
                started.append(1)
                if len(started) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        bench = Bench(make_settings(sys.argv[1], capacity=8 * 16384, threads=8), io=HookedIo(hook))
        bench.ready()
        bench.store(make_keys("dying", 6))
        """
    ).replace(", blocks_of", "")
    root = Path(__file__).parents[2]
    with Bench(settings) as bench:
        bench.ready()
        died = subprocess.run(
            [sys.executable, "-c", script, str(disk), str(root), str(Path(__file__).parent)],
            timeout=60,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL
        bench.until(lambda: bench.count("swept") > 0, "what the dead was writing is not swept")
        bench.until(lambda: not leftovers(disk), "what the dead was writing stays")
        bench.until(
            lambda: ledger_of(bench.fs).totals().reserved_bytes == 0, "its reservation stays"
        )
        assert bench.store(make_keys("living", 8)) == [DONE] * 8
        assert_counted_right(bench, disk)


HERD = """
import ctypes, os, random, signal, sys, time, traceback
disk, kills, *places = sys.argv[1:]
sys.path[:0] = places
from filesystem_kit import ROW_BYTES, Bench, make_settings
from backends.testing import make_keys

def work(seed):
    chance = random.Random(seed)
    bench = Bench(make_settings(disk, capacity=40 * ROW_BYTES, threads=4), rows=64)
    while True:
        keys = make_keys(f"shared {chance.randrange(60)}", 4)
        bench.store(keys)
        bench.load([key for key in keys if chance.random() < 0.5])

def end(pid):
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        sys.exit("one of them ended by itself")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def start(seed):
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:  # else it has died before it could take this one with it
            work(seed)
    except BaseException:
        traceback.print_exc()
    os._exit(1)

chance = random.Random(os.getpid())
running = [start(seed) for seed in range(3)]
for seed in range(3, 3 + int(kills)):
    time.sleep(chance.uniform(0.0, 0.7))
    end(running.pop(chance.randrange(3)))
    running.append(start(seed))
time.sleep(0.5)
for pid in running:
    end(pid)
"""


@pytest.mark.multiproc
def test_many_processes_that_are_killed_at_random_keep_one_capacity(tmp_path: Path) -> None:
    """Whoever is killed when: the sum of files never exceeds the capacity, and in the end the
    ledger says what is there."""
    harness = FilesystemHarness(tmp_path)
    disk = harness.paths[0]
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    most = 0
    with subprocess.Popen([sys.executable, "-c", HERD, str(disk), "20", *places]) as herd:
        try:
            while herd.poll() is None:
                most = max(most, sum(harness.raw_list().values()))
                time.sleep(0.002)
        finally:
            herd.kill()  # and those that it started, with it
    assert herd.returncode == 0
    assert blocks(20) < most <= blocks(40)
    with Bench(make_settings(disk, capacity=blocks(40))).ready() as bench:
        bench.until(lambda: not leftovers(disk), "what the dead were writing stays")
        assert_counted_right(bench, disk)
        keys = [key for n in range(60) for key in make_keys(f"shared {n}", 4)]
        there = [key for begin in range(0, 240, 24) for key in keys[begin : begin + 24]]
        hits = [key for key in there if bench.is_hit(key)]
        assert hits
        for begin in range(0, len(hits), 20):
            some = hits[begin : begin + 20]
            assert bench.load(some) == [DONE] * len(some)
        assert bench.count("corrupt") == 0


def test_faults_while_evicting_lose_no_count(disk: Path) -> None:
    faults = Faults()
    with Bench(make_settings(disk, capacity=blocks(6)), io=HookedIo(faults)) as bench:
        bench.store(make_keys("first", 6))
        for name in ("replace", "unlink", "stat", "lock", "pwritev", "preadv", "publish"):
            faults.fail(name, 5, times=2)
            for key in make_keys(f"while {name} fails", 3):
                assert bench.store([key])[0] in (DONE, SHED)
            faults.end()
            key = make_keys(f"after {name}", 1)
            bench.until(lambda key=key: bench.store(key) == [DONE], f"{name}: it does not go on")
        assert len(block_files(disk)) <= 6
        bench.until(lambda: not leftovers(disk), "something unfinished stays")
        assert_counted_right(bench, disk)
