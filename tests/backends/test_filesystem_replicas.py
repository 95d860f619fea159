"""Several replicas on one directory, each a process of its own: what they share, and who writes."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filesystem_kit import (
    ROW_BYTES,
    Bench,
    assert_counted_right,
    block_files,
    block_path,
    leftovers,
    make_settings,
)

from backends.block import BlockKey
from backends.testing import FINGERPRINT, make_keys
from backends.testing.peer import Peer, PeerSetup
from backends.tier import turns
from backends.tier.base import Lookup, Outcome, TierContext
from backends.tier.filesystem import FilesystemSettings, naming
from backends.tier.filesystem.io import OsIo
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.sweep import sweep
from backends.tier.filesystem.tier import FilesystemTier
from backends.tier.naming import writer_position

pytestmark = pytest.mark.multiproc

DONE, MISSING = Outcome.DONE, Outcome.MISSING
PATIENCE_S = 30.0


class CountingIo(OsIo):
    """The real filesystem; counts the rows that are written, whatever becomes of them. In the
    middle of row number `hang_at` it makes a file that says so, and waits for ever."""

    def __init__(self, hang_at: int | None = None, sign: str = "") -> None:
        super().__init__()
        self.rows = 0
        self._hang_at = hang_at
        self._sign = sign

    def pwritev(self, fd: int, buffers: list[Any], offset: int) -> int:
        whole = sum(memoryview(buffer).nbytes for buffer in buffers) == ROW_BYTES
        if whole and self.rows == self._hang_at:
            super().pwritev(fd, [memoryview(buffers[0])[: ROW_BYTES // 2]], offset)
            Path(self._sign).touch()
            signal.sigwait([])
        self.rows += whole
        return super().pwritev(fd, buffers, offset)


class CountingTier(FilesystemTier):
    def __init__(
        self, context: TierContext, settings: FilesystemSettings, hang_at: int | None, sign: str
    ) -> None:
        self._counting = CountingIo(hang_at, sign)
        super().__init__(context, settings, io=self._counting)

    def counters(self) -> dict[str, int]:
        return super().counters() | {"written_rows": self._counting.rows}


def open_counting(
    context: TierContext, settings: FilesystemSettings, hang_at: int | None, sign: str
) -> CountingTier:
    return CountingTier(context, settings, hang_at, sign)


def start(
    settings: FilesystemSettings, index: int, count: int, hang: tuple[int, Path] | None = None
) -> Peer:
    """A replica in a process of its own. `hang`: the row at which it hangs, and the file that says
    so."""
    at, sign = hang or (None, Path())
    opener = partial(open_counting, settings=settings, hang_at=at, sign=str(sign))
    return Peer(PeerSetup(opener, 64, ROW_BYTES, FINGERPRINT, PATIENCE_S, index, count))


class Replicas:
    """All of them, one process each. `hang` is that of the first one."""

    def __init__(
        self, settings: FilesystemSettings, count: int, hang: tuple[int, Path] | None = None
    ) -> None:
        self._peers = [start(settings, i, count, None if i else hang) for i in range(count)]
        for peer in self._peers:
            peer.ready()

    def __getitem__(self, index: int) -> Peer:
        return self._peers[index]

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.kill()

    def all_do(self, method: str, *arguments: object, but: int = -1) -> list[Any]:
        """All of them, or all but one, do the same at about the same moment; what each answers."""
        peers = [peer for index, peer in enumerate(self._peers) if index != but]
        for peer in peers:
            peer.begin(method, *arguments)
        return [peer.end() for peer in peers]

    def count(self, name: str, but: int = -1) -> int:
        return sum(counters[name] for counters in self.all_do("counters", but=but))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def eventually(happened: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.01)


def keys_whose_first_writer_is(
    replica: int, replicas: int, count: int, label: str = "first"
) -> tuple[BlockKey, ...]:
    space = Namespace(naming.namespace_name(FINGERPRINT, None))
    keys = make_keys(label, 16 * count * replicas)
    own = [key for key in keys if not writer_position(space.block_id(key), replica, replicas)]
    return tuple(own[:count])


def files_of(path: Path) -> dict[str, tuple[int, int, int]]:
    """Name → inode, and when its bytes and its inode last changed."""
    found = ((file.name, file.stat()) for file in block_files(path))
    return {name: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in found}


def test_each_key_has_one_order_of_its_writers_and_all_are_first_equally_often() -> None:
    space = Namespace(naming.namespace_name(FINGERPRINT, None))
    firsts = [0] * 4
    for key in make_keys("order", 400):
        block_id = space.block_id(key)
        order = [writer_position(block_id, replica, 4) for replica in range(4)]
        assert sorted(order) == [0, 1, 2, 3]
        firsts[order.index(0)] += 1
    assert min(firsts) > 70


def test_a_prompt_that_four_replicas_store_at_once_is_written_once(disk: Path) -> None:
    prompt = make_keys("shared prompt", 48)
    with Replicas(make_settings(disk), 4) as replicas:
        assert replicas.all_do("store", prompt) == [[DONE] * 48] * 4
        before = files_of(disk)
        assert len(before) == 48
        # Bytes that went to the disk and were thrown away would count here too.
        assert replicas.count("written_rows") == replicas.count("stored") == 48
        assert replicas.count("stored_bytes") == 48 * ROW_BYTES
        assert replicas.count("dedup_skips") == 3 * 48
        assert replicas.all_do("load", prompt) == [[DONE] * 48] * 4
        # Again, when all know that it is there.
        assert replicas.all_do("store", prompt) == [[DONE] * 48] * 4
        assert replicas.count("written_rows") == 48
        assert {name: found[:2] for name, found in files_of(disk).items()} == {
            name: found[:2] for name, found in before.items()
        }
        assert replicas.count("failed") == replicas.count("shed") == 0
        replicas.all_do("close")
    assert leftovers(disk) == []


def test_who_comes_late_writes_nothing_though_it_would_have_been_the_first(disk: Path) -> None:
    """It has never looked these keys up, so its index does not have them."""
    keys, settings, io = keys_whose_first_writer_is(1, 2, 16), make_settings(disk), CountingIo()
    with (
        Bench(settings, replica=1, replicas=2, io=io) as late,
        Bench(settings, replica=0, replicas=2) as early,
    ):
        late.ready()
        assert early.store(keys) == [DONE] * 16
        assert late.store(keys) == [DONE] * 16
        assert (late.count("dedup_skips"), io.rows) == (16, 0)


def test_the_first_in_the_order_writes_at_once_and_the_others_leave_it_to_it(disk: Path) -> None:
    keys, settings, io = keys_whose_first_writer_is(1, 4, 8), make_settings(disk), CountingIo()
    patient = dataclasses.replace(settings, stagger_s=600.0)
    with (
        Bench(patient, replica=0, replicas=4, io=io) as other,
        Bench(patient, replica=1, replicas=4) as first,
    ):
        other.ready()
        waiting = other.submit_store(keys)
        assert first.store(keys) == [DONE] * 8  # or the bench loses patience
        assert (first.count("stored"), io.rows) == (8, 0)
        other.fs.close()
        assert other.outcomes(waiting) == [Outcome.SHED] * 8


def test_a_first_writer_that_is_killed_in_the_middle_loses_nothing(
    disk: Path, tmp_path: Path
) -> None:
    """The others write what it had not published, each block once, and sweep what it left."""
    published = 16  # of small blocks so many are written, and get their names, together
    own = keys_whose_first_writer_is(0, 4, 20)
    prompt = (*own, *make_keys("others", 20))
    sign = tmp_path / "hangs"
    settings = make_settings(disk, threads=1)
    with Replicas(settings, 4, hang=(published, sign)) as replicas:
        replicas[0].begin("store", own)
        eventually(sign.exists, "the first writer does not write")
        assert len(block_files(disk)) == published
        began_s = time.monotonic()
        for index in (1, 2, 3):
            replicas[index].begin("store", prompt)
        eventually(lambda: len(block_files(disk)) >= published + 20, "the others do not write")
        # As long as it lives they leave alone what it says that it is writing, but not for ever.
        if time.monotonic() - began_s < turns._CLAIM_PATIENCE_S:
            assert len(block_files(disk)) == published + 20
        replicas[0].kill()
        assert [replicas[index].end() for index in (1, 2, 3)] == [[DONE] * 40] * 3
        assert len(block_files(disk)) == 40
        assert replicas.count("written_rows", but=0) == 40 - published
        assert replicas.count("stored", but=0) == 40 - published
        assert replicas.all_do("load", prompt, but=0) == [[DONE] * 40] * 3
        assert replicas.count("corrupt", but=0) == 0
        eventually(lambda: not leftovers(disk), "what the dead was writing stays")
    with Bench(make_settings(disk)).ready() as bench:
        assert_counted_right(bench, disk)


def test_a_writer_that_hangs_is_not_waited_for_for_ever(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather written twice than lost."""
    monkeypatch.setattr(turns, "_CLAIM_PATIENCE_S", 0.3)
    keys, sign, settings = (
        keys_whose_first_writer_is(0, 2, 1),
        tmp_path / "hangs",
        make_settings(disk),
    )
    with start(settings, 0, 2, hang=(0, sign)).ready() as stuck:
        stuck.begin("store", keys)
        eventually(sign.exists, "the first writer does not write")
        with Bench(settings, replica=1, replicas=2) as bench:
            assert bench.store(keys) == bench.load(keys) == [DONE]
            assert len(block_files(disk)) == 1


