"""The few memory calls that Python's mmap module cannot make, through libc.

Python's own mmap keeps a duplicate of the descriptor open, and with it the owner's lock; it cannot
place a mapping on a huge-page boundary; and it cannot be closed while an array looks into it. A
Mapping here ends when the last array that looks into it is gone, so no view is ever left dangling.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache
from typing import Any

from backends.region.spec import round_up

PROT_NONE = 0
MAP_SHARED = mmap.MAP_SHARED
MAP_PRIVATE = mmap.MAP_PRIVATE
MAP_ANONYMOUS = mmap.MAP_ANONYMOUS
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
HUGE_ALIGN_BYTES = 2 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """Shared mapping of a whole file, unmapped when this object is collected.

    numpy arrays made from it hold it as their base. The descriptor may be closed at once.
    """

    def __init__(
        self,
        fd: int,
        nbytes: int,
        align_bytes: int = HUGE_ALIGN_BYTES,
        *,
        writable: bool = True,
    ) -> None:
        """Map `nbytes` of `fd`, at a multiple of `align_bytes`. Raises OSError.

        A file of huge pages needs `nbytes` and `align_bytes` in multiples of its page size. Who
        writes to memory that is not `writable` is killed by the kernel; numpy refuses before that.
        """
        self.nbytes = nbytes
        self._read_only = not writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map_aligned(fd, nbytes, align_bytes, protection)
        whole = round_up(nbytes, mmap.PAGESIZE)
        # At exit other threads may still use arrays, and the kernel unmaps anyway.
        weakref.finalize(self, _libc().munmap, self.address, whole).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, self._read_only),
            "version": 3,
        }


def madvise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2) without holding the GIL, repeated when a signal or memory pressure cut it short.

    Raises OSError.
    """
    libc = _libc()
    while libc.madvise(address, nbytes, advice):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def syscall(number: int, *arguments: Any) -> int:
    """A raw system call. Raises OSError."""
    result: int = _libc().syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _map_aligned(fd: int, nbytes: int, align_bytes: int, protection: int) -> int:
    libc = _libc()
    nbytes = round_up(nbytes, mmap.PAGESIZE)
    room = nbytes + align_bytes
    start = _mmap(None, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)
    aligned = round_up(start, align_bytes)
    try:
        _mmap(aligned, nbytes, protection, MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        libc.munmap(start, room)
        raise
    if aligned > start:
        libc.munmap(start, aligned - start)
    if start + room > aligned + nbytes:
        libc.munmap(aligned + nbytes, start + room - aligned - nbytes)
    return aligned


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc().mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc
