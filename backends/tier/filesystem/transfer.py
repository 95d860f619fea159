"""Whole rows to and from open files, and pages that O_DIRECT accepts."""

from __future__ import annotations

import errno
import mmap
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.tier.base import Bytes

if TYPE_CHECKING:
    from backends.tier.filesystem.io import Io

ALIGNMENT_BYTES: Final = 4096


def write_row(io: Io, fd: int, row: Bytes) -> None:
    """Write all of `row` at the file's begin; a short write is gone on with. Raises OSError."""
    done = 0
    while done < row.size:
        written = io.pwritev(fd, [row[done:].data], done)
        # O_DIRECT goes on at an aligned place only; what lies behind it is written once more.
        step = (done + written) // ALIGNMENT_BYTES * ALIGNMENT_BYTES - done
        if done + written == row.size:
            return
        if step <= 0:
            raise taken_in_part(done + written, row.size)
        done += step


def taken_in_part(taken: int, size: int) -> OSError:
    return OSError(errno.ENOSPC, f"only {taken} of {size} bytes were taken")


def read_row(io: Io, fd: int, row: Bytes) -> int:
    """Fill `row` from the file's begin; the bytes read, fewer only if the file ends there."""
    done = 0
    while done < row.size:
        got = io.preadv(fd, [row[done:].data], done)
        if got <= 0 or (done + got) % ALIGNMENT_BYTES:
            return done + max(0, got)
        done += got
    return done


class Scratch:
    """One aligned buffer for each thread that asks, zeroed at first and freed with the thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._local = threading.local()

    def get(self) -> Bytes:
        """uint8 [nbytes], page-aligned, with whatever its thread left in it."""
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, self._nbytes), dtype=np.uint8)
            self._local.buffer = buffer
        return buffer
