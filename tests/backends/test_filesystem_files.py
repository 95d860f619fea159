"""How blocks stand on the disk, and what becomes of files that are not right."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filesystem_kit import (
    ROW_BYTES,
    Bench,
    Faults,
    HookedIo,
    assert_counted_right,
    block_files,
    block_path,
    leftovers,
    make_settings,
    statuses,
)

from backends.block import HEADER_BYTES, BlockKey
from backends.errors import ConfigError, TierError
from backends.testing import FINGERPRINT, make_keys, stored_block
from backends.tier.base import Lookup, Outcome
from backends.tier.filesystem import naming
from backends.tier.filesystem.io import OsIo

DONE, CORRUPT, MISSING = Outcome.DONE, Outcome.CORRUPT, Outcome.MISSING
OTHER = bytes(reversed(FINGERPRINT))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_a_block_is_one_file_with_its_header_named_by_its_key(disk: Path) -> None:
    key = BlockKey(b"\x01\xab" * 16, 7)
    with Bench(make_settings(disk)) as bench:
        assert bench.store([key]) == [DONE]
    [file] = block_files(disk)
    assert file == disk / block_path(FINGERPRINT, key)
    assert file.name == "01ab" * 16 + "_7.kvb"
    assert file.read_bytes() == stored_block(key, FINGERPRINT, ROW_BYTES).tobytes()


def test_hashes_of_any_length_and_content_have_names(disk: Path) -> None:
    keys = [BlockKey(os.urandom(n), n) for n in (0, 1, 8, 32, 64)]
    keys += [BlockKey(b"../../etc/passwd", 0), BlockKey(b"\0/\n", 2**32 - 1)]
    with Bench(make_settings(disk)) as bench:
        assert bench.store(keys) == [DONE] * len(keys)
    with Bench(make_settings(disk)).ready() as again:
        assert again.load(keys) == [DONE] * len(keys)
    assert len(block_files(disk)) == len(keys)
    assert {naming.parse_block_name(file.name) for file in block_files(disk)} == set(keys)


def test_directories_are_0700_and_files_0600(disk: Path) -> None:
    previous = os.umask(0)
    try:
        with Bench(make_settings(disk)) as bench:
            bench.store(make_keys("modes", 3))
            for path, found in statuses((disk, *disk.rglob("*"))).items():
                expected = 0o700 if stat.S_ISDIR(found.st_mode) else 0o600
                assert stat.S_IMODE(found.st_mode) == expected, path
    finally:
        os.umask(previous)


def test_the_manifest_says_what_the_namespace_is_made_of(disk: Path) -> None:
    with Bench(make_settings(disk)):
        pass
    document = json.loads((disk / FINGERPRINT.hex() / "manifest.json").read_text())
    assert document["fingerprint"] == FINGERPRINT.hex()
    assert document["row_bytes"] == ROW_BYTES
    assert document["made_of"]["purpose"] == "test"


def test_blocks_of_another_size_under_the_same_fingerprint_are_refused(disk: Path) -> None:
    with Bench(make_settings(disk)) as bench:
        bench.store(make_keys("small", 1))
    with pytest.raises(TierError, match=r"holds blocks of 16384 bytes, expected 32768.*another"):
        Bench(make_settings(disk), row_bytes=2 * ROW_BYTES)


def test_a_damaged_manifest_is_written_anew(disk: Path) -> None:
    with Bench(make_settings(disk)):
        pass
    manifest = disk / FINGERPRINT.hex() / "manifest.json"
    manifest.write_text("{")
    with Bench(make_settings(disk)):
        assert json.loads(manifest.read_text())["row_bytes"] == ROW_BYTES


def test_o_direct_is_probed_and_the_reason_is_shown(disk: Path) -> None:
    with Bench(make_settings(disk, direct="off")) as bench:
        assert "buffered: direct is off" in bench.fs.describe()[0]
    with Bench(make_settings(disk)) as bench:
        [line] = bench.fs.describe()
        assert ": direct: " in line or ": buffered: " in line


class _NoDirect(OsIo):
    def open(self, directory: int, name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return super().open(directory, name, flags)


def test_without_o_direct_it_is_buffered_or_refused_as_one_wants(disk: Path) -> None:
    with Bench(make_settings(disk), io=_NoDirect()) as bench:
        assert "buffered: open with O_DIRECT gives Invalid argument" in bench.fs.describe()[0]
        keys = make_keys("buffered", 4)
        assert bench.store(keys) == [DONE] * 4
        assert bench.load(keys) == [DONE] * 4
    with pytest.raises(TierError, match="direct is on, but the path cannot"):
        Bench(make_settings(disk, direct="on"), io=_NoDirect())


class _Halves(OsIo):
    """Moves at most half of what it is asked to, as the kernel may."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().preadv(fd, [self._half(buffers[0])], offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().pwritev(fd, [self._half(buffers[0])], offset)

    @staticmethod
    def _half(buffer: memoryview) -> memoryview:
        view = memoryview(buffer)
        # Small ones are the ledger's, which are not gone on with.
        return view if len(view) <= 12288 else view[: len(view) // 8192 * 4096]


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_short_reads_and_writes_are_gone_on_with(disk: Path, direct: str) -> None:
    keys = make_keys("short", 4)
    with Bench(make_settings(disk, direct=direct), io=_Halves()) as bench:
        assert bench.store(keys) == [DONE] * 4
        assert bench.load(keys) == [DONE] * 4
    with Bench(make_settings(disk)).ready() as again:
        assert again.load(keys) == [DONE] * 4


@pytest.mark.parametrize(
    ("durability", "flushes"),
    [("none", set()), ("data", {"fdatasync"}), ("full", {"fsync"})],
)
def test_durability_says_which_flushes_happen(
    disk: Path, durability: str, flushes: set[str]
) -> None:
    faults = Faults()
    with Bench(make_settings(disk, durability=durability), io=HookedIo(faults)) as bench:
        bench.ready()
        before = faults.calls.copy()
        assert bench.store(make_keys("durable", 4)) == [DONE] * 4
        made = faults.calls - before
    assert {name for name in ("fsync", "fdatasync") if made[name]} == flushes
    if durability == "data":
        assert made["fdatasync"] == 4
    if durability == "full":
        # Each file, and the directories that got new names.
        assert made["fsync"] > 4


def overwrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(change(file.read_bytes())), None)[1]


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda file: (file.unlink(), make(file), None)[2]


