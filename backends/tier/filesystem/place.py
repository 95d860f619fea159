"""One path's open directories, and small files in them.

<path>                       made at the start, and never again
<path>/writers/<writer>      where this writer's files are until they are finished
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterator

from backends.tier.filesystem import naming
from backends.tier.filesystem.io import DIRECTORY, Io
from backends.tier.filesystem.writer import Writer


class Place:
    """A path as one writer has it open. Methods raise OSError; threads may share it."""

    def __init__(self, path: str, writer: Writer, io: Io, *, flush_directories: bool) -> None:
        self.path = path
        self.writer = writer
        self.io = io
        self._flush_directories = flush_directories
        self._device: int | None = None
        self._root = self._temporary = -1
        self._numbers = itertools.count()
        self._opening = threading.Lock()

    @property
    def is_readable(self) -> bool:
        """Whether the path is open; a full or read-only one may be no more than that."""
        return self._root >= 0

    @property
    def is_open(self) -> bool:
        return self._temporary >= 0

    @property
    def root(self) -> int:
        """Descriptor of the path. Its number does not change when the path is opened anew."""
        return self._checked(self._root)

    @property
    def temporary(self) -> int:
        """Descriptor of this writer's own directory."""
        return self._checked(self._temporary)

    def open(self, *, make: bool) -> None:
        """Open the path, or open it anew.

        Only at the start is the path itself made: later its absence means a disk that is gone, and
        a new directory in its place would fill the disk below it.
        """
        with self._opening:
            if make:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            root = self.io.open_root(self.path)
            try:
                self._check_device(root)
            except BaseException:
                self.io.close(root)
                raise
            self._root = self._take_over(self._root, root)
            for name in (naming.WRITERS, naming.QUARANTINE):
                self.make_directory(self._root, name)
            with self.directory(naming.WRITERS) as writers:
                self.make_directory(writers, self.writer.name)
            own = self.io.open(self._root, f"{naming.WRITERS}/{self.writer.name}", DIRECTORY)
            self._temporary = self._take_over(self._temporary, own)

    def needs_opening(self) -> bool:
        """Whether it was never opened, or what was opened has been removed."""
        if not self.is_open:
            return True
        return any(self.io.fstat(fd).st_nlink == 0 for fd in (self._root, self._temporary))

    def close(self) -> None:
        """May be called again."""
        for fd in (self._temporary, self._root):
            if fd >= 0:
                self.io.close(fd)
        self._root = self._temporary = -1

    @contextlib.contextmanager
    def directory(self, name: str) -> Iterator[int]:
        """An O_PATH descriptor of a directory below the path."""
        fd = self.io.open(self.root, name, DIRECTORY)
        try:
            yield fd
        finally:
            self.io.close(fd)

    def make_directory(self, parent: int, name: str) -> None:
        try:
            self.io.mkdir(parent, name)
        except FileExistsError:
            return
        if self._flush_directories:
            self.flush_directory(parent)

    def flush_directory(self, directory: int) -> None:
        fd = self.io.open(directory, ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.io.fsync(fd)
        finally:
            self.io.close(fd)

    def new_name(self) -> str:
        """A name in `temporary` that is free."""
        return str(next(self._numbers))

    def write_file(self, directory: str, name: str, data: bytes) -> None:
        """Put a small file in the place of another, whole or not at all."""
        temporary, new = self.temporary, self.new_name()
        fd = self.io.open(temporary, new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                self.io.write_all(fd, data)
            finally:
                self.io.finish(fd)
            with self.directory(directory) as target:
                self.io.replace(temporary, new, target, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.io.unlink(temporary, new)
            raise

    def read_file(self, directory: str, name: str) -> bytes:
        fd = self.io.open(self.root, f"{directory}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            return self.io.read_all(fd)
        finally:
            self.io.close(fd)

    def empty_writer(self, writer: Writer) -> int:
        """Remove a writer's directory and what is in it; how many files."""
        removed = 0
        try:
            with self.directory(f"{naming.WRITERS}/{writer.name}") as own:
                for entry in self.io.scandir(own, "."):
                    if entry.is_directory:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        self.io.unlink(own, entry.name)
                        removed += 1
            with self.directory(naming.WRITERS) as writers:
                self.io.rmdir(writers, writer.name)
        except FileNotFoundError:
            pass  # Another process sweeps too.
        except OSError as error:
            # Somebody else's directory in it is not ours to remove, and takes nobody's room.
            if error.errno != errno.ENOTEMPTY:
                raise
        return removed

    def _checked(self, fd: int) -> int:
        if fd < 0:
            raise OSError(errno.ENODEV, "the path is not open", self.path)
        return fd

    def _check_device(self, root: int) -> None:
        device = self.io.fstat(root).st_dev
        if self._device is not None and self._device != device:
            try:
                self.io.stat(root, naming.LEDGER)
            except FileNotFoundError:
                text = "another disk is mounted here, or none, and it has none of our files"
                raise OSError(errno.ENODEV, text, self.path) from None
        self._device = device

    def _take_over(self, old: int, new: int) -> int:
        """Put a new descriptor under the old number, which other threads may be using."""
        if old < 0:
            return new
        os.dup2(new, old, inheritable=False)
        self.io.close(new)
        return old
