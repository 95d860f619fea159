"""Find region files in /dev/shm, tell which belong to nobody any more, and remove those.

An owner holds an flock on its file from before the file has a name until it ends, however it ends:
a free lock is the proof that the owner is gone. A file is removed only if it is a regular file of
our own user, its lock can be had, and the name still means the very file that was locked. Links
are never followed. Removing a name takes no memory from a process that has mapped the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends import machine
from backends.errors import RegionError
from backends.region import header as region_header
from backends.region.claim import describe_process
from backends.region.node.spec import is_index
from backends.region.spec import HEADER_BYTES, NAME_PREFIX, SHM_DIRECTORY

# A name that is another file at every look is somebody's game; it then counts as not to be opened.
_LOOKS = 16


@dataclass(frozen=True, slots=True)
class RegionFile:
    """What stands under a `kvquay_*` name.

    `kind` is file, symlink, directory or special file; `lock` is held, free or unknown (it may not
    be opened). Header fields are None where page 0 is not that of a region. `owner_alive` is None
    where it cannot be known, as for a pid of another pid namespace. `stale` says that it has no
    owner any more; it is `reapable` if it is ours besides, and `reason` says why or why not.
    `allocated_bytes` is the memory it holds, `size_bytes` its length.
    """

    path: str
    kind: str
    uid: int
    size_bytes: int
    allocated_bytes: int
    device: int
    inode: int
    lock: str
    engine_id: str | None
    run_id: str | None
    owner_pid: int | None
    owner_start_time: int | None
    owner_alive: bool | None
    reapable: bool
    reason: str

    @property
    def stale(self) -> bool:
        return self.kind == "file" and self.lock == "free"


@dataclass(frozen=True, slots=True)
class ReapResult:
    """What was done about one file; `removed` is False in a dry run, where `reason` tells."""

    path: str
    size_bytes: int
    removed: bool
    reason: str


def find_stale(directory: str = SHM_DIRECTORY) -> list[RegionFile]:
    """Every `kvquay_*` entry of `directory`, by name, live ones too; see `reapable`.

    Raises OSError where the directory cannot be read.
    """
    found = (
        inspect(os.path.join(directory, name))
        for name in sorted(os.listdir(directory))
        if name.startswith(NAME_PREFIX)
    )
    return [file for file in found if file is not None]


def reap(files: Sequence[RegionFile], *, apply: bool) -> list[ReapResult]:
    """Remove those of `files` that are still stale now; with `apply=False` only say which."""
    results = []
    for file in files:
        if not file.reapable:
            results.append(ReapResult(file.path, file.size_bytes, False, file.reason))
        elif not apply:
            reason = f"would be removed: {file.reason}"
            results.append(ReapResult(file.path, file.size_bytes, False, reason))
        else:
            results.append(_remove(file))
    return results


def inspect(path: str) -> RegionFile | None:
    """Look at one name without following links or waiting; None if nothing has it.

    Raises OSError where the system refuses to tell.
    """
    lock: str = "unknown"
    header: region_header.RegionHeader | None = None
    for _ in range(_LOOKS):
        try:
            status = os.lstat(path)
            kind = _kind(status)
            seen = _look_inside(path, status) if kind == "file" else ("unknown", None)
        except FileNotFoundError:
            return None
        if seen is not None:
            lock, header = seen
            break
    alive = None if header is None else _owner_alive(header)
    reapable, reason = _verdict(kind, status.st_uid, lock, header, alive)
    return RegionFile(
        path=path,
        kind=kind,
        uid=status.st_uid,
        size_bytes=status.st_size,
        allocated_bytes=status.st_blocks * 512,
        device=status.st_dev,
        inode=status.st_ino,
        lock=lock,
        engine_id=header.engine_id if header else None,
        run_id=header.run_id if header else None,
        owner_pid=header.owner_pid if header else None,
        owner_start_time=header.owner_start_time if header else None,
        owner_alive=alive,
        reapable=reapable,
        reason=reason,
    )


def _look_inside(
    path: str, status: os.stat_result
) -> tuple[str, region_header.RegionHeader | None] | None:
    """State of the lock, and the header; None if `path` is another file than `status` by now."""
    try:
        with _opened(path) as fd:
            if not _same_file(os.fstat(fd), status):
                return None
            lock = "free" if try_lock(fd, fcntl.LOCK_SH) else "held"
            header = _header(fd, path)
            # The users of a node's index share its lock.
            shared = header is not None and is_index(header.engine_id, header.run_id)
            if shared and lock == "free" and not try_lock(fd, fcntl.LOCK_EX):
                lock = "held"
            return lock, header
    except PermissionError:
        return "unknown", None
    except OSError as error:
        # A symlink has come in its place.
        if error.errno == errno.ELOOP:
            return None
        raise


def describe_owner(file: RegionFile) -> str:
    """Who made a file: engine_id, run, pid, start time and command, as far as known."""
    if file.owner_pid is None:
        return f"a process of uid {file.uid} (page 0 is not that of a region)"
    about = f"engine_id {file.engine_id}, run {file.run_id}, "
    if file.owner_alive:
        return about + describe_process(file.owner_pid)
    if file.owner_alive is None:
        return about + f"pid {file.owner_pid} of another container"
    return about + f"pid {file.owner_pid} (dead), whose forked child holds the lock"


def try_lock(fd: int, operation: int) -> bool:
    """Take an flock without waiting; False if another open file holds it."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(file: RegionFile) -> ReapResult:
    try:
        with _opened(file.path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return _kept(file, "it is not a file of ours any more")
            if (status.st_dev, status.st_ino) != (file.device, file.inode):
                return _kept(file, "another file has its name now")
            if not try_lock(fd, fcntl.LOCK_EX):
                return _kept(file, "its lock is held now")
            # Whoever unlinks a name holds its file's lock, so nothing comes between these two.
            if not _same_file(os.lstat(file.path), status):
                return _kept(file, "another file has its name now")
            os.unlink(file.path)
    except FileNotFoundError:
        return _kept(file, "it is gone already")
    except OSError as error:
        return _kept(file, f"it cannot be removed: {error.strerror}")
    return ReapResult(file.path, file.size_bytes, True, file.reason)


def _kept(file: RegionFile, reason: str) -> ReapResult:
    return ReapResult(file.path, file.size_bytes, False, reason)


def _verdict(
    kind: str,
    uid: int,
    lock: str,
    header: region_header.RegionHeader | None,
    alive: bool | None,
) -> tuple[bool, str]:
    if kind != "file":
        return False, f"it is a {kind}, not a regular file; remove it by hand if nobody needs it"
    if uid != os.geteuid():
        return False, f"it belongs to uid {uid}, not to uid {os.geteuid()}"
    if lock == "held":
        return False, "its owner lives: the lock is held"
    if lock == "unknown":
        return False, "it cannot be opened, so its lock is unknown"
    if header is None:
        return True, "its lock is free and it holds no region header"
    owner = f"owner pid {header.owner_pid} of run {header.run_id}"
    if alive:
        return True, f"its lock is free: {owner} has closed it"
    return True, f"its lock is free: {owner} is gone"


def _owner_alive(header: region_header.RegionHeader) -> bool | None:
    if header.pid_namespace != machine.pid_namespace():
        return None
    return machine.process_start_time(header.owner_pid) == header.owner_start_time


def _header(fd: int, path: str) -> region_header.RegionHeader | None:
    try:
        return region_header.unpack(os.pread(fd, HEADER_BYTES, 0), path)
    except RegionError:
        return None


def _kind(status: os.stat_result) -> str:
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISLNK(status.st_mode):
        return "symlink"
    if stat.S_ISDIR(status.st_mode):
        return "directory"
    return "special file"


def _same_file(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