KEY, STRANGER = make_keys("victim", 1)[0], make_keys("stranger", 1)[0]
DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped payload bit": overwrite(lambda b: b[:9000] + bytes([b[9000] ^ 4]) + b[9001:]),
    "flipped header bit": overwrite(lambda b: b[:97] + bytes([b[97] ^ 4]) + b[98:]),
    "truncated": overwrite(lambda b: b[:-4096]),
    "truncated in the header": overwrite(lambda b: b[:100]),
    "empty": overwrite(lambda b: b""),
    "longer": overwrite(lambda b: b + b"more"),
    "a foreign file": overwrite(lambda b: b"hello" * 10),
    "a foreign file of the right size": overwrite(lambda b: os.urandom(len(b))),
    "all zero": overwrite(lambda b: bytes(len(b))),
    "another key": overwrite(lambda b: stored_block(STRANGER, FINGERPRINT, ROW_BYTES).tobytes()),
    "another fingerprint": overwrite(lambda b: stored_block(KEY, OTHER, ROW_BYTES).tobytes()),
    "an old version": overwrite(lambda b: b[:8] + struct.pack("<I", 0) + b[12:]),
    "never sealed": overwrite(lambda b: b[:140] + bytes(4) + b[144:]),
    "a symlink": replace_by(lambda file: file.symlink_to("/etc/hostname")),
    "a symlink to a right block": replace_by(lambda file: file.symlink_to(file.with_suffix(".x"))),
    "a directory": replace_by(lambda file: file.mkdir()),
    "a fifo": replace_by(lambda file: os.mkfifo(file)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_wrong_file_is_a_miss_is_quarantined_and_is_replaced(disk: Path, what: str) -> None:
    keys = (*make_keys("healthy", 3), KEY)
    with Bench(make_settings(disk)) as bench:
        assert bench.store(keys) == [DONE] * 4
        file = disk / block_path(FINGERPRINT, KEY)
        file.with_suffix(".x").write_bytes(file.read_bytes())
        DAMAGE[what](file)
        assert bench.load(keys) == [DONE] * 3 + [CORRUPT]
        assert bench.lookup(keys) == [Lookup.HIT] * 3 + [Lookup.MISS]
        assert bench.load([KEY]) == [MISSING]
        assert (bench.count("corrupt"), bench.count("quarantined")) == (1, 1)
        assert [f.name.endswith(file.name) for f in quarantined(disk)] == [True]
        assert bench.store([KEY]) == [DONE]
        assert bench.load(keys) == [DONE] * 4
        file.with_suffix(".x").unlink()
        assert_counted_right(bench, disk)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_wrong_file_that_nobody_has_loaded_is_replaced_by_a_store(disk: Path, what: str) -> None:
    with Bench(make_settings(disk)) as bench:
        assert bench.store([KEY]) == [DONE]
        file = disk / block_path(FINGERPRINT, KEY)
        file.with_suffix(".x").write_bytes(file.read_bytes())
        DAMAGE[what](file)
        assert bench.store([KEY]) == [DONE]
        assert bench.load([KEY]) == [DONE]
        assert len(quarantined(disk)) == 1


def test_a_wrong_file_is_replaced_by_a_store_of_a_tier_that_does_not_know_it(disk: Path) -> None:
    file = disk / block_path(FINGERPRINT, KEY)
    with Bench(make_settings(disk)) as bench:
        bench.ready()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"not a block")
        assert bench.store([KEY]) == [DONE]
        assert bench.load([KEY]) == [DONE]
        assert len(quarantined(disk)) == 1


