"""What is in the primary tier: what comes in, what is worth its rows, and what goes for it.

Rows and pins are in `backends.stack.rows`. An entry that is pinned, or has a row that arrives, is
not evicted. Nothing here touches bytes, knows a tier, or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from backends.errors import ConfigError
from backends.policy.admission import AdmissionPolicy
from backends.policy.base import EvictionPolicy
from backends.stack.observer import PRIMARY, Observer
from backends.stack.rows import NO_ROW as NO_ROW
from backends.stack.rows import EntryRows

Spill = Callable[[list[bytes]], Collection[bytes]]
"""Told what is evicted, with pins on what still has to be read; answers with those keys."""

Release = Callable[[int, Collection[bytes]], int]
"""Asked for rows that may go before any entry does, of no key that is held; how many went."""

Wanted = Callable[[int], Sequence[Sequence[int]]]
"""The groups that each of a run's first n entries is to have rows in, if no others get any."""


@dataclass(slots=True)
class PrimaryCounters:
    """Counts since the start, in entries. `refused` were not worth storing, for `skipped_stores`
    there was no room. `rows_left` counts rows that went because a window had left them."""

    lookups: int = 0
    hits: int = 0
    stored: int = 0
    evictions: int = 0
    skipped_stores: int = 0
    refused: int = 0
    promoted: int = 0
    errors: int = 0
    rows_left: int = 0


@dataclass(slots=True)
class Admitted:
    """Entries that were given rows. `rows[i][n]` is the row of `keys[n]` in `groups[i]`, or NO_ROW
    where it had one already. `evicted` went to make room; for `short` more there was none."""

    keys: Sequence[bytes]
    rows: list[list[int]]
    evicted: list[bytes]
    short: int = 0


