"""Sliding windows: which rows a hit needs, which are stored, and which go first.

Behind a hit only the last tokens of a window are ever looked at. So a hit of n entries needs the
rows of a windowed column for its last few entries alone, and a request stores them for no others
than those that a later hit can end with:

- the last ones of the request, and of one entry less, because of the same prompt the last token is
  always computed anew;
- those before the point where it parted from what other requests stored.

What a request has left behind goes first when room is needed, before any entry, and is not written
below for that. It stays as long as others do where two requests have wanted it: many more begin
like that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from backends.block import BlockKey
from backends.stack.primary import PrimaryIndex
from backends.stack.rows import NO_ROW

_REMEMBERED_PER_ROW: Final = 2

Reach = Sequence[int | None]
"""By column: how many of a hit's last entries need it, None: all (`backends.layout.Column`)."""


class Windows:
    """Of one region. `full` are the columns that every entry of a hit needs, `windowed` the others
    with their reach."""

    def __init__(
        self,
        index: PrimaryIndex,
        reach: Reach,
        dropped: Callable[[Sequence[BlockKey]], object] = lambda blocks: None,
    ) -> None:
        """`dropped` is told of what has gone because a window has left it."""
        self._index = index
        self._dropped = dropped
        self.full = tuple(column for column, own in enumerate(reach) if own is None)
        self.windowed = tuple((column, own) for column, own in enumerate(reach) if own is not None)
        self._left: dict[BlockKey, None] = {}  # the one that was left first comes first
        self._used: set[BlockKey] = set()
        self._shared: set[BlockKey] = set()

    @property
    def rows_left(self) -> int:
        """Rows that go before any entry does, as far as nothing holds them now."""
        return len(self._left)

    def starts(self, end: int) -> list[tuple[int, int]]:
        """Each windowed column, and the first entry that a hit of `end` entries needs it in."""
        return [(column, max(0, end - reach)) for column, reach in self.windowed]

    def needed(self, end: int) -> list[Sequence[int]]:
        """The columns that each entry of such a hit needs."""
        return self._with_windows(end, (end,), ())

    def _with_windows(
        self, count: int, ends: Iterable[int], held_from: Sequence[int]
    ) -> list[Sequence[int]]:
        columns: list[Sequence[int]] = [self.full] * count
        for column, reach in self.windowed:
            first = held_from[column] if held_from else 0
            wanted = {at for end in ends for at in range(max(first, end - reach), end)}
            for at in wanted:
                columns[at] = (*columns[at], column)
        return columns

    def longest(self, count: int, there: Callable[[int, int], bool]) -> int:
        """The longest hit of at most `count` entries, which are whole in the full columns:
        `there(entry, column)` says it of the windowed ones, asked from the end on."""
        end = count
        while end:
            gap = -1
            for column, start in self.starts(end):
                for at in range(end - 1, max(start - 1, gap), -1):
                    if not there(at, column):
                        gap = at
                        break
            if gap < 0:
                return end
            end = gap
        return 0

    def hit(self, keys: Sequence[bytes]) -> bool:
        """Whether all of these, a sequence from its first entry or from a hit of the device on, are
        in the region as far as they are needed."""
        index = self._index
        return (not self.full or index.all_ready(keys, self.full)) and all(
            index.all_ready(keys[start:], (column,)) for column, start in self.starts(len(keys))
        )

    def rows(self, keys: Sequence[bytes]) -> list[list[int]]:
        """By column, the rows of a hit, NO_ROW where none is needed. Raises KeyError for a key that
        is not ready."""
        index, starts = self._index, dict(self.starts(len(keys)))
        found = []
        for column in index.every_group:
            start = starts.get(column, 0)
            found.append([NO_ROW] * start + index.rows_of(keys[start:], column))
        return found

    def used(self, keys: Sequence[bytes]) -> None:
        """A request hits all of these, from its first entry on."""
        index = self._index
        for column, start in self.starts(len(keys)):
            for key in keys[start:]:
                if index.present(key, (column,)):
                    block = BlockKey(key, column)
                    (self._shared if block in self._used else self._used).add(block)
                    self._left.pop(block, None)
        self._forget_some()

    def _forget_some(self) -> None:
        most = _REMEMBERED_PER_ROW * self._index.rows_total
        for known in (self._used, self._shared):
            if len(known) > most:
                known -= {block for block in known if not self._there(block)}

    def _there(self, block: BlockKey) -> bool:
        return self._index.present(block.hash, (block.group,))

    def to_store(
        self, keys: Sequence[bytes], end: int, parted: int, held_from: Sequence[int]
    ) -> list[Sequence[int]]:
        """The columns that each of a request's entries is to have, where the first `end` of them
        are stored. The request parted from others behind `parted` of them. `held_from`: by column,
        the first entry whose bytes the engine has."""
        ends = [at for at in {end, end - 1, min(parted, end)} if at > 0]
        if 0 < parted < end:
            # One has asked for it already, and this one is going to have stored it.
            for column, start in self.starts(parted):
                self._used.update(BlockKey(key, column) for key in keys[start:parted])
        return self._with_windows(end, ends, held_from)

    def leave(self, keys: Sequence[bytes], columns: Sequence[Sequence[int]]) -> None:
        """A request ends: of its entries, whatever its windows do not need goes first now, but for
        what others begin with as well."""
        index = self._index
        for column, _ in self.windowed:
            for at, key in enumerate(keys):
                if at < len(columns) and column in columns[at]:
                    self._left.pop(BlockKey(key, column), None)
                elif index.ready((key,), (column,))[0]:
                    block = BlockKey(key, column)
                    if block not in self._shared:
                        self._left.setdefault(block)

    def release(self, rows: int, held: Collection[bytes]) -> int:
        """Give up so many rows that windows have left, if there are; how many."""
        chosen: list[BlockKey] = []
        for block in self._left:
            if len(chosen) == rows:
                break
            if block.hash not in held:
                chosen.append(block)
        freed = 0
        for block in chosen:
            del self._left[block]
            freed += self._index.drop(block.hash, block.group)
        if chosen:
            self._dropped(chosen)
        return freed

    def forget(self) -> None:
        self._left.clear()
        self._used.clear()
        self._shared.clear()
