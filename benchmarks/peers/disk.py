"""What is on the disk and what is only in memory: flush, drop from the page cache, and look."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def flush(directory: Path) -> None:
    """Write out all that waits for the directory's filesystem (`syncfs`). Raises OSError."""
    with _opened(directory) as descriptor:
        if _LIBC.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f"syncfs of {directory} failed")


def drop(directory: Path) -> None:
    """Let the page cache forget the files (POSIX_FADV_DONTNEED); they must be flushed before."""
    for path in files(directory):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(directory: Path) -> float:
    """The part of the files' pages that are in the page cache (`mincore`), 0 to 1."""
    there = pages = 0
    for path in files(directory):
        with contextlib.suppress(OSError, ValueError), _opened(path) as descriptor:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapped:
                there += _resident(mapped)
            pages += -(-os.fstat(descriptor).st_size // mmap.PAGESIZE)
    return there / pages if pages else 0.0


def damage(path: Path, stride_bytes: int) -> None:
    """Flip a byte in each stretch of a file, on the disk."""
    with open(path, "r+b", buffering=0) as file:
        for at in range(stride_bytes // 2, os.fstat(file.fileno()).st_size, stride_bytes):
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0xFF]), at)
        os.fsync(file.fileno())


def files(directory: Path) -> list[Path]:
    """Every file under a directory, links left out, in order."""
    found = []
    for place, _, names in os.walk(directory):
        found += [path for name in names if not (path := Path(place, name)).is_symlink()]
    return sorted(found)


def _resident(mapped: mmap.mmap) -> int:
    # An array that looks into the mapping would keep it from being closed.
    size = len(mapped)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = _address(mapped)
    if _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in pages)


def _address(mapped: mmap.mmap) -> int:
    view = np.frombuffer(mapped, np.uint8)
    address = int(view.ctypes.data)
    del view
    return address


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
