"""One tier as the stack sees it: its jobs, what was measured of it, what was counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from backends.block import BlockKey
from backends.stack.counters import TierCounters
from backends.stack.measure import Breaker, LoadCost, StoreRate
from backends.stack.observer import Observer
from backends.stack.settings import StackSettings
from backends.stack.unread import Unread
from backends.tier.base import NONE_EVICTED, Evicted, Job, JobResult, Lookup, Outcome, Tier


@dataclass(slots=True)
class Flight:
    """A job under way, and the stack's number for it."""

    job_id: int
    blocks: tuple[BlockKey, ...]
    rows: tuple[int, ...]
    is_load: bool
    began_s: float


class Lane:
    """A tier, and what is on its way to and from it."""

    def __init__(
        self,
        number: int,
        tier: Tier,
        settings: StackSettings,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.number = number
        self.tier = tier
        self.name = tier.name
        self.edge = settings.edge(number)
        self.counters = TierCounters()
        self.unread: Unread[BlockKey] = Unread()
        self._observers = observers
        self.cost = LoadCost()
        self.store_rate = StoreRate()
        self.breaker = Breaker(
            settings.breaker_failures, settings.breaker_retry_s, settings.breaker_retry_most_s
        )
        self.flights: dict[int, Flight] = {}
        self._gone_early: list[BlockKey] = []  # evicted, and in a store that is under way
        self.storing_blocks = 0
        self.open = True
        self.remeasure_at_s = 0.0
        self._next_id = 0
        # Until when the time in which it had loads, and stores, is counted.
        self._counted_s = {True: 0.0, False: 0.0}

    @property
    def loading_blocks(self) -> int:
        return sum(len(flight.blocks) for flight in self.flights.values() if flight.is_load)

    def submit(
        self,
        blocks: Sequence[BlockKey],
        rows: Sequence[int],
        *,
        is_load: bool,
        now_s: float,
        deadline_s: float,
    ) -> int:
        """Give the tier a job; its number here. Raises TierError where the tier is closed."""
        job_id, self._next_id = self._next_id, self._next_id + 1
        flight = Flight(job_id, tuple(blocks), tuple(rows), is_load, now_s)
        job = Job(job_id, flight.blocks, flight.rows, deadline_s)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        self.flights[job_id] = flight
        if not is_load:
            self.storing_blocks += len(blocks)
        return job_id

    def poll(self, now_s: float) -> list[tuple[Flight, JobResult]]:
        """Jobs that ended since the last call, counted, and what the tier has let go is told."""
        gone = self.tier.evicted()  # before the results: what goes from now on is for the next call
        ended = []
        for result in self.tier.poll():
            flight = self.flights.pop(result.job_id)
            self._count(flight, result, now_s)
            ended.append((flight, result))
        if self._observers and (gone is not NONE_EVICTED or self._gone_early):
            self._tell_evicted(gone, {block for flight, _ in ended for block in flight.blocks})
        return ended

    def _tell_evicted(self, gone: Evicted, ended: Collection[BlockKey]) -> None:
        """`ended` are the blocks of jobs that are just through: those are told of already."""
        if gone.more:
            for observer in self._observers:
                observer.cleared(self.name)
        # A store that is under way, or through by now, may have brought it in before it went or
        # after that: once it has been told to be there, the tier knows.
        coming = {
            block
            for flight in self.flights.values()
            if not flight.is_load
            for block in flight.blocks
        }
        keys = [*self._gone_early, *gone.keys]
        self._gone_early = [block for block in keys if block in coming]
        again = [block for block in keys if block in ended]
        answers = self.tier.lookup(again) if again else ()
        there = {b for b, answer in zip(again, answers, strict=True) if answer is Lookup.HIT}
        self._tell_lost([block for block in keys if block not in coming and block not in there])

    def _count(self, flight: Flight, result: JobResult, now_s: float) -> None:
        counters, is_load = self.counters, flight.is_load
        counters.misfortunes(result)
        ended_s = flight.began_s + result.seconds
        busy_s = max(0.0, ended_s - max(flight.began_s, self._counted_s[is_load]))
        self._counted_s[is_load] = max(ended_s, self._counted_s[is_load])
        # A tier that finds nothing, or damage, or has no room, works; one that cannot say does not.
        worked = any(o not in (Outcome.LATE, Outcome.FAILED) for o in result.outcomes)
        self.breaker.ended(now_s, worked=worked or not result.outcomes)
        if is_load:
            counters.load_s += busy_s
            counters.load_latency.add(result.seconds)
            counters.load_job_s += result.seconds
            self.unread.read(_ended(flight, result, Outcome.DONE))
            self._tell_lost(_ended(flight, result, Outcome.MISSING, Outcome.CORRUPT))
            counters.loaded_bytes += result.bytes_moved
            if result.bytes_moved:
                self.cost.add(result.bytes_moved, result.seconds)
        else:
            counters.store_s += busy_s
            counters.stored_bytes += result.bytes_moved
            self.storing_blocks -= len(flight.blocks)
            self.store_rate.add(result.outcomes.count(Outcome.DONE), busy_s)
            stored = _ended(flight, result, Outcome.DONE)
            self.unread.written(stored)
            for observer in self._observers:
                for group, keys in by_group(stored).items():
                    observer.stored(self.name, group, keys)

    def _tell_lost(self, blocks: Sequence[BlockKey]) -> None:
        """The tier does not have these any more, or not whole."""
        for observer in self._observers:
            for group, keys in by_group(blocks).items():
                observer.removed(self.name, group, keys)


def _ended(flight: Flight, result: JobResult, *how: Outcome) -> list[BlockKey]:
    ended = zip(flight.blocks, result.outcomes, strict=True)
    return [block for block, outcome in ended if outcome in how]


def by_group(blocks: Iterable[BlockKey]) -> dict[int, list[bytes]]:
    """Hashes by KV-cache group, in their order."""
    found: dict[int, list[bytes]] = {}
    for block in blocks:
        found.setdefault(block.group, []).append(block.hash)
    return found
