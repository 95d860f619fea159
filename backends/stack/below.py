"""Looking below the region: where the missing entries of a run are, and whether to load them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from backends.block import BlockKey
from backends.stack.asks import HERE, NOWHERE, WAIT, Asker
from backends.stack.lane import Lane
from backends.stack.loads import Promotions, Run
from backends.stack.measure import EngineSpeed
from backends.stack.primary import PrimaryIndex
from backends.stack.settings import RECOMPUTE_IF_SLOWER, StackSettings
from backends.tier.base import Lookup

FIRST_WINDOW: Final = 16
WINDOW_GROWTH: Final = 4
_REMEASURE_S: Final = 10.0


class Below:
    """Finds what lower tiers have of a run, and has the leading part of it brought in."""

    def __init__(
        self,
        index: PrimaryIndex,
        lanes: Sequence[Lane],
        asker: Asker,
        loads: Promotions,
        engine: EngineSpeed,
        settings: StackSettings,
        entry_bytes: int,
    ) -> None:
        self._index = index
        self._lanes = lanes
        self._asker = asker
        self._loads = loads
        self._engine = engine
        self._settings = settings
        self._entry_bytes = entry_bytes

    def find(
        self,
        run: Run,
        absent: Sequence[int],
        answers: list[Lookup],
        until_s: list[float],
        keep: Collection[bytes],
        now_s: float,
        clock_s: float,
    ) -> None:
        """Find out where the missing keys of a run are, and load the leading ones that are known.

        More keys are asked for at a time as long as there is no gap: a run that is nowhere costs a
        tier a few lookups, and one that is there is asked for all at once.
        """
        keys = run.keys
        sources: dict[bytes, Sequence[int]] = {}
        known: list[int] = []
        waiting, start, window = False, 0, FIRST_WINDOW
        while start < len(absent):
            asked = absent[start : start + window]
            start, window = start + window, WINDOW_GROWTH * window
            places = self._where([keys[at] for at in asked], run.groups, now_s)
            for at, where in zip(asked, places, strict=True):
                if NOWHERE in where:
                    start = len(absent)
                    break
                if WAIT in where:
                    waiting = True
                    until_s += [
                        self._asker.until_s(BlockKey(keys[at], group))
                        for group, place in zip(run.groups, where, strict=True)
                        if place == WAIT
                    ]
                if waiting:
                    answers[at] = Lookup.PENDING
                else:
                    sources[keys[at]] = where
                    known.append(at)
        if waiting and self._settings.whole_answers:
            for at in known:
                answers[at] = Lookup.PENDING
            return
        known = known[: self._worth_loading([sources[keys[at]] for at in known], now_s)]
        if not known:
            return
        start, end = known[0], known[-1] + 1
        wanted = Run(keys, run.groups, run.first, run.parent, sources).part(start, end)
        coming = start + self._loads.request(wanted, keep, now_s, clock_s)
        for at in known:
            deadline_s = self._loads.deadline_s(keys[at])
            if at < coming and deadline_s is not None:
                answers[at] = Lookup.PENDING
                until_s.append(deadline_s)

    def _where(self, keys: Sequence[bytes], groups: Sequence[int], now_s: float) -> list[list[int]]:
        """Of each key, by group, the tier that has it, or HERE, WAIT, NOWHERE."""
        index = self._index
        places = [[HERE] * len(groups) for _ in keys]
        missing = [
            (n, at, BlockKey(key, group))
            for n, key in enumerate(keys)
            for at, group in enumerate(groups)
            if not index.present(key, (group,))
        ]
        found = self._asker.ask([block for _, _, block in missing], now_s)
        for (n, at, _), place in zip(missing, found, strict=True):
            places[n][at] = place
        return places

    def _worth_loading(self, sources: Sequence[Sequence[int]], now_s: float) -> int:
        """How many leading entries are not slower to load than to compute."""
        if self._settings.load_from != RECOMPUTE_IF_SLOWER:
            return len(sources)
        entries: dict[int, int] = {}
        for where in sources:
            for number in {place for place in where if place >= 0}:
                entries[number] = entries.get(number, 0) + 1
        slow = {number for number, count in entries.items() if self._slow(number, count, now_s)}
        for at, where in enumerate(sources):
            if slow.intersection(where):
                self._lanes[max(where)].counters.passed_over += len(sources) - at
                return at
        return len(sources)

    def slower(self, sources: Collection[Sequence[int]], now_s: float) -> bool:
        """Whether a tier would take longer to give these entries than it takes to compute them."""
        return self._worth_loading(list(sources), now_s) < len(sources)

    def _slow(self, number: int, entries: int, now_s: float) -> bool:
        lane = self._lanes[number]
        load_s = lane.cost.seconds(entries * self._entry_bytes)
        compute_s = self._engine.seconds(entries * self._settings.tokens_per_entry)
        if load_s is None or compute_s is None or load_s <= compute_s:
            return False
        if now_s < lane.remeasure_at_s:
            return True
        # Now and then it is loaded from all the same: else it is never seen to have got better.
        first, lane.remeasure_at_s = lane.remeasure_at_s == 0.0, now_s + _REMEASURE_S
        return first
