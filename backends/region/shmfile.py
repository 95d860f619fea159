"""Backing `shm`: a named file in /dev/shm, for engines whose processes attach by name.

The file gets its name only when it is finished: made without one (O_TMPFILE), locked, reserved,
written, then linked, which fails if the name is taken. So nobody ever sees a half-made region, and
a file whose lock is free has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from backends.errors import RegionError
from backends.region.reap import describe_owner, inspect, reap, try_lock
from backends.region.spec import RegionSpec

_PUBLISH_ATTEMPTS = 16
_LOCK_LOOKS = 20
_LOCK_LOOK_S = 0.01


def make(directory: str) -> int:
    """A new, empty file of `directory` without a name, mode 0600, its flock held by us."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RegionError(
            f"{directory}: no file can be made there: {error.strerror}; mount a tmpfs there that "
            "this user may write to, or use backing memfd"
        ) from error
    os.fchmod(fd, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def refuse_taken_name(directory: str, name: str) -> None:
    """Reap a stale file of this name. Raises RegionError if the name cannot be had.

    Asked before space is reserved, so that a refused engine takes none, and a stale file's space
    is free again for the one that comes after it.
    """
    path = os.path.join(directory, name)
    holder = ""
    # Who lists or reaps files holds their locks for a moment, so a held lock is looked at again.
    for _ in range(_LOCK_LOOKS):
        file = inspect(path)
        if file is None:
            return
        if not file.reapable and file.lock != "held":
            raise RegionError(
                f"{path}: the region's name is taken and nothing is removed, because "
                f"{file.reason}. Choose another engine_id or have its owner remove it"
            )
        if file.reapable and reap([file], apply=True)[0].removed:
            return
        holder = describe_owner(file)
        time.sleep(_LOCK_LOOK_S)
    raise RegionError(
        f"{path}: another engine with this engine_id runs: {holder}. Two engines "
        "never share a region; end that one or choose another engine_id"
    )


def publish(fd: int, directory: str, name: str) -> None:
    """Give the finished file its name; a stale file that has it is reaped. Raises RegionError."""
    for _ in range(_PUBLISH_ATTEMPTS):
        try:
            link(fd, directory, name)
        except FileExistsError:
            refuse_taken_name(directory, name)
        except OSError as error:
            raise RegionError(
                f"{os.path.join(directory, name)}: the region cannot be given its name: "
                f"{error.strerror}"
            ) from error
        else:
            return
    raise RegionError(
        f"{os.path.join(directory, name)}: others took this name {_PUBLISH_ATTEMPTS} times while "
        "it was being published; give every engine its own engine_id"
    )


def link(fd: int, directory: str, name: str) -> None:
    """Give a file without a name one, in one step that fails if something has it already.

    Raises FileExistsError, OSError.
    """
    at = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=at, follow_symlinks=True)
    finally:
        os.close(at)


def open_named(directory: str, spec: RegionSpec) -> int:
    """Open a living engine's region by its name, read and write. Raises RegionError.

    A file whose lock is free belongs to a dead engine: its bytes are old and it is refused.
    """
    path = os.path.join(directory, spec.name)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise RegionError(_cannot_open(error, path)) from error
    try:
        _check_open(fd, path, spec)
    except BaseException:
        os.close(fd)
        raise
    return fd


def release(fd: int, creator_pid: int, directory: str, name: str) -> None:
    """End of a creator's file, of either backing: its name if it has one, then the lock with `fd`.

    In a forked child only the child's copy of `fd` is closed: name and lock are the parent's.
    """
    try:
        if os.getpid() == creator_pid:
            unlink_own(fd, directory, name)
    finally:
        os.close(fd)


def unlink_own(fd: int, directory: str, name: str) -> bool:
    """Remove the name if it is still that of `fd`, whose lock we hold; False if it is not."""
    path = os.path.join(directory, name)
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
        return False
    os.unlink(path)
    return True


def _check_open(fd: int, path: str, spec: RegionSpec) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RegionError(f"{path}: found something that is no regular file, expected a region")
    if status.st_uid != os.geteuid():
        raise RegionError(
            f"{path}: it belongs to uid {status.st_uid}, this process is uid {os.geteuid()}; run "
            "all workers of a replica as one user"
        )
    if try_lock(fd, fcntl.LOCK_SH):
        raise RegionError(
            f"{path}: its lock is free, so the engine that made it is gone and its bytes are old; "
            "start that engine anew, which reaps the file"
        )
    if status.st_size != spec.nbytes:
        raise RegionError(
            f"{path}: found {status.st_size} bytes, expected {spec.nbytes}; all workers of a "
            "replica must have the same plan"
        )


def _cannot_open(error: OSError, path: str) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path}: no such region; its engine has not made it yet, has ended, or has unlinked "
            "it (persist_name keeps the name)"
        )
    if error.errno == errno.ELOOP:
        return f"{path}: it is a symlink, which is never followed; remove it by hand"
    if isinstance(error, IsADirectoryError):
        return f"{path}: it is a directory, expected a region file; remove it by hand"
    if isinstance(error, PermissionError):
        return f"{path}: it may not be opened by uid {os.geteuid()}; it is another user's"
    return f"{path}: it cannot be opened: {error.strerror}"
