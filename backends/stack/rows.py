"""Which rows of the region the entries stand in, which of those are free, and who is using them.

An entry is one chunk of a sequence, named by its hash. It has at most one row in each KV-cache
group: a group whose chunks are longer, or which keeps only a window, has rows for some entries and
not for others. All rows are one pool, so that groups share the capacity without dividing it.

An entry's row in a group is *arriving* from when it is handed out until its bytes are there, and
*ready* from then on. One that is forgotten while a transfer still uses its rows is *leaving*: its
rows are free when the last pin goes, and the key stays unusable until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import and_
from typing import Final

from backends.errors import ConfigError
from backends.stack.unread import Unread
from backends.table import KeyTable, open_table

NO_ROW: Final = -1


class EntryRows:
    """Rows and pins. What goes when there are none left is not decided here."""

    def __init__(self, rows: int, groups: int) -> None:
        check_rows(rows, groups)
        self.rows_total = rows
        self.groups = groups
        self.every_group = tuple(range(groups))
        # The groups in which an entry that is whole always has a row.
        self.lead: Sequence[int] = self.every_group
        self.unread: Unread[int] = Unread(rows)  # by row
        self._free = list(range(rows - 1, -1, -1))
        self._ready: list[KeyTable] = [open_table() for _ in range(groups)]
        self._arriving: list[KeyTable] = [open_table() for _ in range(groups)]
        self._pins: dict[bytes, int] = {}
        self._leaving: dict[bytes, list[int]] = {}

    @property
    def rows_free(self) -> int:
        return len(self._free)

    @property
    def rows_used(self) -> int:
        """Rows that hold, or are being given, an entry's bytes."""
        return sum(map(len, self._ready)) + sum(map(len, self._arriving))

    @property
    def rows_leaving(self) -> int:
        return sum(map(len, self._leaving.values()))

    @property
    def pinned(self) -> int:
        """Entries with a pin, those that are leaving included."""
        return len(self._pins)

    @property
    def rows_pinned(self) -> int:
        """Rows that cannot be given away now, because a transfer uses their entry."""
        held = sum(key in rows for rows in (*self._ready, *self._arriving) for key in self._pins)
        return held + self.rows_leaving

    @property
    def busy(self) -> bool:
        """Whether rows may become free without anybody being evicted."""
        return bool(self._leaving or self._pins or any(self._arriving))

    def ready(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[bool]:
        """Of each key, whether its bytes are there in all of these groups."""
        found = self._ready[groups[0]].contains(keys)
        for group in groups[1:]:
            found = list(map(and_, found, self._ready[group].contains(keys)))
        return found

    def all_ready(self, keys: Sequence[bytes], groups: Sequence[int]) -> bool:
        return all(self._ready[group].contains_all(keys) for group in groups)

    def arriving(self, key: bytes, groups: Sequence[int]) -> bool:
        """Whether what is missing of it will be there by itself."""
        return any(key in self._arriving[group] for group in groups) and self.present(key, groups)

    def present(self, key: bytes, groups: Sequence[int]) -> bool:
        """Whether it has, or is being given, its rows in all of these groups."""
        return all(key in self._ready[group] or key in self._arriving[group] for group in groups)

    def leaving(self, key: bytes) -> bool:
        return key in self._leaving

    def ready_keys(self) -> Iterable[bytes]:
        """Every entry that has a row with its bytes."""
        return set().union(*(rows.keys() for rows in self._ready))

    def rows_of(self, keys: Sequence[bytes], group: int) -> list[int]:
        """Rows of keys that are ready in this group. Raises KeyError for another."""
        return self._ready[group].rows(keys)

    def rows_if_ready(self, keys: Sequence[bytes], group: int) -> list[int]:
        """Rows of keys in this group, NO_ROW where one is not ready."""
        return self._ready[group].rows_or(keys, NO_ROW)

    def held(self, *others: Collection[bytes]) -> set[bytes]:
        """What must not be evicted now: `others`, what is pinned, and what arrives."""
        held: set[bytes] = set()
        for keys in (*others, self._pins, *(rows.keys() for rows in self._arriving)):
            if keys:
                held.update(keys)
        return held

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep these where they are. Every pin is taken off again by `unpin`."""
        pins = self._pins
        if pins.keys().isdisjoint(keys):
            pins.update(dict.fromkeys(keys, 1))
            return
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[bytes]) -> None:
        pins, leaving = self._pins, self._leaving
        counts = list(map(pins.pop, keys))
        if counts.count(1) != len(counts):
            pins.update((k, n - 1) for k, n in zip(keys, counts, strict=True) if n > 1)
        if leaving:
            for key in keys:
                if key in leaving and key not in pins:
                    self._free.extend(leaving.pop(key))

    def _give_back(self, key: bytes) -> bool:
        freed = [row for rows in self._ready for row in rows.pop_or((key,), NO_ROW)]
        freed = [row for row in freed if row != NO_ROW]
        if key in self._pins:
            self._leaving.setdefault(key, []).extend(freed)
        else:
            self._free.extend(freed)
        return bool(freed)

    def written(self, rows: Collection[int]) -> None:
        """These, of what was committed, were computed and not brought in."""
        there = [row for row in rows if row != NO_ROW] if NO_ROW in rows else rows
        self.unread.written(there)

    def free(self, rows: Iterable[int]) -> None:
        """Rows that belong to no entry, and to no transfer, any more."""
        self._free.extend(rows)


def check_rows(rows: int, groups: int) -> None:
    """Raises ConfigError where a region cannot hold even one entry."""
    if rows < groups or groups < 1:
        raise ConfigError(
            f"the region has {rows} rows, expected at least one for each of {groups} groups; "
            "make region.size larger or region.blocks_per_chunk smaller"
        )
