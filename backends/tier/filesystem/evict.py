"""Take away what was used least recently, on one path, until there is room."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from backends.tier.counters import Counters
from backends.tier.filesystem import naming
from backends.tier.filesystem.removal import Removal, Victim
from backends.tier.filesystem.room import Room
from backends.tier.filesystem.volume import Volume
from backends.tier.gone import Gone
from backends.tier.index import Candidate, Index
from backends.tier.spaces import Namespaces

# All blocks are looked at to name candidates, so of many blocks many are named at a time; never so
# many that the interpreter is kept from the other threads for long.
_CANDIDATES_SHARE: Final = 64
_CANDIDATES_LEAST: Final = 32
_CANDIDATES_MOST: Final = 256
_BATCH: Final = 64
# What was used so lately may belong to a batch whose last blocks, which are to go before its first
# ones, are not there yet.
_BATCH_NS: Final = 1_000_000


@dataclass(slots=True)
class _Done:
    """What came of it so far, also where it ends with an error."""

    freed_bytes: int = 0
    spares: int = 0


class Evictor:
    """One path's. Of all threads and processes, one evicts there at a time."""

    def __init__(
        self,
        volume: Volume,
        index: Index,
        namespaces: Namespaces,
        is_loading: Callable[[int], bool],
        counters: Counters,
        gone: Gone,
        row_bytes: int,
    ) -> None:
        self._volume = volume
        self._index = index
        self._namespaces = namespaces
        self._is_loading = is_loading
        self._counters = counters
        self._gone = gone
        self._row_bytes = row_bytes
        self._candidates: list[Candidate] = []

    def make_room(self, need_bytes: int, before_ns: int, *, spare: bool) -> Room:
        """Evict `need_bytes` of what was used before `before_ns`. Raises OSError.

        `spare`: keep the files to be written over, where they can be, and some more of them; not
        where there are too many files already.
        """
        spares, ledger = self._volume.space.spares, self._volume.ledger
        done = _Done()
        with ledger.evicting() as alone:
            if not alone:
                return Room.LATER
            if not spare or self._volume.is_over():
                self._evict(need_bytes, before_ns, done, spare=False)
                return Room.MADE if done.freed_bytes else Room.NONE
            count = max(-(-need_bytes // self._row_bytes), spares.ahead(ledger.cached.blocks))
            ledger.add_spares(count * self._row_bytes)
            try:
                self._evict(count * self._row_bytes, before_ns, done, spare=True)
            finally:
                if done.spares < count:
                    ledger.drop_spares((count - done.spares) * self._row_bytes)
        return Room.MADE if done.freed_bytes else Room.NONE

    def oldest_ns(self) -> int | None:
        """When the block that would go first was used; None if there is none. Takes no lock."""
        for candidate in reversed(self._candidates):
            if self._index.still(candidate):
                return candidate.used_ns
        found = self._index.least_recent(self._volume.number, 1)
        return found[0].used_ns if found else None

    def _evict(self, need_bytes: int, before_ns: int, done: _Done, *, spare: bool) -> None:
        while done.freed_bytes < need_bytes:
            count = min(_BATCH, -(-(need_bytes - done.freed_bytes) // self._row_bytes))
            batch = self._choose(count, before_ns)
            if not batch:
                break
            self._remove(batch, done, spare)

    def _choose(self, count: int, before_ns: int) -> list[Candidate]:
        """The least recent ones that nobody is loading."""
        chosen: list[Candidate] = []
        skipped: set[int] = set()
        while len(chosen) < count:
            candidate = self._next(skipped, before_ns)
            if candidate is None:
                break
            skipped.add(candidate.block_id)
            if candidate.used_ns >= before_ns:
                self._candidates.append(candidate)
                break
            if not self._is_loading(candidate.block_id):
                chosen.append(candidate)
        return chosen

    def _next(self, skipped: set[int], before_ns: int) -> Candidate | None:
        """The oldest block that is still as old as when it was named.

        Candidates are remembered, which is right as long as what is used since is younger.
        """
        while True:
            while self._candidates:
                candidate = self._candidates.pop()
                if self._index.still(candidate) and candidate.block_id not in skipped:
                    return candidate
            number = self._volume.number
            count = self._index.count(number) // _CANDIDATES_SHARE
            count = min(max(count, _CANDIDATES_LEAST), _CANDIDATES_MOST)
            found = self._index.least_recent(number, count + len(skipped))
            found = [c for c in reversed(found) if c.block_id not in skipped]
            settled = [c for c in found if c.used_ns < before_ns - _BATCH_NS]
            self._candidates = settled or found
            if not self._candidates:
                return None

    def _put_in_order(self, candidate: Candidate) -> None:
        """Among the known candidates, which come newest first; not beyond the newest of them."""
        if self._candidates and candidate.used_ns < self._candidates[0].used_ns:
            bisect.insort(self._candidates, candidate, key=lambda c: -c.used_ns)

    def _remove(self, batch: list[Candidate], done: _Done, spare: bool) -> None:
        volume, index = self._volume, self._index
        victims = [
            Victim(
                self._namespaces[candidate.namespace].name,
                naming.shard_of(candidate.block_id),
                naming.block_name(candidate.key),
                max(candidate.used_ns, shown_ns),
            )
            for candidate, shown_ns in zip(batch, index.shown_all_ns(batch), strict=True)
        ]
        removals, error = volume.remover.remove(victims, spare=spare)
        gone: list[tuple[Candidate, Removal]] = []
        for candidate, removal in zip(batch, removals, strict=True):
            if removal.used_ns is None:
                gone.append((candidate, removal))
            else:
                # Another process has used it: it is as recent as that says.
                index.used_elsewhere(candidate.block_id, removal.used_ns)
                self._put_in_order(candidate._replace(used_ns=removal.used_ns))
        freed = [removal.freed_bytes for _, removal in gone]
        done.freed_bytes += sum(freed)
        done.spares += sum(removal.spare for _, removal in gone)
        never_read = index.evicted([candidate for candidate, _ in gone])
        self._counters.add_all(
            {
                "evicted": sum(map(bool, freed)),
                "evicted_bytes": sum(freed),
                "evicted_never_read": sum(map(bool, itertools.compress(freed, never_read))),
            }
        )
        # Another one's keys mean nothing to who asks.
        self._gone.add(
            candidate.key
            for candidate, removal in gone
            if removal.freed_bytes and not candidate.namespace
        )
        if error is not None:
            raise error
