"""Whole files, by single calls and by compiled code: both do the same and say the same."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from backends import block
from backends.block import HEADER_BYTES
from backends.tier.base import Bytes
from backends.tier.filesystem import native
from backends.tier.filesystem.io import FileRead, FileStat, FileToRead, FileWrite, OsIo
from backends.tier.filesystem.native import NativeIo, make_io

SIZE = 3 * 4096
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOATIME
DAY_NS = 86_400 * 10**9


@pytest.fixture(params=["single calls", "compiled"])
def io(request: pytest.FixtureRequest) -> OsIo:
    if request.param == "single calls":
        return OsIo()
    compiled = native.compiled()
    # The project's own set-up builds it, so a machine of its tests without it is a fault.
    assert compiled is not None, "backends.tier.filesystem._files was not built"
    return NativeIo(compiled)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def page_aligned(fill: int = 0, size: int = SIZE) -> Bytes:
    data = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    data[:] = fill or np.arange(size) % 251
    return data


def sealed(data: Bytes) -> Bytes:
    """What a file of these bytes has."""
    other = page_aligned(size=data.size)
    other[:] = data
    block.seal(other, other.size - HEADER_BYTES)
    return other


def put(io: OsIo, directory: int, name: str) -> OSError | None:
    file = FileWrite(name, NEW, page_aligned(), 5 * DAY_NS + 7, 4 * DAY_NS + 9)
    return io.write_files(directory, [file], "none")[0]


def get(
    io: OsIo, directory: int, path: str, before_ns: int = 0, flags: int = READ
) -> tuple[FileRead, Bytes]:
    into = page_aligned(fill=0xEE)
    file = FileToRead(path, into, 9 * DAY_NS + 1, before_ns)
    [read] = io.read_files(directory, flags, [file], summed=True)
    if isinstance(read, OSError):
        raise read
    return read, into


def number_of(error: OSError | None) -> int | None:
    return None if error is None else error.errno


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_a_file_comes_back_as_it_was_written(
    io: OsIo, directory: int, tmp_path: Path, direct: int, durability: str
) -> None:
    file = FileWrite("a", NEW | direct, page_aligned(), 5 * DAY_NS + 7, 4 * DAY_NS + 9)
    other = file._replace(name="b", data=page_aligned(fill=3))
    assert io.write_files(directory, [file, other], durability) == [None, None]
    found = (tmp_path / "a").stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (5 * DAY_NS + 7, 4 * DAY_NS + 9)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert (tmp_path / "b").read_bytes() == sealed(page_aligned(fill=3)).tobytes()
    read, into = get(io, directory, "a", flags=READ | direct)
    assert read._replace(payload_sum=None) == FileRead(
        found.st_mode, SIZE, found.st_dev, found.st_ino, found.st_atime_ns, SIZE, None
    )
    assert read.payload_sum in (None, xxhash.xxh3_64_intdigest(into[HEADER_BYTES:]))
    assert np.array_equal(into, sealed(page_aligned()))


def test_a_file_that_cannot_be_written_does_not_keep_the_others_back(
    io: OsIo, directory: int, tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    names = ["taken", "a", "link", "none/b", "c"]
    files = [FileWrite(name, NEW, page_aligned(), 0, 0) for name in names]
    errors = io.write_files(directory, files, "none")
    assert [number_of(error) for error in errors] == [
        *(errno.EEXIST, None, errno.EEXIST, errno.ENOENT, None)
    ]
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "c").stat().st_size == SIZE


def written_bytes() -> int:
    """What this process has had written to disks."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))


