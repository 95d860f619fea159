"""Files that were found wrong are kept for inspection, out of the way, the newest ones only."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import Protocol

from backends.tier.filesystem.counting import Counting
from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.ledgerfile import QUARANTINE_SHARD
from backends.tier.filesystem.naming import QUARANTINE
from backends.tier.filesystem.place import Place


class Seen(Protocol):
    """What tells a file from another one of its name."""

    @property
    def st_dev(self) -> int: ...
    @property
    def st_ino(self) -> int: ...


class Quarantine:
    """Of one path. What is in it counts against the capacity. Methods raise OSError.

    `moved` counts the files that came into it through this process, by a load or by a store.
    """

    def __init__(self, place: Place, ledger: Ledger, limit_bytes: int) -> None:
        self._place = place
        self._ledger = ledger
        self._limit_bytes = limit_bytes
        self.moved = 0

    def put(self, leaf: str, name: str, shard: int, counted_bytes: int, seen: Seen | None) -> bool:
        """Move a file here, if it is still the one that was `seen`; whether it was moved.

        `counted_bytes` is what its shard counts for a block.
        """
        io = self._place.io
        try:
            with (
                self._place.directory(leaf) as directory,
                self._place.directory(QUARANTINE) as quarantine,
                self._ledger.counting() as counts,
            ):
                now = io.stat(directory, name)
                if seen is not None and (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
                    return False
                io.replace(directory, name, quarantine, f"{time.time_ns()}_{name}")
                self.moved += 1
                # It was counted as what it is, or as a block: it is taken off as the smaller.
                nbytes = min(_size(now), counted_bytes)
                counts.add(shard, -nbytes, -1 if nbytes else 0)
                if nbytes != counted_bytes:
                    self._ledger.doubt([shard])
                counts.add(QUARANTINE_SHARD, _size(now), 1)
                try:
                    self._trim(quarantine, counts)
                except OSError:
                    self._ledger.doubt([QUARANTINE_SHARD])
        except FileNotFoundError:
            return False
        return True

    def count(self) -> None:
        """Count it for the ledger, and keep it within its limit."""
        with (
            self._place.directory(QUARANTINE) as quarantine,
            self._ledger.counting() as counts,
        ):
            self._trim(quarantine, counts)

    def _trim(self, quarantine: int, counts: Counting) -> None:
        io, kept_bytes, kept = self._place.io, 0, 0
        # Names begin with the time of their arrival.
        for name in sorted((entry.name for entry in io.scandir(quarantine, ".")), reverse=True):
            found = io.stat(quarantine, name)
            if kept_bytes + _size(found) > self._limit_bytes:
                # What cannot be deleted goes on counting.
                with contextlib.suppress(OSError):
                    if stat.S_ISDIR(found.st_mode):
                        io.rmdir(quarantine, name)
                    else:
                        io.unlink(quarantine, name)
                    continue
            kept_bytes, kept = kept_bytes + _size(found), kept + 1
        counts.set(QUARANTINE_SHARD, kept_bytes, kept)


def _size(found: os.stat_result) -> int:
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
