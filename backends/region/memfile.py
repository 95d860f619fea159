"""Backing `memfd`: an anonymous memory file that peers open through the creator's /proc entry.

It has no name, so nobody joins it by mistake and nothing stays behind when its processes are gone.
Its size is sealed: were it shortened under a mapping, every access would be a SIGBUS.
"""

from __future__ import annotations

import fcntl
import os
import stat

from backends import machine
from backends.errors import RegionError
from backends.region.handle import RegionHandle

SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LINK_PREFIX = "/memfd:"


def make(name: str, hugetlb: bool = False) -> int:
    """A new, empty memory file of this user; `hugetlb` takes its pages from the pool.

    Raises RegionError where the kernel refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if hugetlb else 0)
    try:
        fd = os.memfd_create(name, flags)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise RegionError(
            f"the kernel makes no memory file: {error.strerror}; use backing shm"
        ) from error
    return fd


def seal(fd: int) -> None:
    """Fix the file's size for ever."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)


def open_peer(handle: RegionHandle, *, read_only: bool = False) -> int:
    """Open the creator's file through its descriptor. Raises RegionError with what is wrong.

    Process ids and descriptor numbers are used again by the kernel, so the creator is checked
    before and after the open, and what was opened must be the very file that the handle names.
    A file of backing shm can be opened so too, also when its name is gone.
    """
    where = f"/proc/{handle.creator_pid}/fd/{handle.fd}"
    _check_creator(handle, where)
    try:
        # A look first: opening a device or a pipe by mistake could have effects.
        if not _may_be_opened(where, handle):
            raise RegionError(
                f"{where}: found {os.readlink(where)!r}, expected the file of region "
                f"{handle.name}; its creator has closed it, so attach before the creator closes "
                "its region"
            )
        way = os.O_RDONLY if read_only else os.O_RDWR
        fd = os.open(where, way | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise RegionError(_cannot_open(error, handle, where)) from error
    try:
        _check_creator(handle, where)
        _check_file(fd, handle, where)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _may_be_opened(where: str, handle: RegionHandle) -> bool:
    if handle.backing == "memfd":
        return os.readlink(where).startswith(_LINK_PREFIX)
    return stat.S_ISREG(os.stat(where).st_mode)


def _check_creator(handle: RegionHandle, where: str) -> None:
    here = machine.host_identity()
    if handle.host != here:
        raise RegionError(
            f"{where}: the region was made on {handle.host!r}, this process runs on {here!r}: "
            "another machine, boot or container. Each node makes its own region; processes of one "
            "replica on a node must share a pid namespace"
        )
    if handle.uid != os.geteuid():
        raise RegionError(
            f"{where}: the region belongs to uid {handle.uid}, this process is uid "
            f"{os.geteuid()}; run all workers of a replica as one user"
        )
    started = machine.process_start_time(handle.creator_pid)
    if started is None:
        raise RegionError(
            f"{where}: the creator of region {handle.name} (pid {handle.creator_pid}) is gone; "
            "its memory went with it, start the replica anew"
        )
    if started != handle.creator_start_time:
        raise RegionError(
            f"{where}: pid {handle.creator_pid} is another process now (started at tick {started}, "
            f"the creator of region {handle.name} at {handle.creator_start_time}): the creator is "
            "gone, start the replica anew"
        )
    owner = machine.process_uid(handle.creator_pid)
    if owner != handle.uid:
        raise RegionError(
            f"{where}: pid {handle.creator_pid} runs as uid {owner}, the handle says {handle.uid}; "
            "it is not the creator, start the replica anew"
        )


def _check_file(fd: int, handle: RegionHandle, where: str) -> None:
    status = os.fstat(fd)
    found = {
        "a regular file": stat.S_ISREG(status.st_mode),
        "device": status.st_dev,
        "inode": status.st_ino,
        "size in bytes": status.st_size,
        "uid": status.st_uid,
        # A file in /dev/shm cannot be sealed; there, its mode keeps others from shortening it.
        "size sealed": handle.backing != "memfd" or _size_is_sealed(fd),
    }
    expected = {
        "a regular file": True,
        "device": handle.device,
        "inode": handle.inode,
        "size in bytes": handle.file_bytes,
        "uid": handle.uid,
        "size sealed": True,
    }
    wrong = [
        f"{name} found {found[name]} expected {value}"
        for name, value in expected.items()
        if found[name] != value
    ]
    if wrong:
        raise RegionError(
            f"{where}: it is not the file of region {handle.name}: {'; '.join(wrong)}. Its creator "
            "has closed it or made another; attach with the handle of the current region"
        )


def _size_is_sealed(fd: int) -> bool:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & SIZE_SEALS == SIZE_SEALS


def _cannot_open(error: OSError, handle: RegionHandle, where: str) -> str:
    what = f"{where}: the memory file of region {handle.name} cannot be opened: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return f"{what}; its creator has closed it or is gone, start the replica anew"
    if isinstance(error, PermissionError):
        return (
            f"{what}; run all workers of a replica as one user, and let the creator stay dumpable "
            "(prctl PR_SET_DUMPABLE), or use backing shm"
        )
    return what