@pytest.mark.usefixtures("ring")
def test_bytes_that_go_through_one_buffer_are_written_once(directory: int, tmp_path: Path) -> None:
    """What is still under way is neither written again nor changed."""
    size, count = 64 * 4096, 40
    for n in range(count):
        (tmp_path / str(n)).write_bytes(bytes(size))
    os.sync()
    try:
        os.close(os.open(tmp_path / "0", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the disk of temporary files has no O_DIRECT")
    rows = [page_aligned(fill=n + 1, size=size) for n in range(count)]
    files = [FileWrite(str(n), os.O_WRONLY | os.O_DIRECT, rows[n], 1, 1) for n in range(count)]
    before = written_bytes()
    results = compiled_io().write_files(directory, files, "none", page_aligned(size=4 * size))
    written = written_bytes() - before
    assert results == [None] * count
    if written < count * size // 2:
        pytest.skip("the disk of temporary files keeps no count of what is written to it")
    assert written < 1.2 * count * size
    for n in range(count):
        assert (tmp_path / str(n)).read_bytes() == sealed(rows[n]).tobytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told(io: OsIo) -> None:
    devices = os.open("/dev", os.O_PATH | os.O_DIRECTORY)
    try:
        file = FileWrite("full", os.O_WRONLY, page_aligned(), 0, 0)
        assert number_of(io.write_files(devices, [file], "none")[0]) == errno.ENOSPC
    finally:
        os.close(devices)


def test_a_use_is_shown_where_the_last_one_is_old(io: OsIo, directory: int, tmp_path: Path) -> None:
    assert put(io, directory, "a") is None
    kept, _ = get(io, directory, "a", before_ns=5 * DAY_NS)
    shown, _ = get(io, directory, "a", before_ns=6 * DAY_NS)
    found = (tmp_path / "a").stat()
    assert kept.st_atime_ns == 5 * DAY_NS + 7
    assert (shown.st_atime_ns, found.st_atime_ns) == (9 * DAY_NS + 1, 9 * DAY_NS + 1)
    assert found.st_mtime_ns == 4 * DAY_NS + 9


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE - 1, SIZE + 1])
def test_of_a_file_of_another_size_nothing_is_read(
    io: OsIo, directory: int, tmp_path: Path, size: int
) -> None:
    (tmp_path / "a").write_bytes(bytes(size))
    read, into = get(io, directory, "a", before_ns=1 << 62)
    assert (read.st_size, read.got, read.error) == (size, 0, None)
    assert (into == 0xEE).all()


