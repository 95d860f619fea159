"""Promotion: blocks of lower tiers on their way into the region.

What is promoted takes at most a share of the region's rows, from when its load begins until it is
first used or has been held long enough: waiting requests cannot fill the region. What there is no
room for now waits its turn, with a deadline, and is fetched ahead as room comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.block import BlockKey
from backends.stack.asks import Asker
from backends.stack.lane import Flight, Lane
from backends.stack.primary import PrimaryIndex
from backends.stack.rows import NO_ROW
from backends.stack.settings import StackSettings
from backends.tier.base import JobResult, Outcome

_GRACE_S: Final = 0.1  # for a tier that says LATE to say so
_KEEP_S: Final = 10.0  # for whoever asked to learn that there was no room in time


@dataclass(frozen=True, slots=True)
class Run:
    """Entries of one sequence: `keys[0]` is chunk number `first`, behind `parent`. `sources` has,
    for each of them that is not in the region, the number of the tier that holds it by group, or
    HERE for a group in which it is in the region."""

    keys: Sequence[bytes]
    groups: Sequence[int]
    first: int
    parent: bytes | None
    sources: Mapping[bytes, Sequence[int]]

    def part(self, start: int, end: int) -> Run:
        parent = self.keys[start - 1] if start else self.parent
        return Run(self.keys[start:end], self.groups, self.first + start, parent, self.sources)


@dataclass(slots=True)
class Arrival:
    """An entry on its way in: into these groups, from these tiers. `ended` are the rows whose job
    has its result."""

    key: bytes
    groups: Sequence[int]
    sources: Sequence[int]
    deadline_s: float
    blocks_left: int
    failed: bool = False
    given_up: bool = False
    ended: list[int] = field(default_factory=list)


class Promotions:
    """Loads into the region: waiting for room, under way, landed and held for whoever asked."""

    def __init__(
        self, index: PrimaryIndex, lanes: Sequence[Lane], asker: Asker, settings: StackSettings
    ) -> None:
        self._index = index
        self._lanes = lanes
        self._asker = asker
        self._settings = settings
        # Told of the rows that a tier is about to write to.
        self.overwrites: Callable[[Iterable[int]], object] = lambda rows: None
        self._rows_most = max(index.groups, int(index.rows_total * settings.promotion_share))
        self._arrivals: dict[bytes, Arrival] = {}
        self._flights: dict[tuple[int, int], list[Arrival]] = {}
        self._rows_arriving = 0
        self._rows_held = 0
        self.rows_late = 0
        self._queue: deque[tuple[Run, Collection[bytes], float]] = deque()
        self._queued: dict[bytes, float] = {}
        # Landed and pinned: the tier it came from, until when it is held, and its rows.
        self.held: dict[bytes, tuple[int, float, int]] = {}

    @property
    def rows_taken(self) -> int:
        """Rows on their way in, late ones included, and rows that are held for somebody."""
        return self._rows_arriving + self._rows_held

    @property
    def busy(self) -> bool:
        return bool(self._rows_arriving or self._queue)

    def deadline_s(self, key: bytes) -> float | None:
        """When an entry's wait for room, or its load, will have ended; None if it has neither."""
        arrival = self._arrivals.get(key)
        return self._queued.get(key) if arrival is None else arrival.deadline_s

    def waited(self, key: bytes, now_s: float) -> bool:
        """Whether it waited for room in vain. Who asks is to be told that it is a miss, once."""
        until_s = self._queued.get(key)
        if until_s is None or until_s > now_s:
            return False
        del self._queued[key]
        return True

    def request(self, run: Run, keep: Collection[bytes], now_s: float, clock_s: float) -> int:
        """Load a run; how many of its leading entries are, or wait to be, on their way. The others
        never can be: what is kept for their own sequence takes all the room there is."""
        started = self._start(run, keep, now_s, clock_s)
        waiting = sum(self._queued.get(key, 0.0) > now_s for key in keep)
        rows = self._rows_of(keep) + waiting * len(run.groups)
        room = max(0, self._rows_most - rows) // len(run.groups)
        absent = [key for key in run.keys[started:] if key in run.sources]
        end = run.keys.index(absent[room]) if room < len(absent) else len(run.keys)
        if started < end:
            until_s = now_s + self._settings.load_timeout_s
            self._queue.append((run.part(started, end), keep, until_s))
            self._queued.update(dict.fromkeys(absent[:room], until_s))
        self._no_room(run, absent[room:])
        return end

    def _rows_of(self, keys: Collection[bytes]) -> int:
        """Rows that these have because of their promotion."""
        arrivals = (self._arrivals[key] for key in keys if key in self._arrivals)
        held = (self.held[key][2] for key in keys if key in self.held)
        return sum(len(arrival.ended) + arrival.blocks_left for arrival in arrivals) + sum(held)

    def _no_room(self, run: Run, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._lanes[max(run.sources[key])].counters.no_room += 1

    def _start(self, run: Run, keep: Collection[bytes], now_s: float, clock_s: float) -> int:
        """Submit what there is room for; the end of the leading entries that are on their way."""
        index, keys = self._index, run.keys[: self._whole(run)]
        entries = max(0, self._rows_most - self.rows_taken) // len(run.groups)
        absent = [k for k in keys if k in run.sources and not index.present(k, run.groups)]
        if entries < len(absent):
            keys = keys[: keys.index(absent[entries])]
        admitted = index.admit(
            keys, run.groups, clock_s, first=run.first, parent=run.parent, keep=keep
        )
        self._submit(run, admitted.keys, admitted.rows, now_s)
        waiting = set(absent).difference(admitted.keys)
        return next((n for n, key in enumerate(run.keys) if key in waiting), len(run.keys))

    def _whole(self, run: Run) -> int:
        """Up to where nothing has gone from the region that was there when the run was asked
        for: what is behind such a gap is of no use."""
        index = self._index
        for at, key in enumerate(run.keys):
            sources = run.sources.get(key)
            if sources is None:
                gone = not index.present(key, run.groups)
            else:
                gone = any(
                    source < 0 and not index.present(key, (group,))
                    for group, source in zip(run.groups, sources, strict=True)
                )
            if gone:
                return at
        return len(run.keys)

    def _submit(
        self, run: Run, keys: Sequence[bytes], rows: Sequence[Sequence[int]], now_s: float
    ) -> None:
        deadline_s = now_s + self._settings.load_timeout_s
        jobs: dict[int, tuple[list[Arrival], list[BlockKey], list[int]]] = {}
        for n, key in enumerate(keys):
            places = [
                (group, source, rows[at][n])
                for at, (group, source) in enumerate(zip(run.groups, run.sources[key], strict=True))
                if rows[at][n] != NO_ROW
            ]
            # Only what this brings in: somebody else may be storing the entry's other groups.
            groups, sources = [group for group, *_ in places], [source for _, source, _ in places]
            arrival = Arrival(key, groups, sources, deadline_s + _GRACE_S, len(places))
            for group, source, row in places:
                arrivals, blocks, into = jobs.setdefault(source, ([], [], []))
                arrivals.append(arrival)
                blocks.append(BlockKey(key, group))
                into.append(row)
            self._arrivals[key] = arrival
            self._rows_arriving += arrival.blocks_left
        most = self._settings.batch_blocks
        for number, (arrivals, blocks, into) in jobs.items():
            lane = self._lanes[number]
            lane.breaker.allows(now_s)
            self.overwrites(into)
            for start in range(0, len(blocks), most):
                end = start + most
                job_id = lane.submit(
                    blocks[start:end],
                    into[start:end],
                    is_load=True,
                    now_s=now_s,
                    deadline_s=deadline_s,
                )
                self._flights[number, job_id] = arrivals[start:end]

    def landed(self, lane: Lane, flight: Flight, result: JobResult, now_s: float) -> list[Arrival]:
        """A load ended; what is whole in the region by it."""
        arrivals = self._flights.pop((lane.number, flight.job_id))
        whole: list[Arrival] = []
        for at, arrival in enumerate(arrivals):
            arrival.blocks_left -= 1
            self._rows_arriving -= 1
            if result.outcomes[at] is not Outcome.DONE:
                arrival.failed = True
                self._asker.refuse(flight.blocks[at], lane.number, now_s)
            if arrival.given_up:
                self.rows_late -= 1
                self._index.free((flight.rows[at],))
                continue
            arrival.ended.append(flight.rows[at])
            if not arrival.blocks_left:
                del self._arrivals[arrival.key]
                if arrival.failed:
                    self._index.free(self._index.take_back((arrival.key,), arrival.groups))
                else:
                    whole.append(arrival)
        for arrival in whole:
            self._index.commit((arrival.key,), arrival.groups)
            source, rows = max(arrival.sources), len(arrival.ended)
            before = self.held.get(arrival.key)
            if before is None:
                self._index.pin((arrival.key,))
            else:
                rows += before[2]
            self.held[arrival.key] = (source, now_s + self._settings.hold_s, rows)
            self._rows_held += len(arrival.ended)
            self._lanes[source].counters.hits += 1
        self._index.counters.promoted += len(whole)
        return whole

    def used(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """The engine has its own pins on these now. Those that were held: where they came from."""
        held = self.held
        came: dict[bytes, int] = {}
        for key in keys if held else ():
            if key in held:
                came[key], _, rows = held.pop(key)
                self._rows_held -= rows
        if came:
            self._index.unpin(list(came))
        return came

    def advance(self, now_s: float, clock_s: float) -> None:
        """Give up what is late, let go what nobody came for, begin what there is room for now."""
        late = [a for a in self._arrivals.values() if a.deadline_s <= now_s]
        for number in {source for a in late for source in a.sources if source >= 0}:
            self._lanes[number].breaker.ended(now_s, worked=False)
        for arrival in late:
            self._give_up(arrival, now_s)
        for key in [key for key, (_, until_s, _) in self.held.items() if until_s <= now_s]:
            self.used((key,))
        for _ in range(len(self._queue)):
            run, keep, until_s = self._queue.popleft()
            # What was in the region when this run came may have gone since, and wait for another.
            waiting = [key for key in run.keys if key in run.sources and key in self._queued]
            if until_s <= now_s:
                self._no_room(run, waiting)
                continue
            if not waiting:
                continue
            for key in waiting:
                del self._queued[key]
            begun = self._start(run, keep, now_s, clock_s)
            if begun < len(run.keys):
                rest = run.part(begun, len(run.keys))
                self._queue.append((rest, keep, until_s))
                absent = (k for k in rest.keys if k in rest.sources)
                self._queued.update(dict.fromkeys(absent, until_s))

    def _give_up(self, arrival: Arrival, now_s: float) -> None:
        """Its rows are free as the tiers let go of them."""
        del self._arrivals[arrival.key]
        arrival.given_up = True
        self.rows_late += arrival.blocks_left
        self._index.take_back((arrival.key,), arrival.groups)
        self._index.free(arrival.ended)
        for group, source in zip(arrival.groups, arrival.sources, strict=True):
            if source >= 0:
                self._lanes[source].counters.given_up += 1
                self._asker.refuse(BlockKey(arrival.key, group), source, now_s)

    def sweep(self, now_s: float) -> None:
        """Forget the deadlines that nobody came back for."""
        late_s = now_s - _KEEP_S
        self._queued = {key: until_s for key, until_s in self._queued.items() if until_s > late_s}

    def reset(self, now_s: float) -> None:
        """Nothing of what is on its way is wanted any more."""
        for arrival in list(self._arrivals.values()):
            self._give_up(arrival, now_s)
        self.used(list(self.held))
        self._queue.clear()
        self._queued.clear()
