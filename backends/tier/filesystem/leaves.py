"""The directories that hold a namespace's blocks, kept open: names are given and taken there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from backends import machine
from backends.tier.filesystem.io import DIRECTORY
from backends.tier.filesystem.place import Place

# So many of the descriptors that this process may have, at most, for each path.
_SHARE: Final = 16


class Leaves:
    """Directories `<namespace>/<2 hex>` of one path, for many threads. Methods raise OSError."""

    def __init__(self, place: Place, namespace: str) -> None:
        self._place = place
        self._namespace = namespace
        self._most = machine.open_files_limit() // _SHARE
        self._fds: dict[int, int] = {}

    def take(self, shard: int) -> int:
        """An O_PATH descriptor of a directory, which is made if it is missing; `give_back` it."""
        fd = self._fds.get(shard)
        if fd is None:
            fd = self._open(shard)
            if len(self._fds) < self._most:
                self._fds.setdefault(shard, fd)
        return fd

    def give_back(self, shard: int, fd: int) -> None:
        if self._fds.get(shard) != fd:
            self._place.io.close(fd)

    @contextlib.contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        fd = self.take(shard)
        try:
            yield fd
        finally:
            self.give_back(shard, fd)

    def renew(self, shard: int) -> None:
        """Somebody has removed the directory, so what was open leads nowhere."""
        fd = self._fds.get(shard)
        if fd is not None:
            new = self._open(shard)
            # Under its old number, which another thread may be using.
            os.dup2(new, fd, inheritable=False)
            self._place.io.close(new)

    def close(self) -> None:
        """May be called again."""
        while self._fds:
            self._place.io.close(self._fds.popitem()[1])

    def _open(self, shard: int) -> int:
        place, path = self._place, f"{self._namespace}/{shard:02x}"
        with contextlib.suppress(FileNotFoundError):
            return place.io.open(place.root, path, DIRECTORY)
        place.make_directory(place.root, self._namespace)
        with place.directory(self._namespace) as parent:
            place.make_directory(parent, f"{shard:02x}")
            return place.io.open(parent, f"{shard:02x}", DIRECTORY)
