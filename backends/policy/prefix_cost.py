"""Keeps what is likeliest to save tokens, per second that it has to be kept for it. Our own.

Recency alone cannot tell the turn of a conversation that goes on from the one that was its last.
What can be known is how often a request of this kind was followed by another one, and when: kinds
are told apart by the turn and by how much was new in it, and their return times are learned as they
happen (`backends.policy.returns`). Entries are equal in tokens and an extension goes before its
prefix, so a miss recomputes as many tokens as entries were let go, and what a request used is worth
the same in each of its entries: the chance that it comes back, per second of keeping.

Decision and reasons: docs/adr/0009-eviction-policies.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from heapq import heappop, heappush
from typing import Final

from backends.policy.base import EvictionPolicy
from backends.policy.lru import free_end
from backends.policy.returns import BINS, EDGES_S, Returns
from backends.policy.runs import Run, Runs

_TURNS: Final = 6
_SIZES: Final = 5
_LEFT_OVER: Final = _TURNS * _SIZES  # the end of a conversation that went on from before it
_LEARN_FIRST: Final = 32
_LEARN_MOST: Final = 256
_REMEMBERED: Final = 2
_LENT: Final = 8

_Visits = OrderedDict["Visit", None]


class Visit:
    """What one request used last: runs that no later request used, first chunk first.

    It has `end` chunks, and those from number `begin` on were new in it. `marks` are the first and
    the last of them: a request that has one of these continues this visit, also where nothing of it
    is there any more. Where only one was new, the `borrowed` marks of the visit that it continues
    do as well, but are not lent again: many sequences may share them. `entries` are those that are
    there. It waits until it is continued.
    """

    __slots__ = (
        *("at", "begin", "borrowed", "end", "entries", "kind", "marks", "runs", "since_s"),
        *("turn", "waiting"),
    )

    def __init__(self, since_s: float, end: int) -> None:
        self.since_s = since_s
        self.at = 0  # bin of its age
        self.turn = 0
        self.begin = self.end = end
        self.kind = 0
        self.entries = 0
        self.runs: list[_Run] = []
        self.marks: list[bytes] = []
        self.borrowed: list[bytes] = []
        self.waiting = True


class _Run(Run):
    """`then` is the first key that ever extended it, there or not. `shared`: others did as well, so
    that a request that ends here its hits is a sequence of its own and continues none."""

    __slots__ = ("shared", "then", "visit")

    visit: Visit

    def __init__(self) -> None:
        super().__init__()
        self.then: bytes | None = None
        self.shared = False


def _kind(turn: int, new: int) -> int:
    """Sizes grow by fours: one chunk or none, to 4, to 16, to 64, more."""
    size = min(_SIZES - 1, ((max(1, new) - 1).bit_length() + 1) // 2)
    return min(turn, _TURNS - 1) * _SIZES + size


class PrefixCost(EvictionPolicy):
    """O(log capacity) a run or less, and a little for each bin of ages that a request passes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._runs: Runs[_Run] = Runs(_Run, self._parted)
        self._returns = Returns(_TURNS + 1, _SIZES)
        kinds = range((_TURNS + 1) * _SIZES)
        # [bin]: visits of that age, oldest first; [kind][bin]: those of them that have something
        # to let go. What only has prefixes of others is passed over, and comes back with `_lost`.
        self._ages: list[_Visits] = [OrderedDict() for _ in EDGES_S]
        self._buckets: list[list[_Visits]] = [[OrderedDict() for _ in EDGES_S] for _ in kinds]
        self._gone: _Visits = OrderedDict()  # without entries, remembered for a while
        self._marks: dict[bytes, Visit] = {}
        # The first key of the latest `admit` and whose it is, until it is inserted.
        self._asked: tuple[bytes, Visit] | None = None
        # Buckets by their index, the least first, and a heap of the ranks of those in use.
        self._ranked: list[tuple[int, int]] = []
        self._rank: list[list[int]] = []
        self._heap: list[int] = []
        self._left = self._every = _LEARN_FIRST
        self._learn()

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        self._grow_older(now_s)
        self._left -= 1
        if not self._left:
            self._left = self._every = min(_LEARN_MOST, 2 * self._every)
            self._learn()
        runs = self._runs.cover(keys)
        if not runs:
            return
        visit = self._begin(now_s, len(keys))
        last = runs[-1].visit
        before = None if runs[-1].shared else last
        if before is not None:
            self._continue(visit, before)
        for run in runs:
            run.visit.entries -= len(run.keys)
            run.visit.runs.remove(run)
            if not run.visit.entries:
                self._has_gone(run.visit)
            run.visit = visit
            visit.entries += len(run.keys)
        visit.runs = runs
        if last is before and last.entries:
            self._leave_over(last)
        self._enter(visit)

    def admit(
        self,
        keys: Sequence[bytes],
        room: int,
        now_s: float,
        first: int = 0,
        parent: bytes | None = None,
    ) -> int:
        visit = self._visit_of(keys, now_s, first, parent)
        self._asked = (keys[0], visit)
        found, mine = max(0, room), self._rank[visit.kind][visit.at]
        for rank in sorted(set(self._heap)):
            if rank >= mine or found >= len(keys):
                break
            kind, at = self._ranked[rank]
            found += sum(other.entries for other in self._buckets[kind][at])
        return min(len(keys), found)

    def insert(
        self, keys: Sequence[bytes], now_s: float, first: int = 0, parent: bytes | None = None
    ) -> None:
        if not keys:
            return
        visit = self._visit_of(keys, now_s, first, parent)
        self._asked = None
        run = visit.runs[-1] if visit.runs else None
        if run is not None and run.keys[-1] == parent and not (run.then or run.extensions):
            self._runs.extend(run, keys)
        else:
            run = _Run()
            run.visit = visit
            visit.runs.append(run)
            self._runs.add(run, keys, parent)
            before = run.before
            if isinstance(before, _Run):
                before.shared |= before.then is not None and before.then != keys[0]
                before.then = before.then or keys[0]
        visit.entries += len(keys)
        self._enter(visit)

    def victims(self, count: int, held: Container[bytes] = ()) -> list[bytes]:
        chosen: list[bytes] = []
        spared: list[Visit] = []
        heap = self._heap
        while heap and len(chosen) < count:
            kind, at = self._ranked[heap[0]]
            bucket = self._buckets[kind][at]
            if not bucket:
                heappop(heap)
                continue
            visit = next(iter(bucket))
            ends = [run for run in visit.runs if not run.extensions]
            for run in reversed(ends):
                free = free_end(run.keys, count - len(chosen), held)
                if free:
                    chosen += self._runs.drop_end(run, free)
                    run.then, run.shared = chosen[-1], False
                    self._lost(run, free)
                    break
            else:
                del bucket[visit]
                if ends:
                    spared.append(visit)
        for visit in spared:  # behind the others: what is held is in use
            self._enter(visit)
        return chosen

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._runs.of:
                self._lost(self._runs.drop(key), 1)

    def __len__(self) -> int:
        return len(self._runs.of)

    def __contains__(self, key: object) -> bool:
        return key in self._runs.of

    def _visit_of(
        self, keys: Sequence[bytes], now_s: float, first: int, parent: bytes | None
    ) -> Visit:
        """The visit whose next chunks `keys` are, or a new one."""
        asked = self._asked
        if asked is not None and asked[0] == keys[0]:
            visit: Visit | None = asked[1]
        else:
            run = None if parent is None else self._runs.of.get(parent)
            visit = None if run is None else run.visit
            if visit is not None and visit.runs[-1].keys[-1] != parent:
                visit = None
        if visit is None:
            visit = self._begin(now_s, first)
        if not self._marks.keys().isdisjoint(keys):
            before = next(self._marks[key] for key in reversed(keys) if key in self._marks)
            if before is not visit:
                self._continue(visit, before)
                visit.begin = max(first, before.end)
        known, visit.end = visit.end, max(visit.end, first + len(keys))
        new = visit.end - visit.begin
        if visit.end > max(known, visit.begin):
            self._mark(visit, keys[max(0, visit.begin - first) :])
        self._change_kind(visit, _kind(visit.turn, new))
        return visit

    def _begin(self, now_s: float, end: int) -> Visit:
        visit = Visit(now_s, end)
        self._ages[0][visit] = None
        self._gone[visit] = None
        self._returns.reach(visit.kind, 0)
        if len(self._gone) > _REMEMBERED * self.capacity:
            self._forget(next(iter(self._gone)))
        return visit

    def _continue(self, visit: Visit, before: Visit) -> None:
        if before.waiting:
            before.waiting = False
            self._returns.come_back(before.kind, before.at)
        visit.turn = max(visit.turn, before.turn + 1)
        self._change_kind(visit, _kind(visit.turn, visit.end - visit.begin))
        self._unmark(visit, visit.borrowed)
        lent = [*before.borrowed, *before.marks][-_LENT:]
        self._unmark(before, before.borrowed)
        self._unmark(before, before.marks)
        before.marks = []
        visit.borrowed = lent
        self._marks.update(dict.fromkeys(lent, visit))

    def _leave_over(self, visit: Visit) -> None:
        """Another request continues it from before its end: the end waits on its own."""
        self._change_kind(visit, _LEFT_OVER)
        visit.waiting = True
        self._returns.reach(_LEFT_OVER, visit.at)
        self._mark(visit, visit.runs[-1].keys[-1:])

    def _mark(self, visit: Visit, keys: Sequence[bytes]) -> None:
        """`keys` are the latest that are new in it."""
        self._unmark(visit, visit.marks[1:])
        visit.marks = [visit.marks[0] if visit.marks else keys[0], keys[-1]]
        self._marks.update(dict.fromkeys(visit.marks, visit))

    def _unmark(self, visit: Visit, keys: list[bytes]) -> None:
        for key in keys:
            if self._marks.get(key) is visit:
                del self._marks[key]
        if keys is visit.borrowed:
            visit.borrowed = []

    def _change_kind(self, visit: Visit, kind: int) -> None:
        if kind == visit.kind:
            return
        if visit.waiting and not visit.at:
            self._returns.change(visit.kind, kind)
        in_use = self._buckets[visit.kind][visit.at].pop(visit, visit) is None
        visit.kind = kind
        if in_use:
            self._enter(visit)

    def _enter(self, visit: Visit) -> None:
        """It has something to let go: put it where it belongs by kind and age."""
        self._gone.pop(visit, None)
        bucket = self._buckets[visit.kind][visit.at]
        if not bucket:
            heappush(self._heap, self._rank[visit.kind][visit.at])
        bucket[visit] = None

    def _lost(self, run: _Run, count: int) -> None:
        visit = run.visit
        visit.entries -= count
        if not run.keys:
            visit.runs.remove(run)
            before = run.before
            if isinstance(before, _Run) and not before.extensions:
                self._enter(before.visit)
        if not visit.entries:
            self._has_gone(visit)

    def _has_gone(self, visit: Visit) -> None:
        self._buckets[visit.kind][visit.at].pop(visit, None)
        self._gone[visit] = None
        if len(self._gone) > _REMEMBERED * self.capacity:
            self._forget(next(iter(self._gone)))

    def _forget(self, visit: Visit) -> None:
        del self._gone[visit]
        self._ages[visit.at].pop(visit, None)
        self._unmark(visit, visit.marks)
        self._unmark(visit, visit.borrowed)

    def _grow_older(self, now_s: float) -> None:
        for at in range(BINS - 1):
            ages, border_s = self._ages[at], now_s - EDGES_S[at + 1]
            while ages:
                visit = next(iter(ages))
                if visit.since_s > border_s:
                    break
                del ages[visit]
                self._ages[at + 1][visit] = None
                in_use = self._buckets[visit.kind][at].pop(visit, visit) is None
                visit.at = at + 1
                if visit.waiting:
                    self._returns.reach(visit.kind, at + 1)
                if in_use:
                    self._enter(visit)

    def _learn(self) -> None:
        """Rank the buckets by what was learned since the last time."""
        indices = self._returns.indices()
        order = sorted(
            (index, -at, kind) for kind, row in enumerate(indices) for at, index in enumerate(row)
        )
        self._ranked = [(kind, -at) for _, at, kind in order]
        self._rank = [[0] * BINS for _ in indices]
        self._heap = []
        for rank, (kind, at) in enumerate(self._ranked):
            self._rank[kind][at] = rank
            if self._buckets[kind][at]:
                self._heap.append(rank)

    def _parted(self, upper: _Run, lower: _Run) -> None:
        runs = lower.visit.runs
        upper.visit, upper.then = lower.visit, lower.keys[0]
        runs.insert(runs.index(lower), upper)