def test_a_right_file_of_another_origin_is_not_written_again(disk: Path) -> None:
    file = disk / block_path(FINGERPRINT, KEY)
    with Bench(make_settings(disk)) as bench:
        bench.ready()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(stored_block(KEY, FINGERPRINT, ROW_BYTES).tobytes())
        inode = file.stat().st_ino
        assert bench.store([KEY]) == [DONE]
        assert file.stat().st_ino == inode
        assert (bench.count("stored"), bench.count("dedup_skips")) == (0, 1)


def test_the_quarantine_keeps_the_newest_within_its_limit(disk: Path) -> None:
    keys = make_keys("many wrong", 6)
    settings = make_settings(disk, quarantine_limit_bytes=3 * ROW_BYTES)
    with Bench(settings) as bench:
        bench.store(keys)
        for key in keys:
            with (disk / block_path(FINGERPRINT, key)).open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(b"!")
            assert bench.load([key]) == [CORRUPT]
        names = [file.name.partition("_")[2] for file in quarantined(disk)]
        assert names == [naming.block_name(key) for key in keys[3:]]
        assert bench.count("quarantined") == 6
        assert_counted_right(bench, disk)


def test_links_below_the_path_are_not_followed(disk: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    leaf = (disk / block_path(FINGERPRINT, KEY)).parent
    leaf.parent.mkdir(parents=True)
    leaf.symlink_to(outside)
    with Bench(make_settings(disk)) as bench:
        assert bench.store([KEY]) != [DONE]
        (outside / naming.block_name(KEY)).write_bytes(
            stored_block(KEY, FINGERPRINT, ROW_BYTES).tobytes()
        )
        assert bench.lookup([KEY]) == [Lookup.MISS]
        assert bench.load([KEY]) != [DONE]
    assert [file.name for file in outside.iterdir()] == [naming.block_name(KEY)]


@pytest.mark.parametrize("lacks", ["_renameat2", "_has_openat2"])
def test_it_works_where_the_kernel_or_the_filesystem_lacks_newer_calls(
    disk: Path, tmp_path: Path, lacks: str
) -> None:
    io = OsIo()
    setattr(io, lacks, None)
    keys = make_keys("older kernel", 4)
    (tmp_path / "outside").mkdir()
    with Bench(make_settings(disk), io=io) as first, Bench(make_settings(disk), io=io) as second:
        second.ready()
        assert first.store(keys) == [DONE] * 4
        assert second.store(keys) == [DONE] * 4
        assert (second.count("stored"), second.count("dedup_skips")) == (0, 4)
        assert second.load(keys) == [DONE] * 4
        leaf = (disk / block_path(FINGERPRINT, KEY)).parent
        assert not leaf.exists()
        leaf.symlink_to(tmp_path / "outside")
        assert first.store([KEY]) != [DONE]
        assert leftovers(disk) == []
    assert list((tmp_path / "outside").iterdir()) == []


def test_the_path_itself_may_be_a_link(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    disk.symlink_to(tmp_path / "real")
    with Bench(make_settings(disk)) as bench:
        assert bench.store([KEY]) == [DONE]
        assert bench.load([KEY]) == [DONE]


def test_a_store_leaves_no_unfinished_file(disk: Path) -> None:
    with Bench(make_settings(disk)) as bench:
        bench.store(make_keys("clean", 8))
        assert leftovers(disk) == []
    assert list((disk / naming.WRITERS).iterdir()) == []


def test_namespaces_do_not_see_each_other(disk: Path) -> None:
    with (
        Bench(make_settings(disk)) as ours,
        Bench(make_settings(disk), fingerprint=OTHER) as theirs,
    ):
        assert ours.store([KEY]) == [DONE]
        assert theirs.lookup([KEY]) == [Lookup.MISS]
        assert theirs.store([KEY]) == [DONE]
        assert ours.load([KEY]) == theirs.load([KEY]) == [DONE]
    assert len(block_files(disk)) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"paths": ()}, "paths is empty"),
        ({"paths": ("/a", "/a/")}, "paths repeat"),
        ({"capacity": 0}, "capacity is 0"),
        ({"high_watermark": 0.5, "low_watermark": 0.9}, "low <= high"),
        ({"threads": 0}, "threads is 0"),
        ({"affinity": {0: "/elsewhere"}}, "affinity names"),
        ({"retry_s": 0.0}, "retry_s"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_wrong(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings("/a", **changes)


def test_a_capacity_below_one_block_is_refused(disk: Path) -> None:
    with pytest.raises(TierError, match="expected at least 16384, one block"):
        Bench(make_settings(disk, capacity=ROW_BYTES - 1))


def test_checks_can_be_reduced_to_the_header(disk: Path) -> None:
    with Bench(make_settings(disk, verify=False)) as bench:
        assert bench.store([KEY]) == [DONE]
        file = disk / block_path(FINGERPRINT, KEY)
        data = bytearray(file.read_bytes())
        assert bench.load([KEY]) == [DONE]
        data[16:20] = struct.pack("<I", 9)
        file.write_bytes(data)
        assert bench.load([KEY]) == [CORRUPT]


def test_a_row_is_stored_whatever_its_place_in_memory(disk: Path) -> None:
    keys = make_keys("places", 32)
    with Bench(make_settings(disk), rows=40) as bench:
        rows = bench.take(32)[::-1]
        for key, row in zip(keys, rows, strict=True):
            bench.rows.fill(row, key)
        assert bench.outcomes(bench.submit_rows(keys, rows)) == [DONE] * 32
        assert bench.load(keys) == [DONE] * 32
        assert np.unique([file.stat().st_size for file in block_files(disk)]).tolist() == [
            ROW_BYTES
        ]


def quarantined(disk: Path) -> list[Path]:
    return sorted((disk / naming.QUARANTINE).iterdir())
