"""A stack's part in `region.scope: node`: blocks that neighbours on this node have are found with
them, what they have is not stored again, and they are told what this replica has.

The rows that it gives out for blocks of others are in the numbering of all replicas, see
`backends.region.node.reader`; a row of a neighbour may hold something else by the time it is read,
which the reader finds out: then its block is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from backends.region.handle import RegionHandle
from backends.region.node.file import NodeFile
from backends.region.node.neighbours import Neighbours, Place
from backends.region.node.reader import shared_row
from backends.region.node.section import Section
from backends.stack.observer import NODE, PRIMARY, Observer
from backends.stack.primary import PrimaryIndex
from backends.stack.rows import NO_ROW

_REFUSE_S: Final = 1.0  # a block that a neighbour could not give
_FAILURES_MOST: Final = 7  # in a row, of one neighbour
_AVOID_S: Final = 10.0


@dataclass(slots=True)
class NodeCounters:
    """In entries. `node_hits` were to be read from neighbours, `node_lost` of those were not what
    they should be, or could not be read; `node_held` were not stored because a neighbour has them;
    `node_uses` are those of own entries by others, `neighbours_lost` leaders that died."""

    node_hits: int = 0
    node_lost: int = 0
    node_held: int = 0
    node_uses: int = 0
    neighbours_lost: int = 0


class NodeRows(Observer):
    """One leader's. `bind` gives it the region's metadata before anything else is called."""

    def __init__(self, file: NodeFile, replica: int, handle: RegionHandle) -> None:
        """`replica` is `data_parallel_rank_local`, `handle` that of its region; `file` is closed by
        `close`. Raises RegionError where another engine has this replica's part."""
        self._file = file
        self._section = Section(file, replica)
        self._neighbours = Neighbours(file, self._section)
        self._section.open(handle)
        self._rows = file.spec.rows
        self._places: dict[tuple[bytes, int], Place] = {}
        self._places_most = 4 * file.spec.replicas * file.spec.rows
        self._loading: dict[bytes, Place] = {}
        self._refused: dict[bytes, float] = {}
        self._failures: dict[int, int] = {}
        self._held: set[bytes] = set()
        self._claimed: dict[int, list[bytes]] = {}
        self.counters = NodeCounters()

    def bind(self, index: PrimaryIndex) -> None:
        self._index = index

    # What neighbours have.

    def reach(
        self, keys: Sequence[bytes], groups: Sequence[int], there: Sequence[bool]
    ) -> list[bool]:
        """`there`, and besides whether what is missing of a key is with a neighbour."""
        self._forgive()
        left = [n for n, ok in enumerate(there) if not ok and keys[n] not in self._refused]
        found: list[tuple[int, int, Place]] = []
        for group in groups:
            wanted = [keys[n] for n in left]
            rows = self._index.rows_if_ready(wanted, group)
            lacking = [n for n, row in zip(left, rows, strict=True) if row == NO_ROW]
            places = self._neighbours.find([keys[n] for n in lacking], group)
            nowhere = {n for n, place in zip(lacking, places, strict=True) if place is None}
            found += [(n, group, p) for n, p in zip(lacking, places, strict=True) if p is not None]
            left = [n for n in left if n not in nowhere]
        reached = set(left)
        for n, group, place in found:
            if n in reached:
                self._places.pop((keys[n], group), None)
                self._places[keys[n], group] = place
        if len(self._places) > self._places_most:
            for block in list(self._places)[: self._places_most // 2]:
                del self._places[block]
        return [ok or n in reached for n, ok in enumerate(there)]

    def load(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[list[int]] | None:
        """Rows of keys that are here or were last found with a neighbour; None if one is neither.
        Until `loaded` they count as being read."""
        rows = [self._index.rows_if_ready(keys, group) for group in groups]
        away: dict[bytes, Place] = {}
        for of_group, group in zip(rows, groups, strict=True):
            for n, row in enumerate(of_group):
                if row == NO_ROW:
                    place = self._places.get((keys[n], group))
                    if place is None:
                        return None
                    of_group[n] = shared_row(place.replica, place.row, self._rows)
                    away[keys[n]] = place
        self._loading.update(away)
        self.counters.node_hits += len(away)
        return rows

    def sources(self, keys: Iterable[bytes]) -> dict[bytes, str]:
        """Those of these that are being read from a neighbour."""
        return {key: NODE for key in keys if key in self._loading}

    def loaded(self, keys: Iterable[bytes], failed: Collection[bytes]) -> None:
        """They have been read, but for `failed`, where that was not possible on some rank."""
        if not self._loading:
            return
        for key in keys:
            place = self._loading.pop(key, None)
            if place is not None and key not in failed:
                self._failures.pop(place.replica, None)
            elif place is not None:
                self._lost(key, place)

    def _lost(self, key: bytes, place: Place) -> None:
        self.counters.node_lost += 1
        self._refused[key] = time.monotonic() + _REFUSE_S
        failures = self._failures.get(place.replica, 0) + 1
        self._failures[place.replica] = failures
        if failures >= _FAILURES_MOST:
            del self._failures[place.replica]
            self._neighbours.avoid(place.replica, _AVOID_S)

    def _forgive(self) -> None:
        if self._refused:
            now_s = time.monotonic()
            self._refused = {key: until for key, until in self._refused.items() if until > now_s}

    def used(self, keys: Sequence[bytes]) -> None:
        """A request uses this run: the neighbours that have a part of it are told."""
        uses: list[tuple[int, int, int, bool]] = []
        for group in self._index.every_group:
            rows = self._index.rows_if_ready(keys, group)
            away = [key for key, row in zip(keys, rows, strict=True) if row == NO_ROW]
            places = [place for place in self._neighbours.find(away, group) if place is not None]
            uses += [(*place, not n) for n, place in enumerate(places)]
        self._section.use(uses)

    def take_in(self, now_s: float) -> None:
        """Count what others used of this replica's as used. `now_s` is what eviction goes by."""
        block_of, index = self._section.block_of, self._index
        for rows in self._neighbours.uses():
            keys = list(dict.fromkeys(block_of[row][0] for row in rows))
            index.policy.touch(keys, now_s)
            index.unread.read(rows)
            self.counters.node_uses += len(keys)

    # What this replica stores.

    def reserve(self, keys: Sequence[bytes], groups: Sequence[int]) -> set[bytes]:
        """Those of a run that a neighbour has, or is about to store. What is missing of the others
        is claimed, until `reserved`.

        What is being read from a neighbour belongs to those, also where its owner has given it away
        since: the copy has its place, and the same block is not filled meanwhile."""
        lacking = {group: self._lacking(keys, group) for group in groups}
        elsewhere = self._taken(lacking, None)
        if self._loading:
            elsewhere |= self._loading.keys() & {key for of in lacking.values() for key in of}
        stamp_ns = time.monotonic_ns()
        ours = {
            group: [key for key in absent if key not in elsewhere]
            for group, absent in lacking.items()
        }
        for group, absent in ours.items():
            self._section.claim(absent, group, stamp_ns)
        self._section.fence()
        later = self._taken(ours, stamp_ns)
        for group in groups:
            self._section.withdraw(later, group)
        self._claimed = {
            group: [key for key in absent if key not in later] if later else absent
            for group, absent in ours.items()
        }
        elsewhere |= later
        self.counters.node_held += len(elsewhere - self._held)
        self._held = elsewhere
        return elsewhere

    def _lacking(self, keys: Sequence[bytes], group: int) -> list[bytes]:
        index, one = self._index, (group,)
        return [key for key in keys if not index.present(key, one) and not index.leaving(key)]

    def _taken(self, lacking: dict[int, list[bytes]], since_ns: int | None) -> set[bytes]:
        """Keys of which others have, or claim, everything that is missing here."""
        taken: set[bytes] = set()
        free: set[bytes] = set()
        for group, absent in lacking.items():
            answers = self._neighbours.taken(absent, group, since_ns)
            for key, yes in zip(absent, answers, strict=True):
                (taken if yes else free).add(key)
        return taken - free

    def reserved(self, admitted: Collection[bytes]) -> None:
        """Of what was reserved last, these have got rows; the others are for whoever wants them."""
        got = set(admitted)
        for group, keys in self._claimed.items():
            others = [key for key in keys if key not in got]
            if others:
                self._section.withdraw(others, group)

    def given_up(self, keys: Collection[bytes], groups: Sequence[int]) -> None:
        """These will not be stored after all."""
        for group in groups:
            self._section.withdraw(keys, group)

    def stored(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            self._section.publish(keys, group, self._index.rows_of(keys, group))

    def removed(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            self._section.withdraw(keys, group)

    def report(self) -> dict[str, Any]:
        """Counts in entries, and how many rows others may read, in plain JSON types."""
        self.counters.neighbours_lost = self._neighbours.lost
        return asdict(self.counters) | {"rows_shared": self._section.shared}

    def close(self) -> None:
        """Neighbours read nothing here from now on. May be called again."""
        self._section.close()
        self._file.close()
