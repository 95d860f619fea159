"""Stores into the tiers under the region, along the edges between them.

All bytes come from the region's rows: the next tier is written from the same pinned rows when the
tier before it is done. A tier is given no more than it has been seen to write within a while, and
no more rows than its share; what is more is shed and counted, never queued.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from backends.block import BlockKey
from backends.stack.asks import Asker
from backends.stack.lane import Flight, Lane
from backends.stack.primary import PrimaryIndex
from backends.stack.rows import NO_ROW
from backends.stack.settings import (
    WRITE_AFTER_HITS,
    WRITE_ON_EVICT,
    WRITE_THROUGH,
    StackSettings,
)
from backends.tier.base import JobResult, Lookup, Outcome

_USES_PER_ROW: Final = 4  # remembered of a lower tier's entries
REGION: Final = -1  # the number of the region, where tiers have theirs


class Cascade:
    """Which tier is given what, when."""

    def __init__(
        self, index: PrimaryIndex, lanes: Sequence[Lane], asker: Asker, settings: StackSettings
    ) -> None:
        self._index = index
        self._asker = asker
        self._lanes = lanes
        self._settings = settings
        share = int(index.rows_total * settings.store_share) // max(1, len(lanes))
        self._rows_most = max(index.groups, share)
        self._flights: dict[tuple[int, int], list[bytes]] = {}
        # Of the region's entries, by group, those that this tier is known to have got or given.
        self._known: list[list[set[bytes]]] = [[set() for _ in index.every_group] for _ in lanes]
        # Evicted entries that are being written, and until when that may take.
        self._leaving: dict[bytes, float] = {}
        # Uses of entries in the tier above, where the edge counts them.
        self._uses: list[dict[bytes, int]] = [{} for _ in lanes]
        self.counts_touches = bool(lanes) and lanes[0].edge.kind == WRITE_AFTER_HITS
        self.spills = bool(lanes) and lanes[0].edge.kind == WRITE_ON_EVICT

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def arrived(self, keys: Sequence[bytes], source: int, now_s: float) -> None:
        """Entries are whole in the region: computed, or brought in from tier `source`."""
        if source != REGION:
            self._used(source, keys, now_s)
        if self._lanes and self._lanes[0].edge.kind == WRITE_THROUGH:
            self._store(0, keys, now_s)

    def loaded(self, key: bytes, groups: Iterable[int], sources: Iterable[int]) -> None:
        """An entry came into the region: in these groups, from these tiers."""
        for group, source in zip(groups, sources, strict=True):
            if source >= 0:
                self._known[source][group].add(key)

    def touched(self, keys: Sequence[bytes], now_s: float) -> None:
        """Entries of the region were used: the tiers that have them too are to keep them."""
        if self.counts_touches:
            self._used(REGION, keys, now_s)
        for lane, known in zip(self._lanes, self._known, strict=True):
            if lane.open and any(known):
                there = [BlockKey(k, g) for k in keys for g, of in enumerate(known) if k in of]
                if there:
                    lane.tier.touch(there)

    def _used(self, above: int, keys: Iterable[bytes], now_s: float) -> None:
        below = above + 1
        if below >= len(self._lanes) or self._lanes[below].edge.kind != WRITE_AFTER_HITS:
            return
        counts, wanted = self._uses[below], self._lanes[below].edge.hits
        due = []
        for key in keys:
            if self._index.present(key, self._index.lead):
                counts[key] = counts.get(key, 0) + 1
                if counts[key] >= wanted:
                    due.append(key)
        for key in self._store(below, due, now_s):
            del counts[key]
        if len(counts) > 2 * _USES_PER_ROW * self._index.rows_total:
            for key in list(counts)[: len(counts) // 2]:
                del counts[key]

    def spill(self, victims: list[bytes], now_s: float) -> Collection[bytes]:
        """The region gives these up: write those that the tier below does not have. Which ones
        have to stay in their rows until that has ended."""
        if not self.spills:
            self.gone(victims)
            return ()
        lane, index = self._lanes[0], self._index
        blocks = [
            BlockKey(key, group)
            for group in index.every_group
            for key, row in zip(victims, index.rows_if_ready(victims, group), strict=True)
            if row != NO_ROW
        ]
        answers = dict(zip(blocks, lane.tier.lookup(blocks), strict=True))
        there = {block.hash for block, answer in answers.items() if answer is Lookup.HIT}
        there -= {block.hash for block, answer in answers.items() if answer is not Lookup.HIT}
        self.gone(victims)
        stored = self._store(0, [key for key in victims if key not in there], now_s)
        self._leaving.update(dict.fromkeys(stored, now_s + self._settings.store_timeout_s))
        return stored

    def leaves_s(self, key: bytes) -> float | None:
        """When an evicted entry will be in the tier below; None if it is not on its way there."""
        return self._leaving.get(key) if self._leaving else None

    def gone(self, keys: Collection[bytes]) -> None:
        """Entries are no longer in the region."""
        for known in self._known:
            for of_group in known:
                if of_group:
                    of_group.difference_update(keys)
        if self.counts_touches:
            for key in keys:
                self._uses[0].pop(key, None)

    def dropped(self, blocks: Iterable[BlockKey]) -> None:
        """Of entries that are still there, these are no longer in the region."""
        for known in self._known:
            for key, group in blocks:
                known[group].discard(key)

    def _store(self, number: int, keys: Sequence[bytes], now_s: float) -> Sequence[bytes]:
        """Begin to write entries that are ready; those for which that was done."""
        index = self._index
        blocks: list[BlockKey] = []
        rows: list[int] = []
        for group, known in zip(index.every_group, self._known[number], strict=True):
            wanted = [key for key in keys if key not in known] if known else keys
            for key, row in zip(wanted, index.rows_if_ready(wanted, group), strict=True):
                if row != NO_ROW:
                    blocks.append(BlockKey(key, group))
                    rows.append(row)
        if index.groups > 1:
            # By entry, so that what there is no room for are whole entries at the end.
            place = {key: n for n, key in enumerate(keys)}
            order = sorted(range(len(blocks)), key=lambda at: place[blocks[at].hash])
            blocks, rows = [blocks[at] for at in order], [rows[at] for at in order]
        return self._submit(number, blocks, rows, now_s)

    def _submit(
        self, number: int, blocks: Sequence[BlockKey], rows: Sequence[int], now_s: float
    ) -> Sequence[bytes]:
        """Submit the leading blocks that the tier may be given now, and pin their entries."""
        if not blocks:
            return ()
        lane = self._lanes[number]
        room = self._room(lane, now_s)
        while 0 < room < len(blocks) and blocks[room].hash == blocks[room - 1].hash:
            room -= 1
        lane.counters.shed += max(0, len(blocks) - room)
        blocks, rows = blocks[:room], rows[:room]
        most, until_s = self._settings.batch_blocks, now_s + self._settings.store_timeout_s
        for start in range(0, len(blocks), most):
            part = slice(start, start + most)
            entries = list(dict.fromkeys(block.hash for block in blocks[part]))
            self._index.pin(entries)
            job_id = lane.submit(
                blocks[part], rows[part], is_load=False, now_s=now_s, deadline_s=until_s
            )
            self._flights[number, job_id] = entries
        return list(dict.fromkeys(block.hash for block in blocks))

    def _room(self, lane: Lane, now_s: float) -> int:
        """How many blocks more this tier may be given."""
        # What eviction writes holds rows that nobody wants: there the share is the whole region.
        most = self._index.rows_total if self.spills and not lane.number else self._rows_most
        rate = lane.store_rate.blocks_per_s()
        if rate is not None:
            most = min(most, max(self._index.groups, int(rate * self._settings.backlog_s)))
        room = most - lane.storing_blocks
        return room if room > 0 and lane.open and lane.breaker.allows(now_s) else 0

    def ended(self, lane: Lane, flight: Flight, result: JobResult, now_s: float) -> None:
        """A store ended: its rows go on to the next tier, or are let go of."""
        entries = self._flights.pop((lane.number, flight.job_id))
        failed = {
            block.hash
            for block, outcome in zip(flight.blocks, result.outcomes, strict=True)
            if outcome is not Outcome.DONE
        }
        done = [key for key in entries if key not in failed]
        lane.counters.stores += len(done)
        self._asker.stored(
            [block for block in flight.blocks if block.hash not in failed], lane.number
        )
        known = self._known[lane.number]
        for block, outcome in zip(flight.blocks, result.outcomes, strict=True):
            if outcome is Outcome.DONE and self._index.present(block.hash, (block.group,)):
                known[block.group].add(block.hash)
        below = lane.number + 1
        if below < len(self._lanes) and self._lanes[below].edge.kind == WRITE_THROUGH:
            # Also what this tier could not take: one that is lost does not cut off those below it.
            known = self._known[below]
            onward = [
                at for at, block in enumerate(flight.blocks) if block.hash not in known[block.group]
            ]
            self._submit(
                below,
                [flight.blocks[at] for at in onward],
                [flight.rows[at] for at in onward],
                now_s,
            )
        self._index.unpin(entries)
        if self._leaving and not lane.number:
            for key in entries:
                self._leaving.pop(key, None)
