"""Metadata of the primary tier: which chunk stands in which rows of the region.

Only the leader of a replica owns one. It never touches bytes. A chunk needs one row a KV-cache
group; its rows are taken and given back together, so capacity is shared by the groups without
being divided among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
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
    promoted: int = 0
    errors: int = 0


class PrimaryIndex:
    """Least-recently-used map of chunk key → rows, one row a group."""

    def __init__(self, rows: int, groups: int, held_rows: Container[int] = ()) -> None:
        """`held_rows` are rows that some transfer still uses, as they are at any moment."""
        if rows < groups or groups < 1:
            raise ConfigError(
                f"the region has {rows} rows, expected at least one for each of {groups} groups; "
                "make region.size larger or region.blocks_per_chunk smaller"
            )
        self._groups = groups
        self._held_rows = held_rows
        self._free = list(range(rows - 1, -1, -1))
        self._rows: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        # Rows of dropped chunks that a transfer still uses.
        self._limbo: list[int] = []
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
        """Rows for a new chunk, evicting the least recent chunk that may go if need be.

        One that is pinned, or whose rows are held, may not. None when none may: try later, or not
        at all.
        """
        if self._limbo:
            waiting, self._limbo = self._limbo, []
            self._give_back(waiting)
        while len(self._free) < self._groups:
            victim = next(
                (k for k, rows in self._rows.items() if self._may_go(k, rows, pinned)), None
            )
            if victim is None:
                return None
            self._free.extend(reversed(self._rows.pop(victim)))
            self.counters.evictions += 1
        rows = tuple(self._free.pop() for _ in range(self._groups))
        self._rows[key] = rows
        return rows

    def _may_go(self, key: bytes, rows: tuple[int, ...], pinned: Collection[bytes]) -> bool:
        return key not in pinned and not any(row in self._held_rows for row in rows)

    def drop(self, key: bytes) -> None:
        """Forget a chunk. Its rows are free once no transfer uses them any more."""
        self._give_back(self._rows.pop(key, ()))

    def _give_back(self, rows: Sequence[int]) -> None:
        for row in reversed(rows):
            (self._limbo if row in self._held_rows else self._free).append(row)
