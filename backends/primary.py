"""Metadata of the primary tier: which chunk stands in which rows of the region.

Only the leader of a replica owns one. It never touches bytes. A chunk needs one row a KV-cache
group; its rows are taken and given back together, so capacity is shared by the groups without
being divided among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from backends.errors import ConfigError


@dataclass(slots=True)
class PrimaryCounters:
    """Counts since the start; chunks unless the name says otherwise."""

    lookups: int = 0
    hits: int = 0
    stored: int = 0
    evictions: int = 0
    skipped_stores: int = 0
    errors: int = 0


class PrimaryIndex:
    """Least-recently-used map of chunk key → rows, one row a group."""

    def __init__(self, rows: int, groups: int) -> None:
        if rows < groups or groups < 1:
            raise ConfigError(
                f"the region has {rows} rows, expected at least one for each of {groups} groups; "
                "make region.size larger or region.blocks_per_chunk smaller"
            )
        self._groups = groups
        self._free = list(range(rows - 1, -1, -1))
        self._rows: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self.rows_total = rows
        self.counters = PrimaryCounters()

    def rows_of(self, key: bytes) -> tuple[int, ...] | None:
        return self._rows.get(key)

    @property
    def rows_used(self) -> int:
        return len(self._rows) * self._groups

    def lookup(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Rows of the leading keys that are present: the longest usable prefix."""
        found = []
        for key in keys:
            rows = self._rows.get(key)
            if rows is None:
                break
            found.append(rows)
        self.counters.lookups += min(len(keys), len(found) + 1)
        self.counters.hits += len(found)
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these keys the most recent, the first one last: a prefix outlives its extension."""
        for key in reversed(keys):
            if key in self._rows:
                self._rows.move_to_end(key)

    def prepare_store(self, key: bytes, pinned: Collection[bytes]) -> tuple[int, ...] | None:
        """Rows for a new chunk, evicting the least recent chunk that is not pinned if need be.

        None when nothing may be evicted: the store is skipped, and counted.
        """
        while len(self._free) < self._groups:
            victim = next((k for k in self._rows if k not in pinned), None)
            if victim is None:
                self.counters.skipped_stores += 1
                return None
            self._free.extend(reversed(self._rows.pop(victim)))
            self.counters.evictions += 1
        rows = tuple(self._free.pop() for _ in range(self._groups))
        self._rows[key] = rows
        self.counters.stored += 1
        return rows

    def discard(self, key: bytes) -> None:
        """Forget a chunk whose bytes could not be used; counted as an error."""
        rows = self._rows.pop(key, None)
        if rows is not None:
            self._free.extend(reversed(rows))
            self.counters.errors += 1
