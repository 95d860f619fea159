"""What all processes together have on one path, and who is about to write what.

Every step errs on the side of counting too much. Space is reserved before a file is begun; files
get their names, and their shards the new counts, under one lock; only then the reservation ends. A
killed process leaves its reservation, which goes on counting until every shard has been counted
again under that lock. So the sum never falls below what is there, whoever dies when.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.tier.filesystem.counting import Counting
from backends.tier.filesystem.ledgerfile import (
    CLAIMS_AT,
    CLAIMS_LOCK,
    CLAIMS_MAX,
    COUNT,
    COUNTS,
    COUNTS_AT,
    EVICT_LOCK,
    TABLE_LOCK,
    WRITER,
    WRITER_PLACE,
    WRITERS_AT,
    WRITERS_MAX,
    LedgerFile,
)
from backends.tier.filesystem.naming import LEDGER, SHARDS
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.writer import Writer

# A lease is at most one part in so many of the room that is left.
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

    def __init__(self, place: Place, lease_blocks: int) -> None:
        """At most `lease_blocks` blocks more than are asked for are reserved at a time."""
        self._lease_blocks = lease_blocks
        self.file = LedgerFile(place)
        self._writer = place.writer
        self._state = threading.Lock()
        self._opening = threading.Lock()
        self._slot = -1
        # Of files that nobody sees: spare ones, and those that are being written.
        self._in_use_bytes = 0
        self._lease_bytes = 0
        self._leased_lately = False
        self._claims = np.zeros(CLAIMS_MAX, dtype="<u8")
        self._claim_places: dict[int, int] = {}
        self._free_places = list(range(CLAIMS_MAX))
        self._claims_lock = threading.Lock()
        self._beats: dict[int, tuple[int, float]] = {}
        self._liveness: dict[Writer, tuple[bool, float]] = {}
        self._known_bytes = self._known_blocks = self._others_bytes = 0
        self._counted = False
        self._doubtful: set[int] = set()

    # Opening and closing.

    def ensure(self) -> None:
        """Open or make the file and take a place in it, again where it was removed; OSError."""
        if not self._is_ready():
            with self._opening:
                if not self._is_ready():
                    self.file.open()
                    with self.file.held(TABLE_LOCK):
                        self._take_slot()
                    self.totals()

    def _is_ready(self) -> bool:
        return self._slot >= 0 and self.file.is_there()

    def close(self, *, leave_place: bool) -> None:
        """May be called again. `leave_place`: nothing of this writer is on the disk any more."""
        with contextlib.suppress(OSError):
            if leave_place:
                self._write_slot(clear=True)
        self._slot = -1
        self.file.close()

    # Counting.

    def counting(self) -> Counting:
        """Hold all counts, in a `with` statement: only then are names added and removed."""
        return Counting(self)

    def counts(self) -> npt.NDArray[np.int64]:
        """Bytes and blocks of every shard, int64 [257, 2]."""
        data = self.file.read(COUNTS_AT, COUNTS * COUNT.size)
        return np.frombuffer(data, "<i8").reshape(COUNTS, 2)

    def doubt(self, shards: Iterable[int]) -> None:
        """These counts may be wrong."""
        self._doubtful.update(shards)

    def take_doubtful(self) -> list[int]:
        """Shards that have to be counted; whoever takes them counts them, or doubts them again."""
        taken = sorted(self._doubtful)
        self._doubtful.difference_update(taken)
        return taken

    def totals(self) -> Totals:
        """What there is; never too little where the writers' table is held."""
        with self._state:
            # In this order: a file is counted in its shard before its reservation ends.
            writers = self._writers()
            # Of our own place the file may still say more than we have: see `release`.
            others = (writers["used"] == 1) & (writers["nonce"] != self._writer.nonce)
            self._others_bytes = int(writers["bytes"][others].sum())
            counts = self.counts()
            self._counted = bool((counts[:, 1] >= 0).all())
            self._known_bytes = int(counts[:, 0].sum())
            self._known_blocks = int(np.maximum(counts[:SHARDS, 1], 0).sum())
            return self.cached

    @property
    def cached(self) -> Totals:
        """What there was when it was last summed up, with what this process has done since."""
        reserved_bytes = self._others_bytes + self._own_bytes()
        return Totals(self._known_bytes, self._known_blocks, reserved_bytes, self._counted)

    # Reserving.

    def reserve(self, nbytes: int, limit: Callable[[Totals], int]) -> int:
        """Reserve space for one block; the bytes by which it does not fit, 0 if it does.

        `limit` gives the most bytes that there may be, from what there is. Where there is much
        room, some blocks more are reserved at once and given to the next calls. Raises OSError.
        """
        if self._take_from_lease(nbytes):
            return 0
        self.ensure()
        with self.file.held(TABLE_LOCK):
            if self._take_from_lease(nbytes):
                return 0
            totals = self.totals()
            room = limit(totals) - totals.all_bytes - nbytes
            lease = min(self._lease_blocks, max(0, room) // nbytes // _LEASE_SHARE) * nbytes
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

    # Spare files: on the disk, and nobody's block. Written over they are the reservation of what
    # is written.

    def add_spares(self, nbytes: int) -> None:
        """Count files as spares, before their shards cease to. Raises OSError.

        Under the table's lock, as every increase is: whoever sums up must not miss a file that goes
        from its shard to its writer meanwhile.
        """
        with self.file.held(TABLE_LOCK), self._state:
            self._in_use_bytes += nbytes
            try:
                self._write_slot()
            except OSError:
                self._in_use_bytes -= nbytes
                raise

    def others_reserve(self) -> bool:
        """Whether other writers had anything reserved when it was last summed up."""
        return self._others_bytes > 0

    def drop_spares(self, nbytes: int) -> None:
        """Spares are gone, or never came about."""
        with self._state:
            self._in_use_bytes -= nbytes
            with contextlib.suppress(OSError):
                self._write_slot()

    def _own_bytes(self) -> int:
        return self._in_use_bytes + self._lease_bytes

    def _take_from_lease(self, nbytes: int) -> bool:
        with self._state:
            self._leased_lately = True
            if self._lease_bytes < nbytes:
                return False
            self._lease_bytes -= nbytes
            self._in_use_bytes += nbytes
            return True

    # Claims.

    def claim(self, ids: Iterable[int]) -> set[int]:
        """Tell others that these blocks are being written; as many as there is room for.

        What other living writers have claimed is not claimed, and given. Of two that want a block
        at the same moment one gets it. Raises OSError.
        """
        if self._slot < 0:
            return set()
        with self.file.held(CLAIMS_LOCK):
            elsewhere = self.claimed_elsewhere()
            self._claim(block_id for block_id in ids if block_id not in elsewhere)
        return elsewhere

    def _claim(self, ids: Iterable[int]) -> None:
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
                data = self.file.read(CLAIMS_AT + slot * CLAIMS_MAX * 8, CLAIMS_MAX * 8)
                claims = np.frombuffer(data, "<u8")
                found.update(claims[claims != 0].tolist())
        return found

    def _write_claims(self) -> None:
        if self._slot >= 0:
            at = CLAIMS_AT + self._slot * CLAIMS_MAX * 8
            self.file.write(at, self._claims.tobytes())

    # Other writers.

    def beat(self) -> None:
        """Show writers on other machines that this one lives, and that our place is still ours."""
        self.ensure()
        with self.file.held(TABLE_LOCK):
            writers = self._writers()
            if int(writers["nonce"][self._slot]) != self._writer.nonce:
                self._take_slot()
            with self._state:
                if not self._leased_lately:
                    self._lease_bytes = 0
                self._leased_lately = False
                self._write_slot()

    def dead_writers(self) -> list[Writer]:
        """Writers that ended without closing."""
        writers = self._writers()
        return [
            _writer_of(writers[slot])
            for slot in np.flatnonzero(writers["used"] == 1).tolist()
            if slot != self._slot and not self._lives(slot, writers[slot])
        ]

    def knows(self, writer: Writer) -> bool:
        """Whether a writer has a place here."""
        return bool((self._writers()["nonce"] == writer.nonce).any())

    def forget(self, dead: Writer) -> None:
        """Drop a dead writer's place: whatever it left has been counted."""
        with self.file.held(TABLE_LOCK):
            for slot, found in enumerate(self._writers()):
                if found["used"] == 1 and _writer_of(found) == dead:
                    self._clear_slot(slot)

    def evicting(self) -> contextlib.AbstractContextManager[bool]:
        """Whether this thread is the one, of all processes, that evicts here now."""
        return self.file.held_now(EVICT_LOCK)

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

    # Its own place in the file.

    def _take_slot(self) -> None:
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
        self.file.write(CLAIMS_AT + slot * CLAIMS_MAX * 8, bytes(CLAIMS_MAX * 8))
        self.file.write(WRITERS_AT + slot * WRITER.itemsize, bytes(WRITER.itemsize))

    def _write_slot(self, *, clear: bool = False) -> None:
        if self._slot < 0:
            return
        data = bytes(WRITER.itemsize)
        if not clear:
            writer = self._writer
            data = WRITER_PLACE.pack(
                *(writer.host, writer.pid, 1, writer.start_time, writer.nonce),
                *(self._own_bytes(), time.time_ns(), bytes(16)),
            )
        self.file.write(WRITERS_AT + self._slot * WRITER.itemsize, data)

    def _writers(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.file.read(WRITERS_AT, WRITERS_MAX * WRITER.itemsize), WRITER)

    def write_counts(
        self, offset: int, data: bytes, more_bytes: int, more_blocks: int, released_bytes: int
    ) -> None:
        """Write counts that are held. What is known of the sum changes with it, at one moment for
        this process's threads: nobody is refused for a block that is counted twice."""
        with self._state:
            self.file.write(offset, data)
            self._in_use_bytes -= released_bytes
            self._known_bytes += more_bytes
            self._known_blocks += more_blocks
            if released_bytes and not self._lease_bytes:
                with contextlib.suppress(OSError):
                    self._write_slot()


def _writer_of(found: np.void) -> Writer:
    return Writer(
        int(found["host"]), int(found["pid"]), int(found["start_time"]), int(found["nonce"])
    )
