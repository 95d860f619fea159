"""Files that were found wrong are kept for inspection, out of the way, the newest ones only."""

from __future__ import annotations

import contextlib
import os
import stat
import time

from backends.tier.filesystem.ledger import QUARANTINE_SHARD, Counting, Ledger
from backends.tier.filesystem.naming import QUARANTINE
from backends.tier.filesystem.place import Place


class Quarantine:
    """Of one path. What is in it counts against the capacity. Methods raise OSError."""

    def __init__(self, place: Place, ledger: Ledger, limit_bytes: int) -> None:
        self._place = place
        self._ledger = ledger
        self._limit_bytes = limit_bytes

    def put(
        self, leaf: str, name: str, shard: int, counted_bytes: int, seen: os.stat_result | None
    ) -> bool:
        """Move a file here, if it is still the one that was `seen`; whether it was moved.

        `counted_bytes` is what its shard counts for it.
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
                counts.add(shard, -counted_bytes, -1)
                self._trim(quarantine, counts)
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
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            if kept_bytes + size <= self._limit_bytes:
                kept_bytes, kept = kept_bytes + size, kept + 1
                continue
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(found.st_mode):
                    io.rmdir(quarantine, name)
                else:
                    io.unlink(quarantine, name)
        counts.set(QUARANTINE_SHARD, kept_bytes, kept)
