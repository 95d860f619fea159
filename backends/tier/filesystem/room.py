"""Space for blocks on one path: reserved before a file is begun, given back when it has gone.

A file that is spare brings its space with it. What cannot be deleted, or not counted, keeps its
reservation, so that the sum never falls below what is there.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from backends.tier.filesystem.ledger import Ledger, Totals
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.spares import Spares

_ROOM_TIMEOUT_S: Final = 1.0
_ROOM_STEP_S: Final = 0.002
_ROOM_TRIES: Final = 3
_FULL_S: Final = 0.5


class NoRoom(Exception):
    """A block does not fit, and nothing could be evicted for it."""


class NotAtOnce(Exception):
    """Something has to go before a block fits."""


class NotCounted(Exception):
    """What is on the path has to be counted before anything can be stored there."""


class Room(enum.Enum):
    """What became of an attempt to make room."""

    MADE = "made"
    LATER = "later"  # somebody else is about it
    NONE = "none"


class Space:
    """Of one writer on one path. Methods raise OSError; threads may share it."""

    def __init__(
        self,
        place: Place,
        ledger: Ledger,
        row_bytes: int,
        limit_bytes: Callable[[Totals], int],
        spares: Spares,
    ) -> None:
        """`limit_bytes` gives the most that may be on the path, from what is there."""
        self._place = place
        self._ledger = ledger
        self._row_bytes = row_bytes
        self._limit_bytes = limit_bytes
        self._owed = 0
        self._undeleted: deque[str] = deque()
        self._full = False
        self._full_until_s = 0.0
        self._asking = threading.Lock()
        self._making_room = threading.Lock()
        self.spares = spares

    def obtain(self, make_room: Callable[[int], Room]) -> str | None:
        """Reserve space for a block: the name of a spare file that has it, or None.

        `make_room(n)` tries to evict n bytes. Raises NoRoom, NotCounted, and what `make_room` does.
        """
        try:
            return self.obtain_at_once()
        except NotAtOnce:
            pass
        nbytes, now_s = self._row_bytes, time.monotonic()
        tries = 0
        while True:
            # One thread makes room for all that wait here.
            with self._making_room:
                if (spare := self.spares.take()) is not None:
                    return spare
                room = make_room(nbytes)
                if (spare := self.spares.take()) is not None:
                    return spare
            if self._reserve():
                return None
            if room is Room.NONE:
                # What another process has just published counts twice for a moment.
                tries += 1
                if tries == _ROOM_TRIES or not self._ledger.others_reserve():
                    break
            if time.monotonic() > now_s + _ROOM_TIMEOUT_S:
                break
            if room is not Room.MADE:
                time.sleep(_ROOM_STEP_S)
        totals = self._ledger.cached
        limit_bytes = self._limit_bytes(totals)
        raise NoRoom(
            f"{self._place.path}: {totals.all_bytes} of {limit_bytes} bytes are used, and nothing "
            "older can be evicted"
        )

    def obtain_at_once(self) -> str | None:
        """As `obtain`, where nothing has to go for it. Raises NotAtOnce, NotCounted, OSError."""
        if (spare := self.spares.take()) is not None:
            return spare
        if not self._full:
            if self._reserve():
                return None
        # Where there was no room a moment ago there is little use in asking: now and then one does.
        elif time.monotonic() >= self._full_until_s and self._asking.acquire(blocking=False):
            try:
                if self._reserve():
                    return None
            finally:
                self._asking.release()
        raise NotAtOnce

    def _reserve(self) -> bool:
        """Whether there was room for a block; it has it then."""
        short_bytes = self._ledger.reserve(self._row_bytes, self._limit_bytes)
        # Without spares it has to be asked for every block whether one fits.
        self._full = short_bytes > 0 and self.spares.most > 0
        self._full_until_s = time.monotonic() + _FULL_S
        return short_bytes <= 0

    def make_ahead(self, make_room: Callable[[int], Room]) -> None:
        """While others write, so that they do not wait for it all at once when they need it."""
        if self._needs_spares() and self._making_room.acquire(blocking=False):
            try:
                make_room(self._row_bytes)
            finally:
                self._making_room.release()

    def _needs_spares(self) -> bool:
        """Whether every block needs a spare file now, and few are left."""
        return self._full and self.spares.run_low(self._ledger.cached.blocks)

    def discard(self, temporary: str) -> None:
        """Delete an unfinished file; then its reservation ends, and not before."""
        try:
            self._place.io.unlink(self._place.temporary, temporary)
        except FileNotFoundError:
            pass
        except OSError:
            self._undeleted.append(temporary)
            return
        self._ledger.release(self._row_bytes)

    def drop_spares(self) -> None:
        """Delete all spare files."""
        for name in self.spares.take_all():
            self.discard(name)

    def discard_again(self) -> None:
        """Try once more to delete what could not be deleted."""
        for _ in range(len(self._undeleted)):
            self.discard(self._undeleted.popleft())

    def owe(self, count: int) -> None:
        """So many blocks have their name but may not be counted: reservations stand for them."""
        with self._making_room:
            self._owed += count

    def owed(self) -> int:
        """Blocks that have not been counted yet."""
        return self._owed

    def pay(self, count: int) -> None:
        """So many of them have been counted by now: their reservations end."""
        with self._making_room:
            self._owed -= count
        self._ledger.release(count * self._row_bytes)
