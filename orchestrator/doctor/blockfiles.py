"""Files of blocks in a writer's directory: written and named, read and checked, as the tier does.

They never leave that directory, so that no tier takes them for blocks of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Final

from backends.tier.filesystem.place import Place
from backends.tier.filesystem.transfer import Scratch, read_row, write_row
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.sample import Sample

_FLUSHED: Final = "flushed"


class BlockFiles:
    """By number. Methods raise OSError; threads may share it.

    `wrong` says of every block that came back other than it went why it is not the same.
    """

    def __init__(self, place: Place, sample: Sample, direct: bool, durability: str) -> None:
        self._place = place
        self._io = place.io
        self._sample = sample
        self._direct = os.O_DIRECT if direct else 0
        self._durability = durability
        self._rows = Scratch(sample.block_bytes)
        self.wrong: list[str] = []

    def prepare(self) -> None:
        """Have this thread's memory at hand, as the rows of a region are."""
        self._sample.fill(self._rows.get(), 0)

    def store(self, number: int) -> None:
        fd = self._write(str(number), number)
        try:
            if self._durability == "data":
                self._io.fdatasync(fd)
            elif self._durability == "full":
                self._io.fsync(fd)
        finally:
            self._io.finish(fd)
        temporary = self._place.temporary
        self._io.publish(temporary, str(number), temporary, _name(number))

    def load(self, number: int) -> None:
        row = self._rows.get()
        fd = self._io.open(self._place.temporary, _name(number), os.O_RDONLY | self._direct)
        try:
            wrong = self._sample.wrong(row[: read_row(self._io, fd, row)], number)
        finally:
            self._io.close(fd)
        if wrong:
            self.wrong.append(wrong)

    def make_cold(self, count: int, stop: Stop) -> None:
        """Put blocks 0 to `count` - 1 on the disk and out of the page cache."""
        for number in range(count):
            if stop.asked():
                return
            fd = self._io.open(self._place.temporary, _name(number), os.O_RDONLY)
            try:
                self._io.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._io.close(fd)

    def fsync_s(self, count: int, stop: Stop) -> float | None:
        """Seconds that flushing a block takes which was just written, the median of `count`."""
        took: list[float] = []
        for number in range(count):
            if stop.asked():
                break
            fd = self._write(_FLUSHED, number)
            try:
                began_s = time.perf_counter()
                self._io.fsync(fd)
                took.append(time.perf_counter() - began_s)
            finally:
                self._io.finish(fd)
                self._io.unlink(self._place.temporary, _FLUSHED)
        return statistics.median(took) if took else None

    def _write(self, name: str, number: int) -> int:
        """A new file with a block in it, open."""
        row = self._rows.get()
        self._sample.fill(row, number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct
        fd = self._io.open(self._place.temporary, name, flags)
        try:
            write_row(self._io, fd, row)
            now_ns = time.time_ns()
            self._io.utime(fd, now_ns, now_ns)
        except BaseException:
            self._io.close(fd)
            raise
        return fd


def _name(number: int) -> str:
    return f"{number}.kvb"
