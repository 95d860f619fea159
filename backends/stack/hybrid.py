"""Looking up a run where some columns keep a sliding window only.

A hit of n entries needs all n in the full columns and the last few of them in the windowed ones, so
what a run's hit is cannot be said entry by entry. First it is found how far the full columns go, in
the region and under it; then, from that end on backwards, where the windows are there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from backends.block import BlockKey
from backends.stack.asks import HERE, NOWHERE, WAIT, Asker
from backends.stack.below import FIRST_WINDOW, WINDOW_GROWTH, Below
from backends.stack.loads import Promotions, Run
from backends.stack.primary import PrimaryIndex
from backends.stack.results import Found
from backends.stack.windows import Windows
from backends.tier.base import Lookup

_COMING: Final = -4  # on its way already, or on its way out: to be asked again
Coming = Callable[[bytes], float | None]


class HybridLookup:
    """Lookups in all columns of one region, and of the tiers under it."""

    def __init__(
        self,
        index: PrimaryIndex,
        windows: Windows,
        asker: Asker,
        loads: Promotions,
        below: Below,
        coming: Coming,
    ) -> None:
        """`coming` says when the wait for a key that is on its way is over."""
        self._index = index
        self._windows = windows
        self._asker = asker
        self._loads = loads
        self._below = below
        self._coming = coming

    def find(
        self,
        keys: Sequence[bytes],
        first: int,
        parent: bytes | None,
        keep: Collection[bytes],
        now_s: float,
        clock_s: float,
    ) -> Found:
        """As `TierStack.lookup` has it. `keys[0]` stands behind a hit of the engine's own cache, or
        is the first of its sequence: what is before it is not asked for."""
        windows, index = self._windows, self._index
        if windows.hit(keys):
            return Found([Lookup.HIT] * len(keys), None, len(keys))
        places = _Places(index, self._asker, self._loads, self._coming, keys, now_s)
        whole = self._whole(places)
        end = windows.longest(whole, places.around)
        ready = sum(1 for _ in places.leading_here(windows.full, end))
        here = windows.longest(ready, places.here)
        if end > here and self._fetch(places, end, first, parent, keep, clock_s):
            answers = [Lookup.HIT] * here + [Lookup.PENDING] * (end - here)
            answers += [Lookup.MISS] * (len(keys) - end)
            return Found(answers, max(places.until_s, default=now_s), whole)
        return Found([Lookup.HIT] * here + [Lookup.MISS] * (len(keys) - here), None, whole)

    def _whole(self, places: _Places) -> int:
        """How far the full columns are there, or on their way, or in a tier."""
        full, keys = self._windows.full, places.keys
        start, window = 0, FIRST_WINDOW
        while full and start < len(keys):
            end = min(len(keys), start + window)
            places.look(range(start, end), full)
            for at in range(start, end):
                if any(places.at[at, column] == NOWHERE for column in full):
                    return at
            start, window = end, WINDOW_GROWTH * window
        return len(keys)

    def _fetch(
        self,
        places: _Places,
        end: int,
        first: int,
        parent: bytes | None,
        keep: Collection[bytes],
        clock_s: float,
    ) -> bool:
        """Have what a hit of `end` entries lacks brought in; whether that will be."""
        keys, columns, now_s = places.keys, self._windows.needed(end), places.now_s
        sources: dict[bytes, list[int]] = {}
        waiting = False
        for at, own in enumerate(columns):
            found = [places.look_at(at, column) for column in own]
            waiting |= WAIT in found
            if max(found, default=HERE) >= 0 and _COMING not in found:
                sources[keys[at]] = found
        if waiting:
            return True
        if self._below.slower(sources.values(), now_s):
            return False
        start = 0
        for at in range(1, end + 1):
            if at < end and columns[at] == columns[start]:
                continue
            if any(key in sources for key in keys[start:at]):
                run = Run(keys, columns[start], first, parent, sources).part(start, at)
                if self._loads.request(run, {*keys, *keep}, now_s, clock_s) < at - start:
                    return False
            start = at
        deadlines = map(self._loads.deadline_s, sources)
        places.until_s += [deadline_s for deadline_s in deadlines if deadline_s is not None]
        return True


class _Places:
    """Where the columns of one run's entries are: a tier's number, HERE, NOWHERE, WAIT or _COMING,
    as far as they were asked for. `until_s`: when each wait for one of them is over."""

    def __init__(
        self,
        index: PrimaryIndex,
        asker: Asker,
        loads: Promotions,
        coming: Coming,
        keys: Sequence[bytes],
        now_s: float,
    ) -> None:
        self._index = index
        self._asker = asker
        self._loads = loads
        self._key_coming = coming
        self.keys = keys
        self.now_s = now_s
        self.at: dict[tuple[int, int], int] = {}
        self.until_s: list[float] = []
        self._moving: dict[int, int | None] = {}
        self._ahead = FIRST_WINDOW

    def look(self, entries: Iterable[int], columns: Sequence[int]) -> None:
        """Find out where these columns of these entries are; all tiers are asked at once."""
        index, keys, asked = self._index, self.keys, []
        for at in entries:
            for column in columns:
                if (at, column) in self.at:
                    continue
                if index.ready((keys[at],), (column,))[0]:
                    self.at[at, column] = HERE
                elif (place := self._moves(at)) is not None:
                    self.at[at, column] = place
                else:
                    asked.append((at, column))
        blocks = [BlockKey(keys[at], column) for at, column in asked]
        for where, block, place in zip(
            asked, blocks, self._asker.ask(blocks, self.now_s), strict=True
        ):
            self.at[where] = place
            if place == WAIT:
                self.until_s.append(self._asker.until_s(block))

    def _moves(self, at: int) -> int | None:
        """What is to be said of an entry that is on its way in, or out; None for any other."""
        if at not in self._moving:
            self._moving[at] = self._movement(self.keys[at])
        return self._moving[at]

    def _movement(self, key: bytes) -> int | None:
        deadline_s = self._key_coming(key)
        if self._loads.waited(key, self.now_s) or (deadline_s is None and self._index.leaving(key)):
            return NOWHERE
        if deadline_s is None:
            return None
        if deadline_s <= self.now_s:
            return NOWHERE
        self.until_s.append(deadline_s)
        return _COMING

    def look_at(self, at: int, column: int) -> int:
        """Where this one is. More of those before it are asked for each time that is needed."""
        if (at, column) not in self.at:
            self.look(range(max(0, at + 1 - self._ahead), at + 1), (column,))
            self._ahead *= WINDOW_GROWTH
        return self.at[at, column]

    def around(self, at: int, column: int) -> bool:
        return self.look_at(at, column) != NOWHERE

    def here(self, at: int, column: int) -> bool:
        return self.look_at(at, column) == HERE

    def leading_here(self, columns: Sequence[int], end: int) -> Iterable[int]:
        """The first entries that are in the region in all of these."""
        for at in range(end):
            if any(self.at[at, column] != HERE for column in columns):
                return
            yield at