def test_what_is_no_file_is_not_read(io: OsIo, directory: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read, _ = get(io, directory, "pipe")
    assert (stat.S_ISFIFO(read.st_mode), read.got) == (True, 0)
    (tmp_path / "sub").mkdir()
    read, _ = get(io, directory, "sub")
    assert (stat.S_ISDIR(read.st_mode), read.got) == (True, 0)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("none", errno.ENOENT),
        ("none/a", errno.ENOENT),
        ("real/a/b", errno.ENOTDIR),
        ("link", errno.ELOOP),
        ("linked/a", errno.ELOOP),
        ("../outside", errno.EXDEV),
    ],
)
def test_nothing_leads_out_of_the_directory(
    io: OsIo, directory: int, tmp_path: Path, path: str, number: int
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(bytes(SIZE))
    os.symlink(tmp_path / "real" / "a", tmp_path / "link")
    os.symlink(tmp_path / "real", tmp_path / "linked")
    with pytest.raises(OSError, match=os.strerror(number)):
        get(io, directory, path)
    whole, _ = get(io, directory, "real/a")
    assert whole.got == SIZE


def test_a_file_that_cannot_be_read_does_not_keep_the_others_back(io: OsIo, directory: int) -> None:
    assert put(io, directory, "a") is None
    files = [FileToRead(path, page_aligned(fill=1), 0, 0) for path in ("a", "none", "a")]
    first, missing, last = io.read_files(directory, READ, files)
    assert isinstance(missing, FileNotFoundError)
    for read, file in ((first, files[0]), (last, files[2])):
        assert isinstance(read, FileRead)
        assert (read.got, read.error) == (SIZE, None)
        assert np.array_equal(file.into, sealed(page_aligned()))
    assert (files[1].into == 1).all()


def test_bytes_are_the_same_through_a_bounce_buffer(io: OsIo, directory: int) -> None:
    """Also where it is shorter than the file."""
    for pages in (1, 2, 3):
        buffer = page_aligned()[: 4096 * pages]
        file = FileWrite(f"{pages}", NEW | os.O_DIRECT, page_aligned(), 0, 0)
        assert io.write_files(directory, [file], "none", buffer) == [None]
        into = FileToRead(f"{pages}", page_aligned(fill=1), 0, 0)
        [read] = io.read_files(directory, READ | os.O_DIRECT, [into], buffer)
        assert isinstance(read, FileRead)
        assert read.got == SIZE
        assert np.array_equal(into.into, sealed(page_aligned()))


def compiled_io() -> NativeIo:
    return NativeIo(pytest.importorskip("backends.tier.filesystem._files"))


# Around every place at which the sum goes on in another way: a stripe, a block of stripes.
SIZES = [4096 + n for n in (*range(241, 330), 1023, 1024, 1025, 1088, 2048, 2049)]
SIZES += [4096 * pages for pages in (2, 3, 9, 65)]


@pytest.mark.parametrize("buffered", [False, True])
def test_compiled_sums_are_the_librarys(directory: int, buffered: bool) -> None:
    """What is written is sealed as block.seal does it, and what is read has the payload's sum."""
    io = compiled_io()
    random = np.random.default_rng(5)
    buffer = page_aligned(size=4096 * 66) if buffered else None
    for size in SIZES:
        data = random.integers(0, 256, size, np.uint8)
        data[140:144] = 0
        expected = sealed(data)
        file = FileWrite(f"{size}", NEW, data, 0, 0)
        assert io.write_files(directory, [file], "none", buffer) == [None]
        into = FileToRead(f"{size}", page_aligned(fill=1, size=size), 0, 0)
        for summed in (True, False):
            into.into[:] = 1
            [read] = io.read_files(directory, READ, [into], buffer, summed=summed)
            assert isinstance(read, FileRead)
            wanted = xxhash.xxh3_64_intdigest(expected[HEADER_BYTES:]) if summed else None
            assert (size, read.payload_sum) == (size, wanted)
            assert np.array_equal(into.into, expected), size
        assert np.array_equal(data, expected), size


@pytest.mark.parametrize("portable", [False, True])
def test_sums_are_the_librarys_on_every_machine(portable: bool) -> None:
    compiled = native.compiled()
    assert compiled is not None
    data = np.random.default_rng(6).integers(0, 256, 70_000, np.uint8)
    for size in (*range(241, 2200), 65_535, 65_536, 70_000):
        # From where no word is aligned, too.
        part = data[size % 7 :][:size]
        assert compiled.sum(part, portable) == xxhash.xxh3_64_intdigest(part), size
    with pytest.raises(ValueError, match="240 bytes"):
        compiled.sum(data[:240], portable)


@pytest.mark.parametrize("buffered", [False, True])
def test_a_block_whose_seal_holds_is_written_as_it_is(
    io: OsIo, directory: int, tmp_path: Path, buffered: bool
) -> None:
    """A checksum made anew would hide what has happened to its bytes since."""
    buffer = page_aligned() if buffered else None
    damaged = sealed(page_aligned())
    damaged[HEADER_BYTES + 5] ^= 1
    before = damaged.tobytes()
    file = FileWrite("a", NEW, damaged, 0, 0)
    assert io.write_files(directory, [file], "none", buffer) == [None]
    assert (tmp_path / "a").read_bytes() == before == damaged.tobytes()
    # A header that was changed since has no seal any more.
    damaged[20] ^= 1
    anew = sealed(damaged).tobytes()
    assert io.write_files(directory, [file._replace(name="b")], "none", buffer) == [None]
    assert (tmp_path / "b").read_bytes() == anew == damaged.tobytes()


@pytest.fixture(params=[True, False], ids=["together", "one by one"])
def ring(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether several writes are handed to the kernel at once."""
    compiled = native.compiled()
    assert compiled is not None
    compiled.use_ring(request.param)
    yield request.param
    compiled.use_ring(True)


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
@pytest.mark.parametrize("room", [1, 2, 4, 30])
@pytest.mark.usefixtures("ring")
def test_files_that_go_through_one_buffer_are_not_mixed_up(
    directory: int, tmp_path: Path, room: int, direct: int
) -> None:
    io, buffer = compiled_io(), page_aligned(size=SIZE * room)
    for round_number in range(3):
        files = [
            FileWrite(f"{round_number}_{n}", NEW | direct, page_aligned(fill=n + 1), n, 7 * n)
            for n in range(19)
        ]
        files[4] = files[4]._replace(name="none/a")
        files[9] = files[9]._replace(name="taken")
        (tmp_path / "taken").write_text("is here")
        results = io.write_files(directory, files, "none", buffer)
        wrong = {n: number_of(error) for n, error in enumerate(results) if error}
        assert wrong == {4: errno.ENOENT, 9: errno.EEXIST}
        for n, file in enumerate(files):
            if n not in wrong:
                found = tmp_path / file.name
                assert found.read_bytes() == sealed(page_aligned(fill=n + 1)).tobytes(), n
                assert found.stat().st_mtime_ns == 7 * n
    assert (tmp_path / "taken").read_text() == "is here"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.usefixtures("ring")
def test_a_full_disk_is_told_for_each_of_several() -> None:
    devices = os.open("/dev", os.O_PATH | os.O_DIRECTORY)
    try:
        files = [FileWrite("full", os.O_WRONLY, page_aligned(), 0, 0)] * 3
        errors = compiled_io().write_files(devices, files, "none", page_aligned(size=4 * SIZE))
        assert [number_of(error) for error in errors] == [errno.ENOSPC] * 3
    finally:
        os.close(devices)


def test_what_was_taken_in_part_is_gone_on_with_and_told(tmp_path: Path) -> None:
    """By a process that may not make files so large."""
    code = """
import mmap, os, resource, signal, sys
import numpy as np
from backends.tier.filesystem import native
from backends.tier.filesystem.io import FileWrite
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
rows = np.frombuffer(mmap.mmap(-1, 5 * 12288), np.uint8).reshape(5, 12288)
at = os.open(sys.argv[1], os.O_PATH)
files = [FileWrite(str(n), os.O_WRONLY | os.O_CREAT, rows[n], 0, 0) for n in range(3)]
io = native.NativeIo(native.compiled())
print([error and error.errno for error in io.write_files(at, files, "none", rows[3:].reshape(-1))])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == (f"{[errno.EFBIG] * 3}\n", "")
    assert [(tmp_path / str(n)).stat().st_size for n in range(3)] == [8192] * 3


def test_a_threads_queue_goes_with_it(tmp_path: Path) -> None:
    """In a process of its own, where nothing else opens or closes a file."""
    code = """
import mmap, os, sys, threading, time
import numpy as np
from backends.tier.filesystem import native
from backends.tier.filesystem.io import FileWrite
rows = np.frombuffer(mmap.mmap(-1, 8 * 12288), np.uint8).reshape(8, 12288)
at = os.open(sys.argv[1], os.O_PATH)
io = native.NativeIo(native.compiled())

def write(name):
    files = [FileWrite(f"{name}_{n}", os.O_WRONLY | os.O_CREAT, rows[n], 0, 0) for n in range(4)]
    assert io.write_files(at, files, "none", rows[4:].reshape(-1)) == [None] * 4

def queues():
    number = 0
    for fd in range(64):
        try:
            number += "io_uring" in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass
    return number

write("here")
found = [queues()]
for number in range(3):
    thread = threading.Thread(target=write, args=(str(number),))
    thread.start()
    thread.join()
    # The interpreter is done with a thread a moment before the thread itself has ended.
    until = time.monotonic() + 20
    while queues() != found[0] and time.monotonic() < until:
        time.sleep(0.001)
    found.append(queues())
# A child has its parent's queue, and does without.
child = os.fork()
if not child:
    write("child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
write("after")
print(*found)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.stderr == ""
    # None at all where the kernel, or a container, does not have it.
    assert ended.stdout.split() in (["1"] * 4, ["0"] * 4)
    assert len(list(tmp_path.iterdir())) == 4 * 6


def test_what_is_shorter_than_a_block_is_not_written(directory: int, tmp_path: Path) -> None:
    file = FileWrite("a", NEW, page_aligned(size=4096 + 240), 0, 0)
    with pytest.raises(ValueError, match="a block of 4336 bytes"):
        compiled_io().write_files(directory, [file], "none")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_not_read_whole_has_no_sum(
    io: OsIo, directory: int, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(bytes(SIZE - 4096))
    read, _ = get(io, directory, "a")
    assert read.payload_sum is None


def test_names_are_given_once(io: OsIo, directory: int, tmp_path: Path) -> None:
    for name in ("1", "2", "taken"):
        (tmp_path / name).write_text(name)
    names = [("1", directory, "a"), ("none", directory, "b"), ("2", directory, "taken")]
    errors = io.publish_all(directory, names)
    assert [number_of(error) for error in errors] == [None, errno.ENOENT, errno.EEXIST]
    assert isinstance(errors[2], FileExistsError)
    assert (tmp_path / "a").read_text() == "1"
    assert ((tmp_path / "taken").read_text(), (tmp_path / "2").read_text()) == ("taken", "2")


def test_names_are_taken_over(io: OsIo, directory: int, tmp_path: Path) -> None:
    for name in ("1", "2", "old"):
        (tmp_path / name).write_text(name)
    names = [(directory, "1", directory, "old"), (directory, "none", directory, "b")]
    errors = io.replace_all([*names, (directory, "2", directory, "new")])
    assert [number_of(error) for error in errors] == [None, errno.ENOENT, None]
    assert ((tmp_path / "old").read_text(), (tmp_path / "new").read_text()) == ("1", "2")


def test_all_are_looked_at(io: OsIo, directory: int, tmp_path: Path) -> None:
    assert put(io, directory, "a") is None
    os.link(tmp_path / "a", tmp_path / "again")
    os.symlink("none", tmp_path / "link")
    file, missing, link = io.stat_all([(directory, name) for name in ("a", "none", "link")])
    found = (tmp_path / "a").stat()
    assert file == FileStat(found.st_mode, SIZE, 2, found.st_atime_ns)
    assert isinstance(missing, FileNotFoundError)
    assert isinstance(link, FileStat)
    assert stat.S_ISLNK(link.st_mode)


def test_nothing_is_left_open(io: OsIo, directory: int, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for n in range(20):
        put(io, directory, f"{n}")
        put(io, directory, "none/a")
        get(io, directory, f"{n}")
        get(io, directory, "sub")
    assert len(os.listdir("/proc/self/fd")) == before


def test_compiled_code_refuses_what_it_was_not_made_for() -> None:
    compiled = native.compiled()
    assert compiled is not None
    for wrong in (["a"], [("a",)], [(0, 1)]):
        with pytest.raises(TypeError):
            compiled.stat(wrong)
    with pytest.raises(TypeError):
        compiled.write(0, [("a", 0, "no bytes", 0, 0)], "none", None)
    with pytest.raises(ValueError, match="whole pages"):
        compiled.write(0, [], "none", bytearray(4095))
    with pytest.raises((TypeError, BufferError)):
        compiled.read(0, 0, [("a", b"not to be written to", 0, 0)], None)


def test_without_a_compiler_single_calls_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_io(), NativeIo)
    monkeypatch.setattr(native, "compiled", lambda: None)
    assert type(make_io()) is OsIo
