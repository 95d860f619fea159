"""What all processes together have on one path, and who is about to write what.

One small file, read and written with pread and pwrite under locks on its bytes. It is not mapped:
a disk that fails under a mapping is a SIGBUS, and must be an error here.

    offset     size     content
    0          4096     magic, format version
    4096       257*16   bytes and blocks of each shard, the last one being the quarantine;
                        -1 blocks: not counted yet
    12288      128*64   writers: host, pid, start time, nonce, bytes reserved, heartbeat
    20480      128*4096 claims of each writer: ids of blocks that it is writing or will at once

Every step errs on the side of counting too much. Space is reserved before a file is begun; files
get their names, and their shards the new counts, under one lock; only then the reservation ends. A
killed process leaves its reservation, which goes on counting until every shard has been counted
again under that lock. So the sum never falls below what is there, whoever dies when.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.tier.filesystem.naming import LEDGER, SHARDS
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.writer import Writer

QUARANTINE_SHARD: Final = SHARDS
COUNTS: Final = SHARDS + 1
WRITERS_MAX: Final = 128
CLAIMS_MAX: Final = 512
_MAGIC: Final = b"KVQUSAGE"
_VERSION: Final = 1
_COUNTS_AT: Final = 4096
_WRITERS_AT: Final = 12288
_CLAIMS_AT: Final = 20480
_SIZE: Final = _CLAIMS_AT + WRITERS_MAX * CLAIMS_MAX * 8
_WRITER = np.dtype(
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
_COUNT = struct.Struct("<qq")
_PLACE = struct.Struct("<QIIQQqQ16s")
# Locked bytes.
_TABLE_LOCK: Final = 0
_COUNTS_LOCK: Final = 1
_EVICT_LOCK: Final = 2
_LOCKS: Final = _EVICT_LOCK + 1
# Longer than any step under a lock takes; a holder that was stopped must not stop the others.
LOCK_TIMEOUT_S: Final = 2.0
# A lease is at most so many blocks, and one part in so many of the room that is left.
_LEASE_BLOCKS: Final = 16
_LEASE_SHARE: Final = 32
_FOREIGN_SILENCE_S: Final = 60.0
_LIVENESS_AGE_S: Final = 0.05


class Totals(NamedTuple):
    """`bytes` and `blocks` stand under their names; `reserved_bytes` are being written.

    `counted` is False where some of it has never been counted.
    """

    bytes: int
    blocks: int
    reserved_bytes: int
    counted: bool

    @property
    def all_bytes(self) -> int:
        return self.bytes + self.reserved_bytes


class Ledger:
    """One path's ledger, as one writer sees it. Threads may share it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._io = place.io
        self._writer = place.writer
        self._mutexes = [threading.Lock() for _ in range(_LOCKS)]
        self._state = threading.Lock()
        self._opening = threading.Lock()
        self._fd = -1
        self._slot = -1
        self._in_use_bytes = 0
        self._lease_bytes = 0
        self._spare_bytes = 0
        self._leased_lately = False
        self._claims = np.zeros(CLAIMS_MAX, dtype="<u8")
        self._claim_places: dict[int, int] = {}
        self._free_places = list(range(CLAIMS_MAX))
        self._claims_lock = threading.Lock()
        self._beats: dict[int, tuple[int, float]] = {}
        self._liveness: dict[Writer, tuple[bool, float]] = {}
        self.cached = Totals(0, 0, 0, False)

    # Opening and closing.

    def ensure(self) -> None:
        """Open or make the file and take a place in it, again where it was removed; OSError."""
        if not self._is_there():
            with self._opening:
                if not self._is_there():
                    self._open()

    def _is_there(self) -> bool:
        return self._slot >= 0 and self._io.fstat(self._fd).st_nlink > 0

    def _open(self) -> None:
        fd = self._open_file()
        if self._fd < 0:
            self._fd = fd
        else:
            # The number stays valid for threads that are using it.
            os.dup2(fd, self._fd, inheritable=False)
            self._io.close(fd)
        self._take_slot()
        self.totals()

    def close(self) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self._write_slot(clear=True)
        self._io.close(self._fd)
        self._fd = self._slot = -1

    # Counting.

    def counting(self) -> Counting:
        """Hold all counts, in a `with` statement: only then are names added and removed."""
        return Counting(self)

    def counts(self) -> npt.NDArray[np.int64]:
        """Bytes and blocks of every shard, int64 [257, 2]."""
        data = self.read(_COUNTS_AT, COUNTS * _COUNT.size)
        return np.frombuffer(data, "<i8").reshape(COUNTS, 2)

    def totals(self) -> Totals:
        """What there is; never too little where the writers' table is held."""
        with self._state:
            # In this order: a file is counted in its shard before its reservation ends.
            writers = self._writers()
            # Of our own place the file may still say more than we have: see `release`.
            others = (writers["used"] == 1) & (writers["nonce"] != self._writer.nonce)
            reserved = int(writers["bytes"][others].sum()) + self._own_bytes()
            counts = self.counts()
            counted = bool((counts[:, 1] >= 0).all())
            blocks = int(np.maximum(counts[:SHARDS, 1], 0).sum())
            self.cached = Totals(int(counts[:, 0].sum()), blocks, reserved, counted)
            return self.cached

    # Reserving.

    def reserve(self, nbytes: int, limit: Callable[[Totals], int]) -> int:
        """Reserve space for one block; the bytes by which it does not fit, 0 if it does.

        `limit` gives the most bytes that there may be, from what there is. Where there is much
        room, some blocks more are reserved at once and given to the next calls. Raises OSError.
        """
        if self._take_from_lease(nbytes):
            return 0
        self.ensure()
        with Held(self, _TABLE_LOCK):
            if self._take_from_lease(nbytes):
                return 0
            totals = self.totals()
            room = limit(totals) - totals.all_bytes - nbytes
            lease = min(_LEASE_BLOCKS, max(0, room) // nbytes // _LEASE_SHARE) * nbytes
            if room < 0:
                with self._state:
                    self._write_slot()
                return -room
            with self._state:
                self._in_use_bytes += nbytes
                self._lease_bytes += lease
                try:
                    self._write_slot()
                except OSError:
                    self._in_use_bytes -= nbytes
                    self._lease_bytes -= lease
                    raise
            return 0

    def release(self, nbytes: int) -> None:
        """End a reservation: its file has been counted, or is gone."""
        with self._state:
            self._in_use_bytes -= nbytes
            # While there is a lease the file goes on saying more than there is, until the next
            # lease or heartbeat. If it cannot be written now, they write it too.
            if not self._lease_bytes:
                with contextlib.suppress(OSError):
                    self._write_slot()

    # Spare files: on the disk, and nobody's block. They count until they are written over or gone.

    @property
    def spare_bytes(self) -> int:
        return self._spare_bytes

    def add_spares(self, nbytes: int) -> None:
        """Count files as spares, before their shards cease to. Raises OSError.

        Under the table's lock, as every increase is: whoever sums up must not miss a file that goes
        from its shard to its writer meanwhile.
        """
        with Held(self, _TABLE_LOCK), self._state:
            self._spare_bytes += nbytes
            try:
                self._write_slot()
            except OSError:
                self._spare_bytes -= nbytes
                raise

    def use_spare(self, nbytes: int) -> None:
        """A spare is being written over: it is a reservation now."""
        with self._state:
            self._spare_bytes -= nbytes
            self._in_use_bytes += nbytes

    def drop_spares(self, nbytes: int) -> None:
        """Spares are gone, or never came about."""
        with self._state:
            self._spare_bytes -= nbytes
            with contextlib.suppress(OSError):
                self._write_slot()

    def _own_bytes(self) -> int:
        return self._in_use_bytes + self._lease_bytes + self._spare_bytes

    def _take_from_lease(self, nbytes: int) -> bool:
        with self._state:
            self._leased_lately = True
            if self._lease_bytes < nbytes:
                return False
            self._lease_bytes -= nbytes
            self._in_use_bytes += nbytes
            return True

    # Claims.

    def claim(self, ids: Iterable[int]) -> None:
        """Tell others that these blocks are being written; as many as there is room for."""
        with self._claims_lock:
            for block_id in ids:
                if self._free_places and block_id not in self._claim_places:
                    place = self._free_places.pop()
                    self._claim_places[block_id] = place
                    self._claims[place] = block_id
            self._write_claims()

    def unclaim(self, ids: Iterable[int]) -> None:
        with self._claims_lock:
            changed = False
            for block_id in ids:
                place = self._claim_places.pop(block_id, None)
                if place is not None:
                    self._claims[place] = 0
                    self._free_places.append(place)
                    changed = True
            if changed:
                self._write_claims()

    def claimed_elsewhere(self) -> set[int]:
        """Ids that other living writers have claimed. Raises OSError."""
        writers = self._writers()
        found: set[int] = set()
        for slot in np.flatnonzero(writers["used"] == 1).tolist():
            if slot != self._slot and self._lives(slot, writers[slot]):
                data = self.read(_CLAIMS_AT + slot * CLAIMS_MAX * 8, CLAIMS_MAX * 8)
                claims = np.frombuffer(data, "<u8")
                found.update(claims[claims != 0].tolist())
        return found

    def _write_claims(self) -> None:
        if self._slot >= 0:
            at = _CLAIMS_AT + self._slot * CLAIMS_MAX * 8
            self._write(at, self._claims.tobytes())

    # Other writers.

    def beat(self) -> None:
        """Show writers on other machines that this one lives, and that our place is still ours."""
        self.ensure()
        with Held(self, _TABLE_LOCK):
            writers = self._writers()
            if int(writers["nonce"][self._slot]) != self._writer.nonce:
                self._take_slot_locked()
            with self._state:
                if not self._leased_lately:
                    self._lease_bytes = 0
                self._leased_lately = False
                self._write_slot()

    def dead_writers(self) -> list[tuple[Writer, int]]:
        """Writers that ended without closing, with the bytes that they had reserved."""
        writers = self._writers()
        return [
            (_writer_of(writers[slot]), int(writers[slot]["bytes"]))
            for slot in np.flatnonzero(writers["used"] == 1).tolist()
            if slot != self._slot and not self._lives(slot, writers[slot])
        ]

    def knows(self, writer: Writer) -> bool:
        """Whether a writer has a place here."""
        return bool((self._writers()["nonce"] == writer.nonce).any())

    def forget(self, dead: Writer) -> None:
        """Drop a dead writer's place: whatever it left has been counted."""
        with Held(self, _TABLE_LOCK):
            for slot, found in enumerate(self._writers()):
                if found["used"] == 1 and _writer_of(found) == dead:
                    self._clear_slot(slot)

    @contextlib.contextmanager
    def evicting(self) -> Iterator[bool]:
        """Whether this thread is the one, of all processes, that evicts here now."""
        mutex = self._mutexes[_EVICT_LOCK]
        if not mutex.acquire(blocking=False):
            yield False
            return
        try:
            if not self._io.lock(self._fd, _EVICT_LOCK, exclusive=True):
                yield False
                return
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    self._io.lock(self._fd, _EVICT_LOCK, exclusive=False)
        finally:
            mutex.release()

    def _lives(self, slot: int, found: np.void) -> bool:
        writer = _writer_of(found)
        now = time.monotonic()
        known = self._liveness.get(writer)
        if known is not None and now - known[1] < _LIVENESS_AGE_S:
            return known[0]
        alive = writer.alive(self._writer.host)
        if alive is None:
            beat = int(found["heartbeat"])
            seen = self._beats.get(slot)
            if seen is None or seen[0] != beat:
                self._beats[slot] = seen = (beat, now)
            # By our own clock since its heartbeat last changed: clocks of machines differ.
            alive = now - seen[1] < _FOREIGN_SILENCE_S
        self._liveness[writer] = (alive, now)
        return alive

    # The file.

    def _open_file(self) -> int:
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
            self._write_at(fd, _COUNTS_AT, _COUNT.pack(0, -1) * COUNTS)
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

    def _take_slot(self) -> None:
        with Held(self, _TABLE_LOCK):
            self._take_slot_locked()

    def _take_slot_locked(self) -> None:
        writers = self._writers()
        free = np.flatnonzero(writers["used"] == 0).tolist()
        if not free:
            # A dead writer that had reserved nothing leaves nothing to be counted.
            free = [
                slot
                for slot in range(WRITERS_MAX)
                if writers[slot]["bytes"] == 0 and not self._lives(slot, writers[slot])
            ]
        if not free:
            text = f"{WRITERS_MAX} tiers use this path already"
            raise OSError(errno.EUSERS, text, LEDGER)
        self._clear_slot(free[0])
        self._slot = free[0]
        with self._state:
            self._write_slot()
        with self._claims_lock:
            self._write_claims()

    def _clear_slot(self, slot: int) -> None:
        self._write(_CLAIMS_AT + slot * CLAIMS_MAX * 8, bytes(CLAIMS_MAX * 8))
        self._write(_WRITERS_AT + slot * _WRITER.itemsize, bytes(_WRITER.itemsize))

    def _write_slot(self, *, clear: bool = False) -> None:
        if self._slot < 0:
            return
        data = bytes(_WRITER.itemsize)
        if not clear:
            writer = self._writer
            data = _PLACE.pack(
                *(writer.host, writer.pid, 1, writer.start_time, writer.nonce),
                *(self._own_bytes(), time.time_ns(), bytes(16)),
            )
        self._write(_WRITERS_AT + self._slot * _WRITER.itemsize, data)

    def _writers(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.read(_WRITERS_AT, WRITERS_MAX * _WRITER.itemsize), _WRITER)

    def read(self, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        if self._io.preadv(self._fd, [data], offset) != nbytes:
            raise OSError(errno.EIO, "the ledger is shorter than it must be", LEDGER)
        return data

    def write_counts(self, offset: int, data: bytes, more_bytes: int, more_blocks: int) -> None:
        """Write counts that are held; what is known of the sum changes by so much."""
        with self._state:
            self._write(offset, data)
            old = self.cached
            self.cached = old._replace(
                bytes=old.bytes + more_bytes, blocks=old.blocks + more_blocks
            )

    def _write(self, offset: int, data: bytes) -> None:
        self._write_at(self._fd, offset, data)

    def _write_at(self, fd: int, offset: int, data: bytes) -> None:
        if self._io.pwritev(fd, [data], offset) != len(data):
            raise OSError(errno.EIO, "the ledger was written in part only", LEDGER)

    def hold(self, offset: int) -> None:
        """Lock one byte of the file. Raises OSError, also where another holds it for long."""
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


class Held:
    """A lock of a ledger, in a `with` statement."""

    __slots__ = ("_ledger", "_offset")

    def __init__(self, ledger: Ledger, offset: int) -> None:
        self._ledger = ledger
        self._offset = offset

    def __enter__(self) -> None:
        self._ledger.hold(self._offset)

    def __exit__(self, *_: object) -> None:
        self._ledger.let_go(self._offset)


class Counting:
    """The counts while they are held. What changed is written when they are let go.

    That raises OSError if it fails; what was added then is not in the ledger.
    """

    __slots__ = ("_data", "_first", "_held", "_last", "_ledger", "_more_blocks", "_more_bytes")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held = Held(ledger, _COUNTS_LOCK)
        self._data = bytearray()
        self._first, self._last = COUNTS, -1
        self._more_bytes = self._more_blocks = 0

    def __enter__(self) -> Counting:
        self._held.__enter__()
        try:
            self._data = self._ledger.read(_COUNTS_AT, COUNTS * _COUNT.size)
        except BaseException:
            self._held.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._last >= 0:
                part = slice(self._first * _COUNT.size, (self._last + 1) * _COUNT.size)
                self._ledger.write_counts(
                    _COUNTS_AT + part.start,
                    bytes(self._data[part]),
                    self._more_bytes,
                    self._more_blocks,
                )
        finally:
            self._held.__exit__()

    def get(self, shard: int) -> tuple[int, int]:
        """Bytes and blocks; -1 blocks: not counted yet."""
        nbytes, blocks = _COUNT.unpack_from(self._data, shard * _COUNT.size)
        return nbytes, blocks

    def add(self, shard: int, nbytes: int, blocks: int) -> None:
        old_bytes, old_blocks = self.get(shard)
        # What was never counted will be.
        if old_blocks >= 0:
            self.set(shard, max(0, old_bytes + nbytes), max(0, old_blocks + blocks))

    def set(self, shard: int, nbytes: int, blocks: int) -> None:
        old_bytes, old_blocks = self.get(shard)
        _COUNT.pack_into(self._data, shard * _COUNT.size, nbytes, blocks)
        self._first, self._last = min(self._first, shard), max(self._last, shard)
        self._more_bytes += nbytes - old_bytes
        if shard != QUARANTINE_SHARD:
            self._more_blocks += blocks - max(0, old_blocks)


def _file_header() -> bytes:
    return _MAGIC + _VERSION.to_bytes(4, "little") + bytes(4)


def _writer_of(found: np.void) -> Writer:
    return Writer(
        int(found["host"]), int(found["pid"]), int(found["start_time"]), int(found["nonce"])
    )