class PrimaryIndex(EntryRows):
    """Entries, their rows, and the order in which they go. Keys of one call are distinct."""

    def __init__(self, rows: int, groups: int, policy: EvictionPolicy) -> None:
        super().__init__(rows, groups)
        self.policy = policy
        self.counters = PrimaryCounters()
        self.spill: Spill | None = None
        self.release: Release | None = None
        self.admission: AdmissionPolicy | None = None
        self.observers: Sequence[Observer] = ()

    def admit(
        self,
        keys: Sequence[bytes],
        groups: Sequence[int],
        now_s: float,
        *,
        first: int = 0,
        parent: bytes | None = None,
        keep: Collection[bytes] = (),
        weigh: bool = False,
        elsewhere: Collection[bytes] = (),
    ) -> Admitted:
        """Rows for those of a run's entries that have none, the leading ones if there is no room
        for all. Neither the run nor `keep` is evicted for it. `weigh`: only as far as they are
        worth it. Those of `elsewhere` get none, because others keep them.

        `keys[0]` is chunk number `first` of its sequence and `parent` the chunk before it.
        """
        if len(groups) > 1:
            return self.admit_rows(
                keys,
                groups,
                lambda count: [groups] * count,
                now_s,
                first=first,
                parent=parent,
                keep=keep,
                weigh=weigh,
                elsewhere=elsewhere,
            )
        [group] = groups
        ready, arriving = self._ready[group], self._arriving[group]
        new = keys
        if not (
            ready.isdisjoint(keys)
            and arriving.isdisjoint(keys)
            and self._leaving.keys().isdisjoint(keys)
        ):
            new = list(compress(keys, map(not_, ready.contains(keys))))
            new = list(compress(new, map(not_, arriving.contains(new))))
            new = [key for key in new if key not in self._leaving]
        if elsewhere:
            new = [key for key in new if key not in elsewhere]
        free, evicted = self._free, []
        if weigh and (self.admission is not None or len(new) > len(free)):
            new = self._worthy(keys, new, len(free), now_s, first, parent)
        if len(new) > len(free):
            evicted = self._make_room(len(new) - len(free), (keys, keep))
        short = max(0, len(new) - len(free))
        if short:
            new = new[: len(free)]
        if not new:
            return Admitted((), [[]], evicted, short)
        rows = free[: -len(new) - 1 : -1]
        if arriving.add(new, rows) != len(new):
            arriving.pop(list(set(new)))
            raise ConfigError(f"{len(new)} keys were given, some of them twice; give each once")
        del free[-len(new) :]
        self._insert(keys, new, now_s, first, parent)
        return Admitted(new, [rows], evicted, short)

    def admit_rows(
        self,
        keys: Sequence[bytes],
        groups: Sequence[int],
        wanted: Wanted,
        now_s: float,
        *,
        first: int = 0,
        parent: bytes | None = None,
        keep: Collection[bytes] = (),
        weigh: bool = False,
        elsewhere: Collection[bytes] = (),
    ) -> Admitted:
        """`admit` where an entry has rows in several groups, those of `groups` that are `wanted`
        for it: it gets all that it lacks, or none."""
        places = wanted(len(keys))
        if weigh:
            worth = self._worth(keys, places, now_s, first, parent, elsewhere)
            places = places if worth == len(keys) else wanted(worth)
        lacking = [
            (key, [g for g in own if key not in self._ready[g] and key not in self._arriving[g]])
            for key, own in zip(keys, places, strict=False)
            if key not in self._leaving and key not in elsewhere
        ]
        lacking = [(key, without) for key, without in lacking if without]
        short = sum(len(without) for _, without in lacking) - len(self._free)
        evicted = []
        if short > 0:
            evicted = self._make_room(short, (keys, keep))
        new: list[bytes] = []
        rows: list[list[int]] = [[] for _ in groups]
        for key, without in lacking:
            if len(without) > len(self._free):
                break
            for at, group in enumerate(groups):
                row = NO_ROW
                if group in without:
                    row = self._free.pop()
                    self._arriving[group].add((key,), (row,))
                rows[at].append(row)
            new.append(key)
        self._insert(keys, new, now_s, first, parent)
        return Admitted(new, rows, evicted, len(lacking) - len(new))

    def _worth(
        self,
        keys: Sequence[bytes],
        places: Sequence[Sequence[int]],
        now_s: float,
        first: int,
        parent: bytes | None,
        elsewhere: Collection[bytes],
    ) -> int:
        """How many of the first of these are worth their rows; what is there already always is."""
        new = [
            (key, len(own))
            for key, own in zip(keys, places, strict=True)
            if own and key not in self.policy and key not in self._leaving and key not in elsewhere
        ]
        room, left = 0, len(self._free)
        for _, rows in new:
            left -= rows
            if left < 0:
                break
            room += 1
        absent = [key for key, _ in new]
        worthy = self._worthy(keys, absent, room, now_s, first, parent)
        return keys.index(absent[len(worthy)]) if len(worthy) < len(absent) else len(keys)

    def _worthy(
        self,
        keys: Sequence[bytes],
        new: Sequence[bytes],
        room: int,
        now_s: float,
        first: int,
        parent: bytes | None,
    ) -> Sequence[bytes]:
        """The beginning of what is new in a run that is worth an entry, `room` being free."""
        count = len(new)
        if self.admission is not None:
            new = new[: self.admission.admit(new)]
        if len(new) > room:
            at = keys.index(new[0])
            before = keys[at - 1] if at else parent
            new = new[: self.policy.admit(new, room, now_s, first + at, before)]
        self.counters.refused += count - len(new)
        return new

    def _insert(
        self,
        keys: Sequence[bytes],
        new: Sequence[bytes],
        now_s: float,
        first: int,
        parent: bytes | None,
    ) -> None:
        """Tell the policy of new entries of the run `keys`, each unbroken part of it at once."""
        for observer in self.observers:
            observer.admitted(keys, parent)
        if len(new) == len(keys) and self.groups == 1:
            self.policy.insert(keys, now_s, first, parent)
            return
        unknown = {key for key in new if key not in self.policy}
        start = 0
        while start < len(keys):
            end = start
            while end < len(keys) and keys[end] in unknown:
                end += 1
            if end > start:
                before = keys[start - 1] if start else parent
                self.policy.insert(keys[start:end], now_s, first + start, before)
            start = end + 1

    def _make_room(self, rows: int, protected: Iterable[Collection[bytes]]) -> list[bytes]:
        """Evict until so many rows more are free, as far as that can be; who went."""
        held = self.held(*protected)
        evicted: list[bytes] = []
        if self.release is not None:
            rows -= self.release(rows, held)
        while rows > 0:
            # An entry may have fewer rows than there are groups: never more than is needed.
            victims = self.policy.victims(-(-rows // self.groups), held)
            if not victims:
                break
            evicted += victims
            rows -= self.let_go(victims)
        return evicted

    def let_go(self, victims: list[bytes]) -> int:
        """The policy gave these up. How many rows that frees, now or when they have been read."""
        self.counters.evictions += len(victims)
        if self.admission is not None:
            self.admission.gone(victims)
        self._tell_gone(victims)
        if self.spill is not None:
            needed = self.spill(victims)
            if needed:
                before = len(self._free) + self.rows_leaving
                for key in victims:
                    self._give_back(key)
                return len(self._free) + self.rows_leaving - before
        if self.groups == 1:
            freed = self._ready[0].pop(victims)
        else:
            found = [row for rows in self._ready for row in rows.pop_or(victims, NO_ROW)]
            freed = [row for row in found if row != NO_ROW]
        self._free.extend(reversed(freed))
        return len(freed)

    def commit(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[list[int]]:
        """What was arriving is there; rows by group, NO_ROW where nothing was. Keys that were
        forgotten meanwhile are passed over, and have NO_ROW too."""
        all_rows = []
        for group in groups:
            rows = self._arriving[group].pop_or(keys, NO_ROW)
            if NO_ROW in rows:
                came = [row != NO_ROW for row in rows]
                self._ready[group].add(list(compress(keys, came)), list(compress(rows, came)))
            else:
                self._ready[group].add(keys, rows)
            self.unread.gone(rows)
            for observer in self.observers:
                there = [k for k, row in zip(keys, rows, strict=True) if row != NO_ROW]
                observer.stored(PRIMARY, group, there)
            all_rows.append(rows)
        return all_rows

    def take_back(self, keys: Iterable[bytes], groups: Sequence[int]) -> list[int]:
        """What was arriving will not come; its rows, which are not free yet: see `free`."""
        taken = []
        for key in keys:
            for group in groups:
                [row] = self._arriving[group].pop_or((key,), NO_ROW)
                if row != NO_ROW:
                    taken.append(row)
            self._forget_if_empty(key)
        return taken

    def forget(self, keys: Iterable[bytes]) -> int:
        """These must not be used: not there any more. How many there were. What still arrives of
        them stays."""
        gone, keys = 0, list(keys)
        self._tell_gone(keys)
        for key in keys:
            gone += self._give_back(key)
            self._forget_if_empty(key)
        return gone

    def drop(self, key: bytes, group: int) -> int:
        """Give up what an entry that nothing holds has in one group; how many rows that frees."""
        [row] = self._ready[group].pop_or((key,), NO_ROW)
        if row == NO_ROW:
            return 0
        self._free.append(row)
        for observer in self.observers:
            observer.removed(PRIMARY, group, (key,))
        self._forget_if_empty(key)
        self.counters.rows_left += 1
        return 1

    def _tell_gone(self, keys: Sequence[bytes]) -> None:
        """What of these is ready will not be any more."""
        for observer in self.observers:
            for group, rows in enumerate(self._ready):
                there = list(compress(keys, rows.contains(keys)))
                if there:
                    observer.removed(PRIMARY, group, there)

    def _forget_if_empty(self, key: bytes) -> None:
        if not any(key in rows for rows in (*self._ready, *self._arriving)):
            self.policy.remove((key,))

    def reset(self) -> None:
        """Forget everything that is ready; what is pinned leaves when its pins go."""
        self.forget(self.ready_keys())
