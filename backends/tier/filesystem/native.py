"""Whole files by compiled code, where it was built: one release of the interpreter for each.

Between the calls that make up a file, an I/O thread would let the interpreter go and wait for it
again. With several threads that costs more than the calls. What is compiled does the same calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from backends.tier.base import Bytes
from backends.tier.filesystem.io import FileRead, FileStat, FileToRead, FileWrite, Io, OsIo
from backends.tier.filesystem.transfer import taken_in_part

_OPENED: Final = 0, 2
# What a kernel, or a filesystem, says that cannot rename exclusively.
_CANNOT: Final = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


def make_io() -> Io:
    """The fastest that this machine has."""
    native = compiled()
    return OsIo() if native is None else NativeIo(native)


def compiled() -> ModuleType | None:
    """The compiled code, where it was built."""
    try:
        from backends.tier.filesystem import _files
    except ImportError:
        return None
    return _files


class NativeIo(OsIo):
    """Like OsIo in all that can be seen."""

    def __init__(self, native: ModuleType) -> None:
        super().__init__()
        self._files = native

    def write_files(
        self,
        directory: int,
        files: Sequence[FileWrite],
        durability: str,
        bounce: Bytes | None = None,
    ) -> list[OSError | None]:
        through = None if bounce is None else bounce.data
        given = [(name, flags, data.data, *times) for name, flags, data, *times in files]
        return [
            _write_error(number, taken, file)
            for (number, taken), file in zip(
                self._files.write(directory, given, durability, through), files, strict=True
            )
        ]

    def read_files(
        self,
        directory: int,
        flags: int,
        files: Sequence[FileToRead],
        bounce: Bytes | None = None,
        *,
        summed: bool = False,
    ) -> list[FileRead | OSError]:
        if not self._has_openat2:
            return super().read_files(directory, flags, files, bounce, summed=summed)
        through = None if bounce is None else bounce.data
        given = [(path, into.data, *times) for path, into, *times in files]
        found: list[FileRead | OSError] = []
        for file, answer in zip(
            files, self._files.read(directory, flags, given, summed, through), strict=True
        ):
            step, number, mode, size, device, inode, atime_ns, got, has_sum, payload_sum = answer
            error = OSError(number, os.strerror(number), file.path) if number else None
            if error is not None and step not in _OPENED:
                found.append(error)
            else:
                summed_up = payload_sum if has_sum else None
                found.append(FileRead(mode, size, device, inode, atime_ns, got, error, summed_up))
        return found

    def publish_all(
        self, source: int, names: Sequence[tuple[str, int, str]]
    ) -> list[OSError | None]:
        numbers = self._files.rename([(source, *name) for name in names], True)
        if not any(numbers):
            return [None] * len(names)
        errors: list[OSError | None] = []
        for number, name in zip(numbers, names, strict=True):
            if number in _CANNOT:
                errors += super().publish_all(source, [name])
            else:
                errors.append(OSError(number, os.strerror(number), name[2]) if number else None)
        return errors

    def replace_all(self, names: Sequence[tuple[int, str, int, str]]) -> list[OSError | None]:
        numbers = self._files.rename(list(names), False)
        return [
            OSError(number, os.strerror(number), name[1]) if number else None
            for number, name in zip(numbers, names, strict=True)
        ]

    def stat_all(self, names: Sequence[tuple[int, str]]) -> list[FileStat | OSError]:
        return [
            OSError(number, os.strerror(number), name[1]) if number else FileStat(*found)
            for (number, *found), name in zip(self._files.stat(list(names)), names, strict=True)
        ]


def _write_error(number: int, taken: int, file: FileWrite) -> OSError | None:
    if not number:
        return None
    if number == errno.ENOSPC and taken:
        return taken_in_part(taken, file.data.size)
    return OSError(number, os.strerror(number), file.name)
