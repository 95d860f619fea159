"""Least recently used: what was used longest ago goes first, of one request its end first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from backends.policy.base import EvictionPolicy
from backends.policy.runs import Run, Runs


class Lru(EvictionPolicy):
    """O(1) a run and a victim, amortised, beside one entry of a dictionary a key."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._runs: Runs[Run] = Runs(Run, self._parted)
        self._order: OrderedDict[Run, None] = OrderedDict()  # least recent first

    def insert(
        self, keys: Sequence[bytes], now_s: float, first: int = 0, parent: bytes | None = None
    ) -> None:
        if not keys:
            return
        runs = self._runs
        run: Run | None = None if parent is None else runs.of.get(parent)
        if run is not None and not run.extensions and run.keys[-1] == parent:
            runs.extend(run, keys)
        else:
            new = Run()
            self._order[new] = None
            runs.add(new, keys, parent)
            run = new.before
        while run is not None:  # a prefix is used when its extension is
            self._order.move_to_end(run)
            run = run.before

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        for run in reversed(self._runs.cover(keys)):
            self._order.move_to_end(run)

    def _parted(self, upper: Run, lower: Run) -> None:
        # A little too recent: nothing can be put next to another in this order. What cuts is a use
        # of the upper part, or an extension of it, and both make it recent anyway.
        self._order[upper] = None

    def victims(self, count: int, held: Container[bytes] = ()) -> list[bytes]:
        order = self._order
        chosen: list[bytes] = []
        # A run that must stay goes to the recent end, so that the next call does not meet it again:
        # what is held is in use. Once round without a victim, there is none.
        passed_over = 0
        while len(chosen) < count and passed_over < len(order):
            run = next(iter(order))
            free = 0 if run.extensions else free_end(run.keys, count - len(chosen), held)
            if free:
                chosen += self._runs.drop_end(run, free)
                passed_over = 0
            if not run.keys:
                del order[run]
            elif len(chosen) < count:
                order.move_to_end(run)
                passed_over += 1
        return chosen

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._runs.of:
                del self._order[self._runs.drop(key)]

    def __len__(self) -> int:
        return len(self._runs.of)

    def __contains__(self, key: object) -> bool:
        return key in self._runs.of


def free_end(keys: Sequence[bytes], count: int, held: Container[bytes]) -> int:
    """How many of the last entries may go, at most `count`: those behind the last that is held."""
    count = min(count, len(keys))
    if held == ():
        return count
    free = 0
    for key in reversed(keys):
        if free == count or key in held:
            break
        free += 1
    return free
