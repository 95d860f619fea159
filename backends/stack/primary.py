"""Metadata of the primary tier: which entry stands in which rows of the region.

An entry is one chunk of a sequence, named by its hash. It has at most one row in each KV-cache
group: a group whose chunks are longer, or which keeps only a window, has rows for some entries and
not for others. All rows are one pool, so that groups share the capacity without dividing it.

An entry's row in a group is *arriving* from when it is handed out until its bytes are there, and
*ready* from then on. An entry that is pinned, or has a row that arrives, is not evicted. One that
is forgotten while a transfer still uses its rows is *leaving*: its rows are free when the last pin
goes, and the key stays unusable until then. Nothing here touches bytes, knows a tier, or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from backends.errors import ConfigError
from backends.policy.admission import AdmissionPolicy
from backends.policy.base import EvictionPolicy
from backends.stack.observer import PRIMARY, Observer
from backends.stack.unread import Unread

NO_ROW: Final = -1

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


class PrimaryIndex:
    """Entries, rows, pins and the order in which entries go. Keys of one call are distinct."""

    def __init__(self, rows: int, groups: int, policy: EvictionPolicy) -> None:
        check_rows(rows, groups)
        self.rows_total = rows
        self.groups = groups
        self.every_group = tuple(range(groups))
        # The groups in which an entry that is whole always has a row.
        self.lead: Sequence[int] = self.every_group
        self.policy = policy
        self.counters = PrimaryCounters()
        self.spill: Spill | None = None
        self.release: Release | None = None
        self.admission: AdmissionPolicy | None = None
        self.observers: Sequence[Observer] = ()
        self.unread: Unread[int] = Unread(rows)  # by row
        self._free = list(range(rows - 1, -1, -1))
        self._ready: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._arriving: list[dict[bytes, int]] = [{} for _ in range(groups)]
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
        found = list(map(self._ready[groups[0]].__contains__, keys))
        for group in groups[1:]:
            rows = self._ready[group]
            found = [there and key in rows for there, key in zip(found, keys, strict=True)]
        return found

    def all_ready(self, keys: Sequence[bytes], groups: Sequence[int]) -> bool:
        return all(all(map(self._ready[group].__contains__, keys)) for group in groups)

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
        return set().union(*self._ready)

    def rows_of(self, keys: Sequence[bytes], group: int) -> list[int]:
        """Rows of keys that are ready in this group. Raises KeyError for another."""
        return list(map(self._ready[group].__getitem__, keys))

    def rows_if_ready(self, keys: Sequence[bytes], group: int) -> list[int]:
        """Rows of keys in this group, NO_ROW where one is not ready."""
        return list(map(self._ready[group].get, keys, repeat(NO_ROW)))

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
            ready.keys().isdisjoint(keys)
            and arriving.keys().isdisjoint(keys)
            and self._leaving.keys().isdisjoint(keys)
        ):
            absent = (k not in ready and k not in arriving and k not in self._leaving for k in keys)
            new = [key for key, wanted in zip(keys, absent, strict=True) if wanted]
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
        before = len(arriving)
        arriving.update(zip(new, rows, strict=True))
        if len(arriving) != before + len(new):
            for key in set(new):
                del arriving[key]
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
                    row = self._arriving[group][key] = self._free.pop()
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

    def held(self, *others: Collection[bytes]) -> set[bytes]:
        """What must not be evicted now: `others`, what is pinned, and what arrives."""
        held: set[bytes] = set()
        for keys in (*others, self._pins, *self._arriving):
            if keys:
                held.update(keys)
        return held

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
            freed = list(map(self._ready[0].pop, victims))
        else:
            freed = [r[key] for r in self._ready for key in victims if key in r]
            for rows in self._ready:
                for key in victims:
                    rows.pop(key, None)
        self._free.extend(reversed(freed))
        return len(freed)

    def commit(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[list[int]]:
        """What was arriving is there; rows by group, NO_ROW where nothing was. Keys that were
        forgotten meanwhile are passed over, and have NO_ROW too."""
        all_rows = []
        for group in groups:
            rows = list(map(self._arriving[group].pop, keys, repeat(NO_ROW)))
            found = zip(keys, rows, strict=True)
            if NO_ROW in rows:
                self._ready[group].update((k, row) for k, row in found if row != NO_ROW)
            else:
                self._ready[group].update(found)
            self.unread.gone(rows)
            for observer in self.observers:
                there = [k for k, row in zip(keys, rows, strict=True) if row != NO_ROW]
                observer.stored(PRIMARY, group, there)
            all_rows.append(rows)
        return all_rows

    def written(self, rows: Collection[int]) -> None:
        """These, of what was committed, were computed and not brought in."""
        there = [row for row in rows if row != NO_ROW] if NO_ROW in rows else rows
        self.unread.written(there)

    def take_back(self, keys: Iterable[bytes], groups: Sequence[int]) -> list[int]:
        """What was arriving will not come; its rows, which are not free yet: see `free`."""
        taken = []
        for key in keys:
            for group in groups:
                row = self._arriving[group].pop(key, None)
                if row is not None:
                    taken.append(row)
            self._forget_if_empty(key)
        return taken

    def free(self, rows: Iterable[int]) -> None:
        """Rows that belong to no entry, and to no transfer, any more."""
        self._free.extend(rows)

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
        row = self._ready[group].pop(key, None)
        if row is None:
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
                there = [key for key in keys if key in rows]
                if there:
                    observer.removed(PRIMARY, group, there)

    def _give_back(self, key: bytes) -> bool:
        freed = [rows.pop(key) for rows in self._ready if key in rows]
        if key in self._pins:
            self._leaving.setdefault(key, []).extend(freed)
        else:
            self._free.extend(freed)
        return bool(freed)

    def _forget_if_empty(self, key: bytes) -> None:
        if not any(key in rows for rows in (*self._ready, *self._arriving)):
            self.policy.remove((key,))

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

    def reset(self) -> None:
        """Forget everything that is ready; what is pinned leaves when its pins go."""
        self.forget(self.ready_keys())


def check_rows(rows: int, groups: int) -> None:
    """Raises ConfigError where a region cannot hold even one entry."""
    if rows < groups or groups < 1:
        raise ConfigError(
            f"the region has {rows} rows, expected at least one for each of {groups} groups; "
            "make region.size larger or region.blocks_per_chunk smaller"
        )
