"""Every call that the tier makes to the filesystem, behind one protocol so that each can fail.

Names are relative to an open directory and are resolved beneath it without following links, so
that nothing planted in the tree leads out of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from backends import block
from backends.tier.base import Bytes
from backends.tier.filesystem.transfer import read_row, write_row

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY
FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


class Entry(NamedTuple):
    """One name of a directory. `is_directory` is False for links."""

    name: str
    is_directory: bool


class FileStat(NamedTuple):
    """Of what a name leads to, itself and not where it points. Named as in os.stat_result."""

    st_mode: int
    st_size: int
    st_nlink: int
    st_atime_ns: int


class FileWrite(NamedTuple):
    """All of the block in `data`, uint8 [n], for a file that is opened with `flags`, and its
    times."""

    name: str
    flags: int
    data: Bytes
    atime_ns: int
    mtime_ns: int


class FileToRead(NamedTuple):
    """`into`, uint8 [n], is filled from a file of just that size; from another nothing is read.

    A whole one that was last used before `before_ns` was used at `used_ns` from then on.
    """

    path: str
    into: Bytes
    used_ns: int
    before_ns: int


class FileRead(NamedTuple):
    """A file that could be opened: what it is, and how much was read of it before `error`.

    `payload_sum` is the XXH3-64 of a block that was read whole, if it was made on the way.
    """

    st_mode: int
    st_size: int
    st_dev: int
    st_ino: int
    st_atime_ns: int
    got: int
    error: OSError | None
    payload_sum: int | None = None


class Io(Protocol):
    """What the tier needs of a filesystem. All but `close` raise OSError.

    Those of whole files come last. They are made of the others, and may be made faster.
    """

    def open_root(self, path: str) -> int:
        """An O_PATH descriptor of a directory; links in `path` itself are followed."""

    def open(self, directory: int, name: str, flags: int) -> int: ...
    def close(self, fd: int) -> None:
        """Of what was not written to: whatever the kernel says, it is closed."""

    def finish(self, fd: int) -> None:
        """Close what was written to; the last moment at which some filesystems refuse a write."""

    def preadv(self, fd: int, buffers: list[Buffer], offset: int) -> int: ...
    def pwritev(self, fd: int, buffers: list[Buffer], offset: int) -> int: ...
    def write_all(self, fd: int, data: bytes) -> None: ...
    def read_all(self, fd: int) -> bytes: ...
    def fallocate(self, fd: int, size: int) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def fdatasync(self, fd: int) -> None: ...
    def fstat(self, fd: int) -> os.stat_result: ...
    def stat(self, directory: int, name: str) -> os.stat_result:
        """Of one component directly in `directory`; a link is not followed."""

    def statvfs(self, fd: int) -> os.statvfs_result: ...
    def utime(self, fd: int, atime_ns: int, mtime_ns: int) -> None: ...
    def mkdir(self, directory: int, name: str) -> None: ...
    def rmdir(self, directory: int, name: str) -> None: ...
    def unlink(self, directory: int, name: str) -> None: ...
    def publish(self, source: int, name: str, target: int, new_name: str) -> None:
        """Rename; raises FileExistsError, and changes nothing, if the new name is taken."""

    def replace(self, source: int, name: str, target: int, new_name: str) -> None: ...
    def scandir(self, directory: int, name: str) -> list[Entry]: ...
    def lock(self, fd: int, offset: int, *, exclusive: bool) -> bool:
        """Lock (or release) one byte of an open file description; False if another has it."""

    def write_files(
        self,
        directory: int,
        files: Sequence[FileWrite],
        durability: str,
        bounce: Bytes | None = None,
    ) -> list[OSError | None]:
        """Open, seal, write, date, flush and close each; what went wrong with it.

        The bytes may go through `bounce`, uint8 of whole pages.
        """

    def read_files(
        self,
        directory: int,
        flags: int,
        files: Sequence[FileToRead],
        bounce: Bytes | None = None,
        *,
        summed: bool = False,
    ) -> list[FileRead | OSError]:
        """Open each with `flags` and read it; why it could not be opened.

        The bytes may go through `bounce`, uint8 of whole pages. `summed`: `payload_sum` is wanted,
        if it can be had by the way.
        """

    def publish_all(
        self, source: int, names: Sequence[tuple[str, int, str]]
    ) -> list[OSError | None]:
        """`publish` each (name, target, new_name); what went wrong with it."""

    def replace_all(self, names: Sequence[tuple[int, str, int, str]]) -> list[OSError | None]:
        """`replace` each (source, name, target, new_name); what went wrong with it."""

    def stat_all(self, names: Sequence[tuple[int, str]]) -> list[FileStat | OSError]:
        """`stat` each (directory, name), or what went wrong."""


class OsIo:
    """The real one: Linux, no caching, no state but what the kernel was found to support."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = self._libc.syscall
        self._syscall.restype = ctypes.c_long
        self._has_openat2 = self._probe_openat2()
        self._renameat2 = getattr(self._libc, "renameat2", None)
        self._unlocked = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)

    def open_root(self, path: str) -> int:
        return os.open(path, DIRECTORY | os.O_CLOEXEC)

    def open(self, directory: int, name: str, flags: int) -> int:
        # One component needs no proof of where it leads, if it is not a link.
        if "/" not in name:
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, FILE_MODE, dir_fd=directory)
        if self._has_openat2:
            return self._openat2(directory, name, flags)
        return _open_by_component(directory, name, flags)

    def close(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise

    def finish(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: list[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def write_all(self, fd: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            written = os.pwrite(fd, memoryview(data)[done:], done)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written

    def read_all(self, fd: int) -> bytes:
        with open(fd, "rb", closefd=False) as file:
            return file.read()

    def fallocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, directory: int, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def statvfs(self, fd: int) -> os.statvfs_result:
        return os.fstatvfs(fd)

    def utime(self, fd: int, atime_ns: int, mtime_ns: int) -> None:
        os.utime(fd, ns=(atime_ns, mtime_ns))

    def mkdir(self, directory: int, name: str) -> None:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)

    def rmdir(self, directory: int, name: str) -> None:
        os.rmdir(name, dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=directory)

    def publish(self, source: int, name: str, target: int, new_name: str) -> None:
        if self._renameat2 is not None:
            result = self._renameat2(
                *(source, os.fsencode(name), target, os.fsencode(new_name), _RENAME_NOREPLACE)
            )
            if result == 0:
                return
            number = ctypes.get_errno()
            if number not in (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                raise OSError(number, os.strerror(number), new_name)
        # A network filesystem that cannot rename exclusively can still link exclusively.
        os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        try:
            os.unlink(name, dir_fd=source)
        except OSError:
            os.unlink(new_name, dir_fd=target)
            raise

    def replace(self, source: int, name: str, target: int, new_name: str) -> None:
        os.replace(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def scandir(self, directory: int, name: str) -> list[Entry]:
        fd = self.open(directory, name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(fd) as entries:
                return [Entry(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        finally:
            os.close(fd)

    def lock(self, fd: int, offset: int, *, exclusive: bool) -> bool:
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_UNLCK
        # Locks of the open file description, not of the process: two tiers of one process must
        # exclude each other, and closing some other descriptor of the file must not unlock it.
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def write_files(
        self,
        directory: int,
        files: Sequence[FileWrite],
        durability: str,
        bounce: Bytes | None = None,
    ) -> list[OSError | None]:
        return [_error(self._write_file, directory, file, durability) for file in files]

    def _write_file(self, directory: int, file: FileWrite, durability: str) -> None:
        fd = self.open(directory, file.name, file.flags)
        try:
            block.seal(file.data, file.data.size - block.HEADER_BYTES)
            write_row(self, fd, file.data)
            self.utime(fd, file.atime_ns, file.mtime_ns)
            if durability == "data":
                self.fdatasync(fd)
            elif durability == "full":
                self.fsync(fd)
        finally:
            self.finish(fd)

    def read_files(
        self,
        directory: int,
        flags: int,
        files: Sequence[FileToRead],
        bounce: Bytes | None = None,
        *,
        summed: bool = False,
    ) -> list[FileRead | OSError]:
        found: list[FileRead | OSError] = []
        for file in files:
            try:
                found.append(self._read_file(directory, flags, file))
            except OSError as error:
                found.append(error)
        return found

    def _read_file(self, directory: int, flags: int, file: FileToRead) -> FileRead:
        fd, into = self.open(directory, file.path, flags), file.into
        try:
            try:
                found = self.fstat(fd)
            except OSError as error:
                return FileRead(0, 0, 0, 0, 0, 0, error)
            got, atime_ns, failed = 0, found.st_atime_ns, None
            if stat.S_ISREG(found.st_mode) and found.st_size == into.size:
                try:
                    got = read_row(self, fd, into)
                except OSError as error:
                    failed = error
            if got == into.size and atime_ns < file.before_ns:
                # A read-only disk is no reason to miss.
                with contextlib.suppress(OSError):
                    self.utime(fd, file.used_ns, found.st_mtime_ns)
                    atime_ns = file.used_ns
        finally:
            self.close(fd)
        size, device, inode = found.st_size, found.st_dev, found.st_ino
        return FileRead(found.st_mode, size, device, inode, atime_ns, got, failed)

    def publish_all(
        self, source: int, names: Sequence[tuple[str, int, str]]
    ) -> list[OSError | None]:
        return [_error(self.publish, source, *name) for name in names]

    def replace_all(self, names: Sequence[tuple[int, str, int, str]]) -> list[OSError | None]:
        return [_error(self.replace, *name) for name in names]

    def stat_all(self, names: Sequence[tuple[int, str]]) -> list[FileStat | OSError]:
        found: list[FileStat | OSError] = []
        for directory, name in names:
            try:
                one = self.stat(directory, name)
            except OSError as error:
                found.append(error)
            else:
                found.append(FileStat(one.st_mode, one.st_size, one.st_nlink, one.st_atime_ns))
        return found

    def _openat2(self, directory: int, name: str, flags: int) -> int:
        creating = flags & os.O_CREAT
        how = _OPEN_HOW.pack(flags | os.O_CLOEXEC, FILE_MODE if creating else 0, _RESOLVE)
        while True:
            fd = self._syscall(
                ctypes.c_long(_SYS_OPENAT2),
                ctypes.c_int(directory),
                ctypes.c_char_p(os.fsencode(name)),
                ctypes.c_char_p(how),
                ctypes.c_size_t(_OPEN_HOW.size),
            )
            if fd >= 0:
                return int(fd)
            number = ctypes.get_errno()
            # EAGAIN: a rename elsewhere made it impossible to prove that the path stays beneath.
            if number not in (errno.EAGAIN, errno.EINTR):
                raise OSError(number, os.strerror(number), name)

    def _probe_openat2(self) -> bool:
        fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            os.close(self._openat2(fd, ".", DIRECTORY))
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def _error(call: Callable[..., None], *arguments: object) -> OSError | None:
    try:
        call(*arguments)
    except OSError as error:
        return error
    return None


def words(error: OSError) -> str:
    """What went wrong, for people: the kernel's words and its name for it."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


def _open_by_component(directory: int, name: str, flags: int) -> int:
    """What openat2 does, for kernels and sandboxes that lack it."""
    *parents, last = name.split("/")
    at = directory
    try:
        for parent in parents:
            below = os.open(parent, DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            if at != directory:
                os.close(at)
            at = below
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=at)
    finally:
        if at != directory:
            os.close(at)


_SYS_OPENAT2: Final = 437  # one number on every architecture
_OPEN_HOW: Final = struct.Struct("=QQQ")
_RESOLVE: Final = 0x04 | 0x08  # RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
_RENAME_NOREPLACE: Final = 1
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
