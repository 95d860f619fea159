"""The tier stack: where a replica's blocks are, and what is on its way between the tiers.

One object owns the region's metadata and drives the tiers below it. Its verbs are the field's own:

    lookup(keys)                  what is usable now, what will be soon; starts promotions
    touch(keys)                   a request uses these
    prepare_load / complete_load  rows to copy from, kept in place meanwhile
    prepare_store / complete_store  rows to copy to, usable by others once complete
    step()                        take in what the tiers have finished; once or more an engine step

`keys` are a run of one sequence, first chunk first, each key once: `keys[0]` is chunk number
`first` of it and `parent` the chunk before. Called by the leader's one thread. No verb but `drain`
and `close` waits, neither for a tier nor for a lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from itertools import repeat
from typing import Any, Final

from backends.errors import TierError
from backends.policy.admission import AdmissionPolicy
from backends.policy.base import EvictionPolicy
from backends.stack.asks import Asker
from backends.stack.below import Below
from backends.stack.cascade import REGION, Cascade
from backends.stack.counters import TierCounters
from backends.stack.headers import RowHeaders
from backends.stack.lane import Lane
from backends.stack.loads import Promotions, Run
from backends.stack.measure import EngineSpeed
from backends.stack.observer import Observer
from backends.stack.primary import PrimaryCounters, PrimaryIndex
from backends.stack.results import Found, Loading, Storing
from backends.stack.settings import StackSettings
from backends.tier.base import Lookup, Tier

_HIT: Final = Lookup.HIT
_SWEEP_S: Final = 1.0
_DRAIN_STEP_S: Final = 0.005


class TierStack:
    """See the module. The tiers are opened by the caller, nearest first, and closed by `close`."""

    def __init__(
        self,
        rows: int,
        policy: EvictionPolicy,
        tiers: Sequence[Tier] = (),
        settings: StackSettings = StackSettings(),  # noqa: B008 - frozen
        *,
        groups: int = 1,
        entry_bytes: int = 0,
        headers: RowHeaders | None = None,
        admission: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`rows` are those of the region. `headers` None: whoever copies keeps the rows' headers,
        or there are no tiers that need them. `entry_bytes` are moved for one entry. `clock` is
        what eviction goes by; deadlines never do.
        """
        self._index = PrimaryIndex(rows, groups, policy)
        self._index.admission = admission
        self._settings = settings
        self._observers = self._index.observers = observers
        self._lanes = [Lane(number, tier, settings, observers) for number, tier in enumerate(tiers)]
        self._asker = Asker(self._lanes, settings)
        self._loads = Promotions(self._index, self._lanes, self._asker, settings)
        self._cascade = Cascade(self._index, self._lanes, self._asker, settings)
        if tiers:
            self._index.spill = self._spill
        self._headers = headers
        self._rows_ahead = int(rows * settings.evict_ahead) if self._cascade.spills else 0
        self._storing: dict[bytes, float] = {}
        self._doomed: set[bytes] = set()
        self._sweep_at_s = 0.0
        self.clock = clock
        self.engine = EngineSpeed()
        self._below = Below(
            self._index,
            self._lanes,
            self._asker,
            self._loads,
            self.engine,
            settings,
            entry_bytes,
        )

    @property
    def index(self) -> PrimaryIndex:
        return self._index

    @property
    def counters(self) -> PrimaryCounters:
        """Of the region."""
        return self._index.counters

    @property
    def tier_counters(self) -> dict[str, TierCounters]:
        """Of each tier under the region, by name."""
        return {lane.name: lane.counters for lane in self._lanes}

    @property
    def rows_late(self) -> int:
        """Rows that a tier may still write to though its load was given up: nobody's meanwhile."""
        return self._loads.rows_late

    @property
    def busy(self) -> bool:
        """Whether a tier has a job, or a promotion waits for room: `step` may change something."""
        return self._cascade.busy or self._loads.busy

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        first: int = 0,
        parent: bytes | None = None,
        groups: Sequence[int] | None = None,
        keep: Collection[bytes] = (),
    ) -> Found:
        """What is there of a run, in all of `groups` (None: every group).

        Blocks that a lower tier has are brought in, as far as the run has no gap: up to its first
        MISS. The run itself and `keep` are not evicted for that. Ask again while it is PENDING.
        """
        index = self._index
        groups = index.every_group if groups is None else groups
        if index.all_ready(keys, groups):
            self._count_lookup(keys, len(keys))
            return Found([_HIT] * len(keys), None)
        now_s = time.monotonic()
        there = index.ready(keys, groups)
        answers = [_HIT if ready else Lookup.MISS for ready in there]
        until_s: list[float] = []
        absent: list[int] = []
        for at, key in enumerate(keys):
            if there[at]:
                continue
            deadline_s = self._coming(key)
            if self._loads.waited(key, now_s) or (deadline_s is None and index.leaving(key)):
                break
            if deadline_s is None and not index.present(key, groups):
                absent.append(at)
            elif deadline_s is None or deadline_s > now_s:
                answers[at] = Lookup.PENDING
                until_s.append(now_s if deadline_s is None else deadline_s)
            else:
                break
        if absent and self._lanes:
            run = Run(keys, groups, first, parent, {})
            self._below.find(run, absent, answers, until_s, {*keys, *keep}, now_s, self.clock())
        found = Found(answers, max(until_s, default=None))
        if not found.waits:
            self._count_lookup(keys, found.hits)
        return found

    def _coming(self, key: bytes) -> float | None:
        """When the wait for a key that is on its way is over; None if it is not."""
        if key in self._storing:
            return -math.inf if key in self._doomed else self._storing[key]
        leaves_s = self._cascade.leaves_s(key)
        return self._loads.deadline_s(key) if leaves_s is None else leaves_s

    def _count_lookup(self, keys: Sequence[bytes], hits: int) -> None:
        counters, held = self._index.counters, self._loads.held
        counters.lookups += min(len(keys), hits + 1)
        counters.hits += hits - sum(key in held for key in keys[:hits]) if held else hits

    def touch(self, keys: Sequence[bytes], request: Sequence[bytes] = ()) -> None:
        """A request uses this run, from here or from the device's own cache. Call it once a
        request, also with no keys; `request` are all that it has, which admission goes by. Keys
        that are not there are passed over; those that were just brought in from a tier do not count
        as used by that."""
        if self._index.admission is not None:
            self._index.admission.seen(request or keys)
        held = self._loads.held
        if held and not held.keys().isdisjoint(keys):
            end = next((n for n, key in enumerate(keys) if key in held), len(keys))
            keys = keys[:end]
        self._index.policy.touch(keys, self.clock())
        if self._lanes:
            self._cascade.touched(keys, time.monotonic())

    def prepare_load(
        self, keys: Sequence[bytes], *, groups: Sequence[int] | None = None
    ) -> Loading:
        """Rows of keys that are HIT, kept until `complete_load`. Raises TierError for another."""
        index = self._index
        groups = index.every_group if groups is None else groups
        try:
            rows = [index.rows_of(keys, group) for group in groups]
        except KeyError as error:
            raise TierError(
                f"key {error.args[0].hex()[:16]} is to be loaded and is not in the region; look it "
                "up in the same step, and load what is a HIT"
            ) from error
        index.pin(keys)
        for of_group in rows:
            index.unread.read(of_group)
        if not self._loads.held:
            return Loading(rows, {})
        came = self._loads.used(keys)
        return Loading(rows, {key: self._lanes[number].name for key, number in came.items()})

    def complete_load(self, keys: Sequence[bytes], failed: Collection[bytes] = ()) -> None:
        """The copies that `prepare_load` allowed have ended on all ranks. Those of `failed` were
        not what they should be on some rank: they are a miss for all from now on."""
        if failed:
            self._forget(failed)
        self._index.unpin(keys)

    def _forget(self, keys: Collection[bytes]) -> None:
        self._index.counters.errors += self._index.forget(keys)
        self._loads.used(keys)
        self._cascade.gone(keys)

    def prepare_store(
        self,
        keys: Sequence[bytes],
        *,
        first: int = 0,
        parent: bytes | None = None,
        groups: Sequence[int] | None = None,
        keep: Collection[bytes] = (),
    ) -> Storing:
        """Rows to store a run into, for those of its entries that are neither there nor coming.

        Only as far as the policies find them worth it. Room is made by evicting others than the run
        and `keep`. Where that is not enough the run is cut short; rows that are on their way out
        may be free after the next `step`.
        """
        index = self._index
        groups = index.every_group if groups is None else groups
        admitted = index.admit(
            keys,
            groups,
            self.clock(),
            first=first,
            parent=parent,
            keep=keep,
            weigh=True,
        )
        new = admitted.keys
        if new:
            until_s = time.monotonic() + self._settings.engine_timeout_s
            self._storing.update(dict.fromkeys(new, until_s))
            if self._headers is not None:
                for group, rows in zip(groups, admitted.rows, strict=True):
                    self._headers.announce(new, rows, group)
        return Storing(new, admitted.rows, admitted.evicted, admitted.short)

    def _spill(self, victims: list[bytes]) -> Collection[bytes]:
        return self._cascade.spill(victims, time.monotonic())

    def complete_store(
        self,
        keys: Sequence[bytes],
        failed: Collection[bytes] = (),
        *,
        groups: Sequence[int] | None = None,
    ) -> None:
        """All ranks have written these, but for `failed`, which some rank could not: those are
        nowhere. Any part of what `prepare_store` gave, in any order."""
        index = self._index
        groups = index.every_group if groups is None else groups
        if failed or self._doomed:
            lost = {*failed, *self._doomed.intersection(keys)}
            self._doomed -= lost
            index.free(index.take_back((key for key in keys if key in lost), groups))
            for key in lost:
                self._storing.pop(key, None)
            keys = [key for key in keys if key not in lost]
        deque(map(self._storing.pop, keys, repeat(0.0)), 0)
        rows = index.commit(keys, groups)
        index.counters.stored += len(keys)
        for of_group in rows:
            index.written(of_group)
            if self._headers is not None:
                self._headers.complete(of_group)
        if self._lanes:
            self._cascade.arrived(keys, REGION, time.monotonic())

    def step(self) -> None:
        """Take in what the tiers have finished, and begin what there is room for now."""
        for observer in self._observers:
            observer.stepped()
        if not self._lanes:
            return
        now_s = time.monotonic()
        for lane in self._lanes:
            for flight, result in lane.poll(now_s):
                if flight.is_load:
                    whole = self._loads.landed(lane, flight, result, now_s)
                    self._cascade.arrived(whole, lane.number, now_s)
                else:
                    self._cascade.ended(lane, flight, result, now_s)
        self._loads.advance(now_s, self.clock())
        if self._rows_ahead:
            self._write_ahead()
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + _SWEEP_S
            self._asker.sweep(now_s)
            self._loads.sweep(now_s)

    def _write_ahead(self) -> None:
        """Evict before there is need, where what is evicted has to be written first."""
        index = self._index
        short = self._rows_ahead - index.rows_free - index.rows_leaving
        if short > 0:
            count = -(-short // index.groups)
            index.let_go(index.policy.victims(count, index.held()))

    def region_report(self) -> dict[str, Any]:
        """The region's counts in entries, and what it holds in rows, in plain JSON types."""
        index = self._index
        return asdict(index.counters) | {
            "never_read": index.unread.count,
            "rows": index.rows_total,
            "rows_used": index.rows_used,
            "rows_pinned": index.rows_pinned,
        }

    def report(self) -> dict[str, dict[str, Any]]:
        """Each tier's counts and what it holds, in plain JSON types."""
        found = {}
        for lane in self._lanes:
            own = lane.tier.counters()
            found[lane.name] = asdict(lane.counters) | {
                "usage": asdict(lane.tier.usage()),
                "never_read": lane.unread.count,
                "evictions": own.get("evicted", 0),
                "corrupt": own.get("corrupt", 0),
                "edge": str(lane.edge),
                "breaker": lane.breaker.state,
                "breaker_opened": lane.breaker.opened,
                "own": dict(own),
            }
        return found

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is under way has ended, along all edges; False if a tier did
        not in time."""
        until_s = time.monotonic() + timeout_s
        while True:
            self.step()
            if not self.busy:
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            for lane in self._lanes:
                if lane.flights:
                    lane.tier.drain(min(left_s, _DRAIN_STEP_S))

    def reset(self) -> None:
        """Forget the region's blocks, those that are on their way included: what they hold is no
        longer right. The tiers keep theirs."""
        self._doomed.update(self._storing)
        self._loads.reset(time.monotonic())
        self._asker.clear()
        self._cascade.gone(set(self._index.ready_keys()))
        self._index.reset()

    def close(self) -> None:
        """Close the tiers; rows that one of them still uses must not be used again."""
        for lane in self._lanes:
            lane.open = False
        for lane in self._lanes:
            lane.tier.close()
        self.step()
        if self._headers is not None:
            self._headers.close()
