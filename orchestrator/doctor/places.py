"""Directories that a measurement needs and that go again with it."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Final, Self

import psutil

_MODE: Final = 0o700
MEMORY_FILESYSTEMS: Final = ("tmpfs", "ramfs", "hugetlbfs")


class Directory:
    """A directory, made with all that is above it where it is not there. A context manager that
    removes what it made, unless somebody has put something in. Methods raise OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.made: list[str] = []

    def __enter__(self) -> Self:
        missing, above = [], self.path
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        try:
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, _MODE)
                    self.made.append(path)
            if not os.path.isdir(self.path):
                os.mkdir(self.path)  # raises: something else is there
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            for path in reversed(self.made):
                os.rmdir(path)


def filesystem_of(path: str) -> str:
    """The kind of filesystem on which a path lies, "" where it cannot be told. Asks no disk."""
    best, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint.rstrip("/") + "/"
        if (path + "/").startswith(point) and len(point) >= len(best):
            best, kind = point, mount.fstype
    return kind