def test_what_a_killed_replica_was_writing_can_be_swept_and_what_a_living_one_writes_stays(
    disk: Path, tmp_path: Path
) -> None:
    sign, settings = tmp_path / "hangs", make_settings(disk)
    with start(settings, 0, 1, hang=(0, sign)).ready() as replica:
        replica.begin("store", make_keys("unfinished", 1))
        eventually(sign.exists, "it does not write")
        before = leftovers(disk)
        assert sweep(settings.paths) == 0
        assert leftovers(disk) == before != []
        replica.kill()
        assert sweep((*settings.paths, str(tmp_path / "nothing there"))) == len(before)
        assert list((disk / naming.WRITERS).iterdir()) == []
    with Bench(settings).ready() as bench:
        assert_counted_right(bench, disk)


def test_isolated_replicas_see_only_their_own_blocks_also_after_a_restart(disk: Path) -> None:
    settings = make_settings(disk, placement="per_replica")
    left, right, both = make_keys("left", 4), make_keys("right", 4), make_keys("both", 4)
    hits, misses = [Lookup.HIT], [Lookup.MISS]
    with (
        Bench(settings, replica=0, replicas=3) as first,
        Bench(settings, replica=1, replicas=3) as second,
        Bench(settings, replica=2, replicas=3) as third,
    ):
        assert first.store((*left, *both)) == second.store((*right, *both)) == [DONE] * 8
        assert first.count("stored") == second.count("stored") == 8
        assert first.lookup((*left, *both, *right)) == hits * 8 + misses * 4
        assert second.lookup((*left, *both, *right)) == misses * 4 + hits * 8
        assert first.load(right) == third.load(both) == [MISSING] * 4
    with Replicas(settings, 3) as replicas:
        assert replicas[0].lookup((*left, *both, *right)) == hits * 8 + misses * 4
        assert replicas[1].lookup((*left, *both, *right)) == misses * 4 + hits * 8
        assert replicas[2].lookup((*left, *both, *right)) == misses * 12
        assert replicas[0].load((*left, *both)) == [DONE] * 8
        assert replicas[1].load((*right, *both)) == [DONE] * 8
        assert replicas[0].load(right) == replicas[2].load(both) == [MISSING] * 4
    for key in both:
        for replica in (0, 1):
            assert (disk / block_path(FINGERPRINT, key, replica)).exists()
    assert len(block_files(disk)) == 16


