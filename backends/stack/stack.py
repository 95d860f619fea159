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

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from backends.errors import ConfigError, TierError
from backends.policy.admission import AdmissionPolicy
from backends.policy.base import EvictionPolicy
from backends.stack.asks import Asker
from backends.stack.below import Below
from backends.stack.cascade import REGION, Cascade
from backends.stack.counters import TierCounters
from backends.stack.headers import RowHeaders
from backends.stack.hybrid import HybridLookup
from backends.stack.lane import Lane
from backends.stack.loads import Promotions
from backends.stack.measure import EngineSpeed
from backends.stack.observer import Observer
from backends.stack.primary import PrimaryCounters, PrimaryIndex
from backends.stack.report import region_report, tier_reports
from backends.stack.results import Found, Loading, Storing
from backends.stack.settings import StackSettings
from backends.stack.stores import Stores
from backends.stack.whole import WholeLookup
from backends.stack.windows import Reach, Windows
from backends.tier.base import Lookup, Tier

if TYPE_CHECKING:
    from backends.stack.node import NodeRows

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
        reach: Reach = (),
        entry_bytes: int = 0,
        headers: RowHeaders | None = None,
        admission: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.monotonic,
        observers: Sequence[Observer] = (),
        node: NodeRows | None = None,
    ) -> None:
        """`rows` are those of the region. `reach`, one a group: see `backends.stack.windows`;
        without it every group has to be there for every entry of a hit. `headers` None: whoever
        copies keeps the rows' headers, or there are no tiers that need them. `entry_bytes` are
        moved for one entry. `clock` is what eviction goes by; deadlines go by `now`, which only a
        simulation changes. `node` are the rows of other replicas that may be used too; `close`
        closes it.
        """
        self._index = PrimaryIndex(rows, groups, policy)
        self._node = node
        if node is not None:
            node.bind(self._index)
            observers = (*observers, node)
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
        if headers is not None:
            self._loads.overwrites = headers.overwritten
        self._rows_ahead = int(rows * settings.evict_ahead) if self._cascade.spills else 0
        self._sweep_at_s = 0.0
        self.clock = clock
        self._now = now
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
        self._windows: Windows | None = None
        if any(own is not None for own in reach):
            if node is not None:
                raise ConfigError(
                    "groups with a window were given together with the rows of other replicas, "
                    "which are found for whole entries alone; use region.scope=replica"
                )
            self._windows = Windows(self._index, reach, self._cascade.dropped)
            self._index.lead = self._windows.full
            self._index.release = self._windows.release
            self._hybrid = HybridLookup(
                self._index, self._windows, self._asker, self._loads, self._below, self._coming
            )
        self._whole = WholeLookup(
            self._index, node, self._loads, self._below if tiers else None, self._coming
        )
        self._stores = Stores(self._index, self._windows, headers, node, settings.engine_timeout_s)

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
    def shares_rows(self) -> bool:
        """Whether rows of other replicas of this node are used too."""
        return self._node is not None

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
        if groups is None and self._windows is not None:
            now_s, clock_s = self._now(), self.clock()
            found = self._hybrid.find(keys, first, parent, keep, now_s, clock_s)
            if not found.waits:
                self._count_lookup(keys, found.hits)
            return found
        groups = index.every_group if groups is None else groups
        if index.all_ready(keys, groups):
            self._count_lookup(keys, len(keys))
            return Found([_HIT] * len(keys), None)
        found = self._whole.find(keys, groups, first, parent, keep, self._now(), self.clock())
        if not found.waits:
            self._count_lookup(keys, found.hits)
        return found

    def _coming(self, key: bytes) -> float | None:
        """When the wait for a key that is on its way is over; None if it is not."""
        stored_s = self._stores.deadline_s(key)
        if stored_s is not None:
            return stored_s
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
        if self._node is not None:
            self._node.used(keys)
        if self._windows is not None:
            self._windows.used(keys)
        held = self._loads.held
        if held and not held.keys().isdisjoint(keys):
            end = next((n for n, key in enumerate(keys) if key in held), len(keys))
            keys = keys[:end]
        self._index.policy.touch(keys, self.clock())
        if self._lanes:
            self._cascade.touched(keys, self._now())

    def prepare_load(
        self, keys: Sequence[bytes], *, groups: Sequence[int] | None = None
    ) -> Loading:
        """Rows of keys that are HIT, kept until `complete_load`. Raises TierError for another.

        In a group that keeps a window, only those that a hit which ends here needs."""
        index, windows = self._index, self._windows if groups is None else None
        groups = index.every_group if groups is None else groups
        try:
            if windows is None:
                rows = [index.rows_of(keys, group) for group in groups]
            else:
                rows = windows.rows(keys)
        except KeyError as error:
            found = None if self._node is None else self._node.load(keys, groups)
            if found is None:
                raise TierError(
                    f"key {error.args[0].hex()[:16]} is to be loaded and is not in the region; "
                    "look it up in the same step, and load what is a HIT"
                ) from error
            rows = found
        index.pin(keys)
        for of_group in rows:
            index.unread.read(of_group)
        sources = {} if self._node is None else self._node.sources(keys)
        if self._loads.held:
            came = self._loads.used(keys)
            sources |= {key: self._lanes[number].name for key, number in came.items()}
        return Loading(rows, sources)

    def complete_load(self, keys: Sequence[bytes], failed: Collection[bytes] = ()) -> None:
        """The copies that `prepare_load` allowed have ended on all ranks. Those of `failed` were
        not what they should be on some rank: they are a miss for all from now on."""
        if failed:
            self._forget(failed)
        if self._node is not None:
            self._node.loaded(keys, failed)
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
        parted: int = 0,
        held_from: Sequence[int] = (),
    ) -> Storing:
        """Rows to store a run into, for those of its entries that are neither there nor coming.

        Only as far as the policies find them worth it. Room is made by evicting others than the run
        and `keep`. Where that is not enough the run is cut short; rows that are on their way out
        may be free after the next `step`.

        Where a group keeps a window, the run is all that its request has, first chunk first. Behind
        `parted` of its keys it parted from other requests, as the lookup said. `held_from` has, by
        group, the first key whose bytes the engine holds.
        """
        return self._stores.begin(
            keys,
            groups,
            self._now(),
            self.clock(),
            first=first,
            parent=parent,
            keep=keep,
            parted=parted,
            held_from=held_from,
        )

    def _spill(self, victims: list[bytes]) -> Collection[bytes]:
        return self._cascade.spill(victims, self._now())

    def complete_store(
        self,
        keys: Sequence[bytes],
        failed: Collection[bytes] = (),
        *,
        groups: Sequence[int] | None = None,
    ) -> None:
        """All ranks have written these, but for `failed`, which some rank could not: those are
        nowhere. Any part of what `prepare_store` gave, in any order."""
        stored = self._stores.end(keys, failed, groups)
        if self._lanes:
            self._cascade.arrived(stored, REGION, self._now())

    def step(self) -> None:
        """Take in what the tiers have finished, and begin what there is room for now."""
        for observer in self._observers:
            observer.stepped()
        if self._node is not None:
            self._node.take_in(self.clock())
        if not self._lanes:
            return
        now_s = self._now()
        for lane in self._lanes:
            for flight, result in lane.poll(now_s):
                if flight.is_load:
                    whole = self._loads.landed(lane, flight, result, now_s)
                    for arrival in whole:
                        self._cascade.loaded(arrival.key, arrival.groups, arrival.sources)
                    self._cascade.arrived([a.key for a in whole], lane.number, now_s)
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
        if short > 0 and self._windows is not None:
            short -= self._windows.release(short, index.held())
        if short > 0:
            count = -(-short // index.groups)
            index.let_go(index.policy.victims(count, index.held()))

    def under_way(self) -> dict[str, tuple[int, int]]:
        """Blocks that are being stored into each tier, and loaded from it, now."""
        return {lane.name: (lane.storing_blocks, lane.loading_blocks) for lane in self._lanes}

    def used_bytes(self) -> dict[str, int]:
        """What is in each tier, of all who share it."""
        return {lane.name: lane.tier.usage().bytes for lane in self._lanes}

    def evicted(self) -> dict[str, int]:
        """Blocks that went from each tier to make room."""
        return {lane.name: lane.tier.counters().get("evicted", 0) for lane in self._lanes}

    def region_report(self) -> dict[str, Any]:
        """The region's counts in entries, and what it holds in rows, in plain JSON types."""
        return region_report(self._index, self._node)

    def report(self) -> dict[str, dict[str, Any]]:
        """Each tier's counts and what it holds, in plain JSON types."""
        return tier_reports(self._lanes)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is under way has ended, along all edges; False if a tier did
        not in time."""
        until_s = self._now() + timeout_s
        while True:
            self.step()
            if not self.busy:
                # Nothing of ours is under way, but a tier may have to hear of what others did.
                for lane in self._lanes:
                    if lane.open:
                        lane.tier.drain(0.0)
                return True
            left_s = until_s - self._now()
            if left_s <= 0:
                return False
            for lane in self._lanes:
                if lane.flights:
                    lane.tier.drain(min(left_s, _DRAIN_STEP_S))

    def settle(self, timeout_s: float) -> bool:
        """`drain`, and let every tier learn what others did; False if one did not in time."""
        self._asker.forget_asked()
        return self.drain(timeout_s) and all(lane.tier.settle(timeout_s) for lane in self._lanes)

    def reset(self) -> None:
        """Forget the region's blocks, those that are on their way included: what they hold is no
        longer right. The tiers keep theirs."""
        self._stores.doom()
        self._loads.reset(self._now())
        self._asker.clear()
        self._cascade.gone(set(self._index.ready_keys()))
        self._index.reset()
        if self._windows is not None:
            self._windows.forget()

    def close(self) -> None:
        """Close the tiers; rows that one of them still uses must not be used again."""
        for lane in self._lanes:
            lane.open = False
        for lane in self._lanes:
            lane.tier.close()
        self.step()
        if self._headers is not None:
            self._headers.close()
        if self._node is not None:
            self._node.close()
