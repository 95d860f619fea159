"""Looking up a run where an entry is there in all that is asked for, or is not: no windows.

What the region lacks is looked for with neighbours, then among what is on its way, then below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from backends.stack.below import Below
from backends.stack.loads import Promotions, Run
from backends.stack.primary import PrimaryIndex
from backends.stack.results import Found
from backends.tier.base import Lookup

if TYPE_CHECKING:
    from backends.stack.node import NodeRows


class WholeLookup:
    """Lookups in one region, and in the tiers under it where there are any."""

    def __init__(
        self,
        index: PrimaryIndex,
        node: NodeRows | None,
        loads: Promotions,
        below: Below | None,
        coming: Callable[[bytes], float | None],
    ) -> None:
        """`coming` says when the wait for a key that is on its way is over."""
        self._index = index
        self._node = node
        self._loads = loads
        self._below = below
        self._coming = coming

    def find(
        self,
        keys: Sequence[bytes],
        groups: Sequence[int],
        first: int,
        parent: bytes | None,
        keep: Collection[bytes],
        now_s: float,
        clock_s: float,
    ) -> Found:
        """As `TierStack.lookup` has it."""
        index = self._index
        there = index.ready(keys, groups)
        if self._node is not None:
            there = self._node.reach(keys, groups, there)
        answers = [Lookup.HIT if ready else Lookup.MISS for ready in there]
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
        if absent and self._below is not None:
            run = Run(keys, groups, first, parent, {})
            self._below.find(run, absent, answers, until_s, {*keys, *keep}, now_s, clock_s)
        return Found(answers, max(until_s, default=None))