def test_isolated_replicas_have_one_capacity_together(disk: Path) -> None:
    """What goes is what was used least recently, whose ever it is."""
    settings = make_settings(disk, placement="per_replica", capacity=12 * ROW_BYTES)
    with Replicas(settings, 2) as replicas:
        old, new = make_keys("the first replica has", 8), make_keys("the second has", 8)
        assert replicas[0].store(old) == [DONE] * 8

        def all_new_are_there() -> bool:
            # It drives out its own ones until it has learned of the others'.
            replicas[1].store(new)
            assert len(block_files(disk)) <= 12
            return replicas[1].load(new) == [DONE] * 8

        eventually(all_new_are_there, "what goes is what the second replica has just stored")
        assert replicas[0].load(old).count(DONE) == 4
        assert len(block_files(disk)) == 12


@pytest.fixture
def two_disks(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "nvme0", tmp_path / "nvme1"


def with_affinity(disks: tuple[Path, Path], **changes: Any) -> FilesystemSettings:
    near = {0: str(disks[0]), 1: str(disks[1]), 2: str(disks[0]), 3: str(disks[1])}
    paths = tuple(map(str, disks))
    return make_settings("unused", paths=paths, affinity=near, **changes)


def names(keys: Sequence[BlockKey]) -> set[str]:
    return {naming.block_name(key) for key in keys}


def test_a_replica_stores_to_its_path_and_the_others_find_its_blocks(
    two_disks: tuple[Path, Path],
) -> None:
    left, right = make_keys("of the first", 16), make_keys("of the second", 16)
    settings = with_affinity(two_disks)
    with (
        Bench(settings, replica=0, replicas=2) as first,
        start(settings, 1, 2).ready() as second,
    ):
        assert first.store(left) == second.store(right) == [DONE] * 16
        assert files_of(two_disks[0]).keys() == names(left)
        assert files_of(two_disks[1]).keys() == names(right)
        assert first.lookup(right) == second.lookup(left) == [Lookup.HIT] * 16
        assert first.load(right) == second.load(left) == [DONE] * 16


def test_a_prompt_is_written_to_one_path_though_replicas_prefer_different_ones(
    two_disks: tuple[Path, Path],
) -> None:
    prompt, later = make_keys("shared prompt", 32), make_keys("one after the other", 16)
    with Replicas(with_affinity(two_disks), 4) as replicas:
        assert replicas.all_do("store", prompt) == [[DONE] * 32] * 4
        assert replicas.count("written_rows") == replicas.count("stored") == 32
        assert sum(len(block_files(disk)) for disk in two_disks) == 32
        for index in range(4):
            assert replicas[index].store(later) == [DONE] * 16
        assert replicas.count("written_rows") == 48
        assert sum(len(block_files(disk)) for disk in two_disks) == 48
        assert replicas.all_do("load", (*prompt, *later)) == [[DONE] * 48] * 4


def test_a_replica_whose_path_is_out_stores_to_the_other_one(two_disks: tuple[Path, Path]) -> None:
    two_disks[1].write_text("in the way")
    keys = make_keys("elsewhere", 8)
    with Bench(with_affinity(two_disks), replica=1, replicas=2) as bench:
        assert bench.store(keys) == [DONE] * 8
        assert bench.load(keys) == [DONE] * 8
        assert files_of(two_disks[0]).keys() == names(keys)
