"""The stack for an engine that asks for one chunk at a time, and tells only where each one ends.

The stack wants runs of a sequence, because a tier is fast at many keys and eviction goes by who
extends whom. What such an engine asks in one of its steps is answered from few questions to the
stack, and what it tells afterwards is put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from backends.block import BlockKey
from backends.runs import Chunks
from backends.stack.stack import TierStack
from backends.tier.base import Lookup

End = tuple[BlockKey, int | None]
"""A key and the token behind its last one; None where the engine does not know."""


class _Answers(NamedTuple):
    start: int
    results: Sequence[Lookup]


class Request(Chunks):
    """One request: its chunks, and for each that was brought in for it, from which tier."""

    def __init__(self, tokens_per_chunk: Sequence[int]) -> None:
        super().__init__(tokens_per_chunk)
        self.sources: dict[BlockKey, str] = {}
        self.used = False
        self._answers: dict[int, _Answers] = {}
        self._answered_at = -1

    def answers(self, group: int, changes: int) -> _Answers | None:
        """What the stack said of a run of this group, if nothing has changed since."""
        return self._answers.get(group) if changes == self._answered_at else None

    def keep(self, group: int, answers: _Answers, changes: int) -> None:
        if changes != self._answered_at:
            self._answers.clear()
            self._answered_at = changes
        self._answers[group] = answers


class Rows(NamedTuple):
    """Rows of the region, and the keys that they are meant for: group by group, in order."""

    rows: list[int]
    keys: list[BlockKey]


class _Stale(NamedTuple):
    """Transfers that a reset cut off, until the workers have ended them."""

    steps_left: int
    loads: list[BlockKey]
    stores: list[BlockKey]


class KeywiseStack:
    """Called by the scheduler's one thread. No method waits but `close`."""

    def __init__(
        self,
        stack: TierStack,
        *,
        tokens_per_chunk: Sequence[int],
        windowed: Sequence[bool],
        steps_in_flight: int,
    ) -> None:
        """`windowed`: which groups keep a window only and are asked for from its end on. A reset's
        transfers are over when `steps_in_flight` more steps were scheduled."""
        self.stack = stack
        self._tokens = tokens_per_chunk
        self._windowed = windowed
        self._steps_in_flight = steps_in_flight
        self._changes = 0
        self._loading: list[BlockKey] = []
        self._storing: set[BlockKey] = set()
        self._stale: list[_Stale] = []

    @property
    def busy(self) -> bool:
        return self.stack.busy or bool(self._stale)

    def new_request(self) -> Request:
        return Request(self._tokens)

    def lookup(self, request: Request, key: BlockKey, end: int | None) -> Lookup:
        at, group = request.place(key, end), key.group
        if at is None or self._windowed[group]:
            found = self.stack.lookup([key.hash], first=at or 0, groups=(group,))
            return found.answers[0]
        known = request.answers(group, self._changes)
        if known is None or not known.start <= at < known.start + len(known.results):
            found = self.stack.lookup(
                request.groups[group][at:],
                first=at,
                parent=request.parent(group, at),
                groups=(group,),
            )
            known = _Answers(at, found.answers)
            request.keep(group, known, self._changes)
        return known.results[at - known.start]

    def prepare_load(self, request: Request, keys: Iterable[BlockKey]) -> Rows:
        """Rows of keys that are HIT, kept until `complete_load`. Raises TierError for another."""
        self._changes += 1
        found = Rows([], [])
        for group, hashes in _by_group(keys).items():
            self._use(request, group, hashes)
            loading = self.stack.prepare_load(hashes, groups=(group,))
            found.rows.extend(loading.rows[0])
            found.keys.extend(BlockKey(h, group) for h in hashes)
            request.sources |= {BlockKey(h, group): name for h, name in loading.sources.items()}
        self._loading += found.keys
        return found

    def complete_load(self, keys: Iterable[BlockKey]) -> None:
        self._changes += 1
        keys = list(keys)
        for key in keys:
            self._loading.remove(key)
        for hashes in _by_group(keys).values():
            self.stack.complete_load(hashes)

    def prepare_store(self, request: Request, ends: Iterable[End]) -> Rows | None:
        """Rows for those keys that are to be stored; None: for want of room there are none."""
        self._changes += 1
        found, short = Rows([], []), 0
        for run in request.runs(ends):
            self._use(request, run.group, ())
            storing = self.stack.prepare_store(
                run.keys, first=run.first, parent=run.parent, groups=(run.group,)
            )
            found.rows.extend(storing.rows[0])
            found.keys.extend(BlockKey(h, run.group) for h in storing.keys)
            short += storing.short
        self._storing.update(found.keys)
        self.stack.counters.skipped_stores += short
        return None if short and not found.rows else found

    def complete_store(self, keys: Iterable[BlockKey], *, success: bool) -> None:
        self._changes += 1
        keys = list(keys)
        self._storing.difference_update(keys)
        for group, hashes in _by_group(keys).items():
            self.stack.complete_store(hashes, () if success else hashes, groups=(group,))

    def step(self) -> None:
        self._changes += 1
        if self._stale:
            self._release()
        self.stack.step()

    def reset(self) -> None:
        """Forget what is in the region. For an engine that tells nothing more of the transfers that
        are under way: their rows stay out of use until they have ended."""
        self._changes += 1
        self._stale.append(_Stale(self._steps_in_flight, self._loading, list(self._storing)))
        self._loading, self._storing = [], set()
        self.stack.reset()

    def flushed(self) -> None:
        """The transfers that resets cut off have ended."""
        self._stale = [stale._replace(steps_left=0) for stale in self._stale]
        self._release()

    def close(self, drain_s: float, tell: Callable[[dict[str, Any]], None]) -> None:
        """Wait that long for what is under way, close the stack, tell what it has counted: at once,
        because an engine that is stopped may be killed soon, and again when all is done."""
        tell(self._counted(drained=False))
        drained = self.stack.drain(drain_s)
        self.stack.close()
        tell(self._counted(drained=drained))

    def _counted(self, *, drained: bool) -> dict[str, Any]:
        return {
            "primary": self.stack.region_report(),
            "rows_used": self.stack.index.rows_used,
            "lower_tiers": self.stack.report(),
            "drained": drained,
        }

    def _use(self, request: Request, group: int, hashes: Sequence[bytes]) -> None:
        """Told to the stack once a request."""
        if not request.used:
            request.used = True
            self.stack.touch(hashes, request=request.groups[group])

    def _release(self) -> None:
        for stale in self._stale:
            if stale.steps_left == 0:
                for key in stale.loads:
                    self.stack.complete_load([key.hash])
                for key in stale.stores:
                    self.stack.complete_store([key.hash], [key.hash], groups=(key.group,))
        self._stale = [
            stale._replace(steps_left=stale.steps_left - 1)
            for stale in self._stale
            if stale.steps_left
        ]


def _by_group(keys: Iterable[BlockKey]) -> dict[int, list[bytes]]:
    """Block hashes by group, in order."""
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(key.group, []).append(key.hash)
    return found
