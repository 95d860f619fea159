"""The file of a node's index: made by whoever comes first, removed by the last to leave.

Everybody who uses it holds a shared flock, so the file counts as stale when all have ended. A
leader holds a lock of its open file on one byte besides, its section's: that lock is free as soon
as the leader has ended, however it did, and others can ask for it without taking it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import time
from typing import Final

import numpy as np

from backends import machine
from backends.errors import RegionError
from backends.region import header, reserve, shmfile
from backends.region.memory import Mapping
from backends.region.node.layout import Sections
from backends.region.node.spec import NodeIndexSpec
from backends.region.reap import try_lock
from backends.region.spec import HEADER_BYTES, PAGE_BYTES, SHM_DIRECTORY, RegionSpec

_ATTEMPTS: Final = 200
_ATTEMPT_S: Final = 0.01
_LEAVE_LOOKS: Final = 20
_FLOCK: Final = struct.Struct("hhqqi4x")  # fcntl(2): type, whence, start, length, pid


class NodeFile:
    """One process's hold on a node's index; `sections` are its arrays, writable for a leader."""

    def __init__(self, fd: int, directory: str, spec: NodeIndexSpec, *, writable: bool) -> None:
        """For `join`."""
        self._fd: int | None = fd
        self._directory = directory
        self.spec = spec
        # Through an open file of its own: a mapping would hold that of `fd`, and its locks with it.
        way = os.O_RDWR if writable else os.O_RDONLY
        mapped = os.open(f"/proc/self/fd/{fd}", way | os.O_CLOEXEC)
        try:
            mapping = Mapping(mapped, spec.nbytes, PAGE_BYTES, writable=writable)
        finally:
            os.close(mapped)
        self.sections = Sections(np.asarray(mapping), spec)

    @classmethod
    def join(
        cls, spec: NodeIndexSpec, *, writable: bool, directory: str = SHM_DIRECTORY
    ) -> NodeFile:
        """Open the node's index, or make it if nobody has. Raises RegionError: no room, a file of
        another kind under its name, another plan's."""
        file = spec.file_spec
        try:
            for _ in range(_ATTEMPTS):
                fd = _open(directory, file)
                if fd is None:
                    fd = _make(directory, file)
                if fd is not None:
                    return cls._hold(fd, directory, spec, writable)
                time.sleep(_ATTEMPT_S)
        except OSError as error:
            raise RegionError(
                f"{os.path.join(directory, spec.name)}: the node's index cannot be opened: "
                f"{error.strerror}; region.scope=replica needs none"
            ) from error
        raise RegionError(
            f"{os.path.join(directory, spec.name)}: somebody locks or replaces the node's index "
            f"all the time ({_ATTEMPTS} looks); end what else works on kvquay's files there"
        )

    @classmethod
    def _hold(cls, fd: int, directory: str, spec: NodeIndexSpec, writable: bool) -> NodeFile:
        try:
            return cls(fd, directory, spec, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def own(self, replica: int) -> None:
        """Hold the section of a replica for as long as this is open. Raises RegionError."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, replica, 1, 0)
        try:
            fcntl.fcntl(self._open_fd(), fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise RegionError(
                    f"{self.spec.name}: section {replica} cannot be locked: {error.strerror}"
                ) from error
            raise RegionError(
                f"{self.spec.name}: section {replica} is another engine's: a replica with this "
                "data_parallel_rank_local runs on this node; end it first"
            ) from error

    def owned(self, replica: int) -> bool:
        """Whether a living process, other than through this very object, owns a section."""
        return _is_owned(self._open_fd(), replica)

    def close(self) -> None:
        """Leave; who is the last takes the name away. May be called again."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            # Who lists or reaps files holds their locks for a moment, so a held lock is looked at
            # again; a leader that lives will be the last itself.
            for _ in range(_LEAVE_LOOKS):
                if try_lock(fd, fcntl.LOCK_EX):
                    shmfile.unlink_own(fd, self._directory, self.spec.name)
                    break
                if any(_is_owned(fd, replica) for replica in range(self.spec.replicas)):
                    break
                time.sleep(_ATTEMPT_S)
        finally:
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise RegionError(f"{self.spec.name} is closed; join it again")
        return self._fd


def _is_owned(fd: int, replica: int) -> bool:
    """Whether somebody, other than through this very open file, has locked a section."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, replica, 1, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _open(directory: str, file: RegionSpec) -> int | None:
    """The file that has the name, held and checked; None if there is none, or it is on its way
    out."""
    path = os.path.join(directory, file.name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise RegionError(
                f"{path}: found something else than a file of uid {os.geteuid()}, expected the "
                "node's index; remove it by hand"
            )
        if not try_lock(fd, fcntl.LOCK_SH) or not _has_name(status, path):
            os.close(fd)
            return None
        header.check(header.unpack(os.pread(fd, HEADER_BYTES, 0), path), file, path)
        if status.st_size != file.nbytes:
            raise RegionError(
                f"{path}: found {status.st_size} bytes, expected {file.nbytes}; remove it by hand"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _has_name(status: os.stat_result, path: str) -> bool:
    """Whether `path` is still this file; whoever unlinks it holds its lock, so it stays so."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino)


def _make(directory: str, file: RegionSpec) -> int | None:
    """A new file, held, finished before it has its name; None if somebody was faster."""
    reserve.check_room(file.engine_id, file.nbytes, "shm", directory)
    fd = shmfile.make(directory)
    try:
        reserve.reserve(
            fd, file.nbytes, engine_id=file.engine_id, backing="shm", directory=directory
        )
        pid = os.getpid()
        head = header.RegionHeader.of(
            file,
            owner_pid=pid,
            owner_start_time=machine.process_start_time(pid) or 0,
            pid_namespace=machine.pid_namespace(),
            generation=secrets.randbits(63),
        )
        os.pwrite(fd, header.pack(head), 0)
        fcntl.flock(fd, fcntl.LOCK_SH)
        shmfile.link(fd, directory, file.name)
    except FileExistsError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd
