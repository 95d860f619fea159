"""The tiers below the region as a replica's leader sees them: one place to ask, load and store.

The stack decides which tier is asked and what is copied where; it never decides what the region
evicts. Tiers stand in order, nearest first; a block that is in none is a miss. Stores are written
through to every tier. Nothing here waits but `load`, which has a deadline: a late tier is a miss.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backends.block import BlockKey
from backends.histogram import LatencyHistogram
from backends.tier.base import Job, JobResult, Lookup, Outcome, Tier

POLL_S = 0.0002
GRACE_S = 0.1  # for a tier that says LATE to say so


@dataclass(frozen=True, slots=True)
class StackSettings:
    """lookup_timeout_s: how long a load may wait for PENDING keys to be found out.
    load_timeout_s: how long it may wait for the bytes.
    store_timeout_s: after which a store is given up."""

    lookup_timeout_s: float = 0.05
    load_timeout_s: float = 2.0
    store_timeout_s: float = 10.0


@dataclass(slots=True)
class TierCounters:
    """What the stack saw of one tier: lookups, hits and stores in chunks, misfortunes in blocks.

    `store_s` is the time in which at least one store was under way, `load_s` that in which the
    engine waited for a load.
    """

    lookups: int = 0
    hits: int = 0
    stores: int = 0
    shed: int = 0
    late: int = 0
    errors: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    load_latency: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's key and its rows in the region, one a KV-cache group."""

    key: bytes
    rows: tuple[int, ...]


def _block_keys(chunks: Sequence[Chunk]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(c.key, group) for c in chunks for group in range(len(c.rows)))


def _count_misfortunes(counters: TierCounters, result: JobResult) -> None:
    for outcome in result.outcomes:
        counters.late += outcome is Outcome.LATE
        counters.shed += outcome is Outcome.SHED
        counters.errors += outcome in (Outcome.CORRUPT, Outcome.FAILED)


class TierStack:
    """Called by the leader's one thread."""

    def __init__(self, tiers: Sequence[Tier], groups: int, settings: StackSettings) -> None:
        self._tiers = list(tiers)
        self._groups = groups
        self._settings = settings
        self._job_ids = itertools.count()
        # (tier name, job id) → rows that nobody else may touch until the job has its result
        self._transfers: dict[tuple[str, int], tuple[int, ...]] = {}
        self._held: dict[int, int] = {}
        self._stores: dict[str, set[int]] = {}
        self._storing_since_s: dict[str, float] = {}
        self._results: dict[tuple[str, int], JobResult | None] = {}  # of loads that are waited for
        self.counters = {tier.name: TierCounters() for tier in tiers}

    @property
    def held_rows(self) -> dict[int, int]:
        """Rows that a transfer still uses, with the number of transfers: not to be evicted."""
        return self._held

    def find(self, keys: Sequence[bytes]) -> tuple[Tier | None, int]:
        """The nearest tier that holds the first key, and how many leading keys it holds."""
        until_s = time.monotonic() + self._settings.lookup_timeout_s
        for tier in self._tiers:
            counters = self.counters[tier.name]
            found = self._leading_hits(tier, keys, until_s)
            counters.lookups += min(len(keys), found + 1)
            if found:
                return tier, found
        return None, 0

    def _leading_hits(self, tier: Tier, keys: Sequence[bytes], until_s: float) -> int:
        wanted = [BlockKey(key, group) for key in keys for group in range(self._groups)]
        while True:
            answers = tier.lookup(wanted)
            first = next((n for n, a in enumerate(answers) if a is not Lookup.HIT), len(answers))
            pending = first < len(answers) and answers[first] is Lookup.PENDING
            if not pending or time.monotonic() >= until_s:
                return first // self._groups
            time.sleep(POLL_S)
            self.step()

    def load(self, tier: Tier, chunks: Sequence[Chunk]) -> int:
        """Load chunks into their rows; how many leading ones are there now, whole.

        Rows of the others hold nothing. A tier that does not answer at all keeps its rows held
        until it does.
        """
        job_id, began_s = next(self._job_ids), time.monotonic()
        rows = self._hold(tier, job_id, chunks)
        until_s = began_s + self._settings.load_timeout_s
        self._results[tier.name, job_id] = None
        tier.submit_load(Job(job_id, _block_keys(chunks), rows, until_s))
        while self._results[tier.name, job_id] is None and time.monotonic() < until_s + GRACE_S:
            time.sleep(POLL_S)
            self.step()
        result = self._results.pop((tier.name, job_id))
        counters, seconds = self.counters[tier.name], time.monotonic() - began_s
        counters.load_s += seconds
        counters.load_latency.add(seconds)
        if result is None:
            counters.late += len(rows)
            return 0
        done = next(
            (n for n, outcome in enumerate(result.outcomes) if outcome is not Outcome.DONE),
            len(result.outcomes),
        )
        counters.hits += done // self._groups
        counters.loaded_bytes += result.bytes_moved
        _count_misfortunes(counters, result)
        return done // self._groups

    def store(self, chunks: Sequence[Chunk]) -> None:
        """Begin to write COMPLETE rows to every tier; the rows are held until that has ended."""
        if not chunks:
            return
        until_s = time.monotonic() + self._settings.store_timeout_s
        for tier in self._tiers:
            job_id = next(self._job_ids)
            rows = self._hold(tier, job_id, chunks)
            self._stores.setdefault(tier.name, set()).add(job_id)
            if len(self._stores[tier.name]) == 1:
                self._storing_since_s[tier.name] = time.monotonic()
            tier.submit_store(Job(job_id, _block_keys(chunks), rows, until_s))

    def _hold(self, tier: Tier, job_id: int, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        rows = tuple(row for chunk in chunks for row in chunk.rows)
        self._transfers[tier.name, job_id] = rows
        for row in rows:
            self._held[row] = self._held.get(row, 0) + 1
        return rows

    def step(self) -> None:
        """Take in what the tiers have finished."""
        for tier in self._tiers:
            for result in tier.poll():
                self._release(self._transfers.pop((tier.name, result.job_id)))
                if (tier.name, result.job_id) in self._results:
                    self._results[tier.name, result.job_id] = result
                else:
                    self._stored(tier, result)

    def _release(self, rows: tuple[int, ...]) -> None:
        for row in rows:
            self._held[row] -= 1
            if not self._held[row]:
                del self._held[row]

    def _stored(self, tier: Tier, result: JobResult) -> None:
        """A store has ended, or a load that nobody waits for any more."""
        counters = self.counters[tier.name]
        counters.stores += sum(o is Outcome.DONE for o in result.outcomes) // self._groups
        counters.stored_bytes += result.bytes_moved
        _count_misfortunes(counters, result)
        stores = self._stores.get(tier.name, set())
        stores.discard(result.job_id)
        if not stores and tier.name in self._storing_since_s:
            counters.store_s += time.monotonic() - self._storing_since_s.pop(tier.name)

    def wait_for_rows(self) -> bool:
        """Wait until a held row is released, within the load time-out; False if none was."""
        held, until_s = len(self._held), time.monotonic() + self._settings.load_timeout_s
        while self._held and time.monotonic() < until_s:
            self.step()
            if len(self._held) < held:
                return True
            time.sleep(POLL_S)
        return False

    def report(self) -> dict[str, dict[str, Any]]:
        """Each tier's counts and what it holds, in plain JSON types."""
        found = {}
        for tier in self._tiers:
            own = tier.counters()
            found[tier.name] = asdict(self.counters[tier.name]) | {
                "usage": asdict(tier.usage()),
                "evictions": own.get("evicted", 0),
                "corrupt": own.get("corrupt", 0),
                "own": dict(own),
            }
        return found

    def drain(self, timeout_s: float) -> bool:
        """Wait until all stores have ended; False if a tier did not in time."""
        until_s = time.monotonic() + timeout_s
        ended = True
        for tier in self._tiers:
            ended &= tier.drain(max(0.0, until_s - time.monotonic()))
        self.step()
        return ended

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        self.step()
