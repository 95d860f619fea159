"""Take blocks away from one path, of any namespace, unless somebody has used them meanwhile."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Sequence
from typing import NamedTuple

from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import DIRECTORY
from backends.tier.filesystem.leaves import Leaves
from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.spares import Spares


class Victim(NamedTuple):
    """A block to be evicted, unless it was used later than that."""

    namespace: str
    shard: int
    name: str
    unless_used_after_ns: int


class Removal(NamedTuple):
    """Bytes freed. `used_ns`: it stays, because it was used then; None: it is gone.

    `spare`: its file is a spare now.
    """

    freed_bytes: int
    used_ns: int | None
    spare: bool = False

    def stays(self, victim: Victim) -> Removal:
        return Removal(0, victim.unless_used_after_ns)


class Remover:
    """Of one path. Methods raise OSError."""

    def __init__(
        self, place: Place, ledger: Ledger, leaves: Leaves, spares: Spares, form: BlockFormat
    ) -> None:
        self._place = place
        self._io = place.io
        self._ledger = ledger
        self._leaves = leaves
        self._spares = spares
        self._form = form

    def remove(
        self, victims: Sequence[Victim], *, spare: bool
    ) -> tuple[list[Removal], OSError | None]:
        """Evict blocks, of any namespace, unless somebody used them later.

        `spare`: keep their files to be written over, where they can be; spares are counted for them
        already. Where something fails, the rest stays, and what failed is given too.
        """
        looks = [self._look(victim) for victim in victims]
        removals = [
            look if look.used_ns is not None or not look.freed_bytes else look.stays(victim)
            for look, victim in zip(looks, victims, strict=True)
        ]
        try:
            with self._ledger.counting() as counts:
                for i, (look, victim) in enumerate(zip(looks, victims, strict=True)):
                    if look.used_ns is not None or not look.freed_bytes:
                        continue
                    removals[i] = self._take_name(victim, look, spare and look.spare)
                    if removals[i].freed_bytes:
                        counts.add(victim.shard, -look.freed_bytes, -1)
        except OSError as error:
            return removals, error
        return removals, None

    def _look(self, victim: Victim) -> Removal:
        """What removing it would free. `spare`: its file can be written over."""
        try:
            directory = self._open_of(victim)
            try:
                found = self._io.stat(directory, victim.name)
            finally:
                self._close_of(victim, directory)
        except FileNotFoundError:
            return Removal(0, None)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # It can be neither judged nor had: others go before it.
            return Removal(0, time.time_ns())
        if found.st_atime_ns > victim.unless_used_after_ns:
            return Removal(0, found.st_atime_ns)
        # Another name of the same file is somebody's copy: it is not to be written over.
        fits = found.st_size == self._form.row_bytes and found.st_nlink == 1
        return Removal(found.st_size, None, fits and stat.S_ISREG(found.st_mode))

    def _take_name(self, victim: Victim, found: Removal, spare: bool) -> Removal:
        try:
            directory = self._open_of(victim)
            try:
                if spare:
                    new = self._place.new_name()
                    self._io.replace(directory, victim.name, self._place.temporary, new)
                    self._spares.put(new)
                else:
                    self._io.unlink(directory, victim.name)
            finally:
                self._close_of(victim, directory)
        except FileNotFoundError:
            return Removal(0, None)
        return found._replace(spare=spare)

    def _open_of(self, victim: Victim) -> int:
        if victim.namespace == self._form.namespace.name:
            return self._leaves.take(victim.shard)
        path = f"{victim.namespace}/{victim.shard:02x}"
        return self._io.open(self._place.root, path, DIRECTORY)

    def _close_of(self, victim: Victim, directory: int) -> None:
        if victim.namespace == self._form.namespace.name:
            self._leaves.give_back(victim.shard, directory)
        else:
            self._io.close(directory)
