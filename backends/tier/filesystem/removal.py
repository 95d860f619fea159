"""Take blocks away from one path, of any namespace, unless somebody has used them meanwhile."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Sequence
from typing import NamedTuple

from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import DIRECTORY, FileStat
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
        removals = [Removal(0, victim.unless_used_after_ns) for victim in victims]
        directories: list[int | None] = []
        try:
            for victim in victims:
                directories.append(self._open_of(victim))
            self._remove(victims, directories, removals, spare)
        except OSError as error:
            return removals, error
        finally:
            for victim, directory in zip(victims, directories, strict=False):
                if directory is not None:
                    self._close_of(victim, directory)
        return removals, None

    def _remove(
        self,
        victims: Sequence[Victim],
        directories: Sequence[int | None],
        removals: list[Removal],
        spare: bool,
    ) -> None:
        """What becomes of each goes into `removals`, also where it ends with an error."""
        for i, directory in enumerate(directories):
            if directory is None:
                removals[i] = Removal(0, None)
        looked = [
            (i, directory) for i, directory in enumerate(directories) if directory is not None
        ]
        found = self._io.stat_all([(directory, victims[i].name) for i, directory in looked])
        going: list[tuple[int, int, Removal]] = []
        failed: OSError | None = None
        for (i, directory), one in zip(looked, found, strict=True):
            look = self._judge(victims[i], one)
            if isinstance(look, OSError):
                failed = failed or look
            elif look.used_ns is None and look.freed_bytes:
                going.append((i, directory, look))
            else:
                removals[i] = look
        if going:
            with self._ledger.counting() as counts:
                keep = [spare and look.spare for _, _, look in going]
                results = self._take_names(victims, going, keep)
                gone: list[int] = []
                for (i, _, look), kept, wrong in zip(going, keep, results, strict=True):
                    if isinstance(wrong, FileNotFoundError):
                        removals[i] = Removal(0, None)
                    elif wrong is not None:
                        failed = failed or wrong
                    else:
                        removals[i] = Removal(look.freed_bytes, None, kept)
                        gone.append(i)
                freed = [-removals[i].freed_bytes for i in gone]
                counts.add_all([victims[i].shard for i in gone], freed, -1)
        if failed is not None:
            raise failed

    def _judge(self, victim: Victim, found: FileStat | OSError) -> Removal | OSError:
        """What removing it would free. `spare`: its file can be written over."""
        if isinstance(found, FileNotFoundError):
            return Removal(0, None)
        if isinstance(found, OSError):
            # It can be neither judged nor had: others go before it.
            return Removal(0, time.time_ns()) if found.errno == errno.EIO else found
        if found.st_atime_ns > victim.unless_used_after_ns:
            return Removal(0, found.st_atime_ns)
        # Another name of the same file is somebody's copy: it is not to be written over.
        fits = found.st_size == self._form.row_bytes and found.st_nlink == 1
        return Removal(found.st_size, None, fits and stat.S_ISREG(found.st_mode))

    def _take_names(
        self,
        victims: Sequence[Victim],
        going: Sequence[tuple[int, int, Removal]],
        keep: Sequence[bool],
    ) -> list[OSError | None]:
        """Those to `keep` become spares, the others are deleted; what went wrong with each."""
        results: list[OSError | None] = [None] * len(going)
        kept = [n for n, keeps in enumerate(keep) if keeps]
        names = [
            (going[n][1], victims[going[n][0]].name, self._place.temporary, self._place.new_name())
            for n in kept
        ]
        for n, name, wrong in zip(kept, names, self._io.replace_all(names), strict=True):
            results[n] = wrong
            if wrong is None:
                self._spares.put(name[3])
        for n, (i, directory, _) in enumerate(going):
            if not keep[n]:
                try:
                    self._io.unlink(directory, victims[i].name)
                except OSError as error:
                    results[n] = error
        return results

    def _open_of(self, victim: Victim) -> int | None:
        """The directory that it is in; None where there is none."""
        if victim.namespace == self._form.namespace.name:
            return self._leaves.take(victim.shard)
        path = f"{victim.namespace}/{victim.shard:02x}"
        try:
            return self._io.open(self._place.root, path, DIRECTORY)
        except FileNotFoundError:
            return None

    def _close_of(self, victim: Victim, directory: int) -> None:
        if victim.namespace == self._form.namespace.name:
            self._leaves.give_back(victim.shard, directory)
        else:
            self._io.close(directory)
