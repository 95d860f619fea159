"""The file of a ledger: its format, its making, and the locks on its bytes.

It is read and written with pread and pwrite and not mapped: a disk that fails under a mapping is a
SIGBUS, and must be an error here.

    offset     size     content
    0          4096     magic, format version
    4096       257*16   bytes and blocks of each shard, the last one being the quarantine;
                        -1 blocks: not counted yet
    12288      128*64   writers: host, pid, start time, nonce, bytes reserved, heartbeat
    20480      128*4096 claims of each writer: ids of blocks that it is writing or will at once
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from backends.tier.filesystem.naming import LEDGER, SHARDS
from backends.tier.filesystem.place import Place

QUARANTINE_SHARD: Final = SHARDS
COUNTS: Final = SHARDS + 1
WRITERS_MAX: Final = 128
CLAIMS_MAX: Final = 512
_MAGIC: Final = b"KVQUSAGE"
_VERSION: Final = 1
COUNTS_AT: Final = 4096
WRITERS_AT: Final = 12288
CLAIMS_AT: Final = 20480
_SIZE: Final = CLAIMS_AT + WRITERS_MAX * CLAIMS_MAX * 8
WRITER = np.dtype(
    [
        ("host", "<u8"),
        ("pid", "<u4"),
        ("used", "<u4"),
        ("start_time", "<u8"),
        ("nonce", "<u8"),
        ("bytes", "<i8"),
        ("heartbeat", "<u8"),
        ("spare", "<u8", (2,)),
    ]
)
COUNT = struct.Struct("<qq")
WRITER_PLACE = struct.Struct("<QIIQQqQ16s")
# Locked bytes.
TABLE_LOCK: Final = 0
COUNTS_LOCK: Final = 1
EVICT_LOCK: Final = 2
CLAIMS_LOCK: Final = 3
_LOCKS: Final = CLAIMS_LOCK + 1
# Longer than any step under a lock takes; a holder that was stopped must not stop the others.
LOCK_TIMEOUT_S: Final = 2.0


class LedgerFile:
    """One path's file, open. Methods raise OSError; threads may share it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._io = place.io
        self._fd = -1
        self._mutexes = [threading.Lock() for _ in range(_LOCKS)]

    def is_there(self) -> bool:
        """Whether it is open and has not been removed since."""
        return self._fd >= 0 and self._io.fstat(self._fd).st_nlink > 0

    def open(self) -> None:
        """Open or make it, again where it was removed."""
        fd = self._open()
        if self._fd < 0:
            self._fd = fd
        else:
            # The number stays valid for threads that are using it.
            os.dup2(fd, self._fd, inheritable=False)
            self._io.close(fd)

    def close(self) -> None:
        """May be called again."""
        if self._fd >= 0:
            self._io.close(self._fd)
        self._fd = -1

    def read(self, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        if self._io.preadv(self._fd, [data], offset) != nbytes:
            raise OSError(errno.EIO, "the ledger is shorter than it must be", LEDGER)
        return data

    def write(self, offset: int, data: bytes) -> None:
        self._write_at(self._fd, offset, data)

    @contextlib.contextmanager
    def held(self, offset: int) -> Iterator[None]:
        """Lock one byte of the file. OSError also where another process holds it for long."""
        self.hold(offset)
        try:
            yield
        finally:
            self.let_go(offset)

    def hold(self, offset: int) -> None:
        """See `held`; `let_go` has to follow."""
        mutex = self._mutexes[offset]
        mutex.acquire()
        try:
            if self._io.lock(self._fd, offset, exclusive=True):
                return
            deadline_s = time.monotonic() + LOCK_TIMEOUT_S
            pause_s = 0.0001
            while not self._io.lock(self._fd, offset, exclusive=True):
                if time.monotonic() > deadline_s:
                    text = f"another process holds lock {offset} of the ledger"
                    raise OSError(errno.ETIMEDOUT, text, LEDGER)
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.01)
        except BaseException:
            mutex.release()
            raise

    def let_go(self, offset: int) -> None:
        try:
            self._io.lock(self._fd, offset, exclusive=False)
        except OSError:
            pass  # It ends with the descriptor; a lock of ours never keeps ourselves out.
        finally:
            self._mutexes[offset].release()

    @contextlib.contextmanager
    def held_now(self, offset: int) -> Iterator[bool]:
        """Lock one byte of the file if nobody else, of all processes, has it; whether it was so."""
        mutex = self._mutexes[offset]
        if not mutex.acquire(blocking=False):
            yield False
            return
        try:
            if not self._io.lock(self._fd, offset, exclusive=True):
                yield False
                return
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    self._io.lock(self._fd, offset, exclusive=False)
        finally:
            mutex.release()

    def _open(self) -> int:
        flags = os.O_RDWR
        try:
            fd = self._io.open(self._place.root, LEDGER, flags)
        except FileNotFoundError:
            return self._make_file()
        try:
            header = bytearray(16)
            whole = self._io.preadv(fd, [header], 0) == 16 and self._io.fstat(fd).st_size == _SIZE
            if whole and header == _file_header():
                return fd
        except BaseException:
            self._io.close(fd)
            raise
        # Damaged, or of another version: everything is counted anew.
        self._io.close(fd)
        with contextlib.suppress(FileNotFoundError):
            self._io.unlink(self._place.root, LEDGER)
        return self._make_file()

    def _make_file(self) -> int:
        # Only this writer uses the name: what has it is left from an attempt that failed.
        with contextlib.suppress(FileNotFoundError):
            self._io.unlink(self._place.temporary, LEDGER)
        fd = self._io.open(self._place.temporary, LEDGER, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # All of it now: later there may be no room for a page in the middle.
            self._io.fallocate(fd, _SIZE)
            self._write_at(fd, 0, _file_header())
            self._write_at(fd, COUNTS_AT, COUNT.pack(0, -1) * COUNTS)
            self._io.publish(self._place.temporary, LEDGER, self._place.root, LEDGER)
        except FileExistsError:
            self._io.close(fd)
            self._io.unlink(self._place.temporary, LEDGER)
            return self._io.open(self._place.root, LEDGER, os.O_RDWR)
        except BaseException:
            self._io.close(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(self._place.temporary, LEDGER)
            raise
        return fd

    def _write_at(self, fd: int, offset: int, data: bytes) -> None:
        if self._io.pwritev(fd, [data], offset) != len(data):
            raise OSError(errno.EIO, "the ledger was written in part only", LEDGER)


def _file_header() -> bytes:
    return _MAGIC + _VERSION.to_bytes(4, "little") + bytes(4)
