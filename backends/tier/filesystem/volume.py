"""One path and everything on it: its directories, ledger, blocks, quarantine and health."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from backends.errors import TierError
from backends.tier.filesystem import naming
from backends.tier.filesystem.blockfiles import BlockFiles
from backends.tier.filesystem.bounce import Bounce
from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import Io
from backends.tier.filesystem.leaves import Leaves
from backends.tier.filesystem.ledger import Ledger, Totals
from backends.tier.filesystem.manifest import write_manifest
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.probe import probe_direct
from backends.tier.filesystem.quarantine import Quarantine
from backends.tier.filesystem.removal import Remover
from backends.tier.filesystem.room import NotCounted, Space
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.spares import SHARE, Spares
from backends.tier.filesystem.writer import Writer, parse_writer
from backends.tier.health import Breaker

_LOAD_FAILURES: Final = 3
_FOREIGN_AGE_S: Final = 3600.0


class Volume:
    """One path of the tier. `stores` and `loads` say whether it may be used now."""

    def __init__(
        self,
        number: int,
        path: str,
        settings: FilesystemSettings,
        form: BlockFormat,
        manifest: dict[str, object],
        writer: Writer,
        io: Io,
    ) -> None:
        self.number = number
        self.path = path
        self.quota_bytes = settings.capacity // len(settings.paths)
        self.stores = Breaker(settings.retry_s, settings.retry_most_s)
        self.loads = Breaker(settings.retry_s, settings.retry_most_s, _LOAD_FAILURES)
        self.place = Place(path, writer, io, flush_directories=settings.durability == "full")
        self.ledger = Ledger(self.place, settings.lease_blocks)
        quarantine_bytes = settings.quarantine_limit_bytes // len(settings.paths)
        self.quarantine = Quarantine(self.place, self.ledger, quarantine_bytes)
        spares = Spares(min(settings.spare_files, self.quota_bytes // form.row_bytes // SHARE))
        self.space = Space(self.place, self.ledger, form.row_bytes, self._store_limit_bytes, spares)
        self.others: Sequence[Volume] = ()
        """The tier's other paths."""
        self._leaves = Leaves(self.place, form.namespace.name)
        self.bounce = Bounce(settings.bounce, form.row_bytes, settings.threads)
        self.blocks = BlockFiles(
            *(self.place, self.ledger, self.quarantine, form, self._leaves, self.space),
            self.bounce,
        )
        self.remover = Remover(self.place, self.ledger, self._leaves, spares, form)
        self.is_open = False
        """Whether all that stores need has been found or made here."""
        self._settings = settings
        self._form = form
        self._manifest = manifest

    def open(self, *, make: bool) -> None:
        """Open the path, or open it anew after a failure. `make`: make the path itself too.

        Raises OSError, and TierError for what no second attempt mends.
        """
        place, form = self.place, self._form
        place.open(make=make)
        place.make_directory(place.root, form.namespace.name)
        self.ledger.ensure()
        write_manifest(place, form.namespace.name, form.fingerprint, form.row_bytes, self._manifest)
        direct = probe_direct(place.io, place.temporary, self._settings.direct)
        if self._settings.direct == "on" and not direct.on:
            raise TierError(
                f"{self.path}: direct is on, but the path cannot: {direct.reason}; set direct to "
                "auto, or use another disk"
            )
        self.blocks.direct = direct
        self.is_open = True

    def needs_opening(self) -> bool:
        """Whether it was never opened to the end, or what was opened has been removed."""
        return not self.is_open or self.place.needs_opening()

    def close(self) -> None:
        """Take this writer's traces away. May be called again."""
        # What is on the disk is counted until it is gone; if need be, until this process ends.
        is_gone = False
        if self.place.is_open:
            with contextlib.suppress(OSError):
                self.place.empty_writer(self.place.writer)
                is_gone = True
        self.ledger.close(leave_place=is_gone)
        self._leaves.close()
        self.place.close()

    def is_counted(self) -> bool:
        """Whether stores may begin: what is here has been counted."""
        return self.ledger.cached.counted

    def has_room(self, nbytes: int) -> bool:
        """Whether so much fits by what is known, without asking the disk."""
        totals = self.ledger.cached
        fits = totals.all_bytes + nbytes <= self.quota_bytes - self._debt_bytes()
        return len(self.space.spares) > 0 or (totals.counted and fits)

    def limit_bytes(self, totals: Totals) -> int:
        """The most that may be here: the quota, or less where the disk is full.

        Raises OSError, and NotCounted.
        """
        if not totals.counted:
            raise NotCounted(f"{self.path}: what is here could not be counted")
        disk = self.place.io.statvfs(self.place.root)
        free_bytes = disk.f_bavail * disk.f_frsize - self._settings.free_reserve_bytes
        return min(self.quota_bytes, totals.bytes + max(0, free_bytes))

    def is_over(self) -> bool:
        """Whether there is more here than this path's part: it had another, before."""
        return self.ledger.cached.bytes > self.quota_bytes

    def _store_limit_bytes(self, totals: Totals) -> int:
        """`limit_bytes`, less what other paths still have above their parts, so that all together
        never have more for what is stored here."""
        return self.limit_bytes(totals) - self._debt_bytes()

    def _debt_bytes(self) -> int:
        return sum(
            max(0, other.ledger.cached.bytes - other.quota_bytes)
            for other in self.others
            if other.is_open and other.stores.closed()
        )

    def sweep(self) -> int:
        """Remove what dead writers were writing; how many files. Raises OSError."""
        names = [entry.name for entry in self.place.io.scandir(self.place.root, naming.WRITERS)]
        writers = [writer for name in names if (writer := parse_writer(name)) is not None]
        return sum(self.place.empty_writer(writer) for writer in writers if self._is_dead(writer))

    def _is_dead(self, writer: Writer) -> bool:
        alive = writer.alive(self.place.writer.host)
        if alive is not None:
            return not alive
        # Of another machine: the ledger hears of it, so what it does not know has ended.
        try:
            with self.place.directory(naming.WRITERS) as writers:
                age_s = time.time() - self.place.io.stat(writers, writer.name).st_mtime
        except FileNotFoundError:
            return False
        return age_s > _FOREIGN_AGE_S and not self.ledger.knows(writer)
