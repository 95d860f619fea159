"""Entries kept as runs: pieces of sequences whose entries were all used at the same time.

A key stands for its whole prefix, so two runs that agree in one key agree in all before it. What a
request uses is therefore found, ordered and let go a run at a time, not a key at a time: a run is
only cut in two where a request uses its beginning alone, or where another sequence parts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Generic, TypeVar


class Run:
    """Neighbouring entries of one sequence.

    `parent` is the key before the first, where it is known, and `before` the run that ends in it,
    where that is there. `extensions` are the runs whose `before` this is.
    """

    __slots__ = ("before", "extensions", "keys", "parent")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.parent: bytes | None = None
        self.before: Run | None = None
        self.extensions: dict[Run, None] = {}  # in the order in which they came


RunT = TypeVar("RunT", bound=Run)


class Runs(Generic[RunT]):
    """Every entry of a policy in exactly one run, found by key. Order is the policy's business.

    `part(upper, lower)` is called when a run was cut: `upper` is new and stands before `lower`,
    which is the old run less its beginning.
    """

    __slots__ = ("_make", "_orphans", "_part", "of")

    def __init__(self, make: Callable[[], RunT], part: Callable[[RunT, RunT], None]) -> None:
        self._make = make
        self._part = part
        self._orphans: dict[bytes, dict[Run, None]] = {}  # by the parent that is not there
        self.of: dict[bytes, RunT] = {}

    def add(self, run: RunT, keys: Sequence[bytes], parent: bytes | None) -> None:
        """`run`, a new one, has `keys`, at least one, and stands behind `parent`."""
        run.parent = parent
        if parent is not None:
            self._put_behind(run, parent)
        self.extend(run, keys)

    def extend(self, run: RunT, keys: Sequence[bytes]) -> None:
        """Put `keys` at the end of a run that has no extension."""
        run.keys.extend(keys)
        self.of.update(zip(keys, repeat(run)))
        if self._orphans and not self._orphans.keys().isdisjoint(keys):
            for key in keys:
                for orphan in self._orphans.pop(key, ()):
                    self._put_behind(orphan, key)

    def _put_behind(self, run: Run, parent: bytes) -> None:
        before = self.of.get(parent)
        if before is None:
            self._orphans.setdefault(parent, {})[run] = None
            return
        if before.keys[-1] != parent:
            before = self.cut(before, before.keys.index(parent) + 1)
        run.before = before
        before.extensions[run] = None

    def cut(self, run: RunT, at: int) -> RunT:
        """Take the first `at` entries of a run away into a new one before it, which is returned.

        The lower part stays the same object, so that what extends it need not be found.
        """
        upper = self._make()
        upper.keys = run.keys[:at]
        del run.keys[:at]
        upper.parent, upper.before = run.parent, run.before
        if upper.before is not None:
            del upper.before.extensions[run]
            upper.before.extensions[upper] = None
        elif upper.parent is not None:
            del self._orphans[upper.parent][run]
            self._orphans[upper.parent][upper] = None
        run.parent, run.before = upper.keys[-1], upper
        upper.extensions[run] = None
        self.of.update(zip(upper.keys, repeat(upper)))
        self._part(upper, run)
        return upper

    def cover(self, keys: Sequence[bytes]) -> list[RunT]:
        """The runs of those of `keys` that are there, first one first.

        The last one is cut where `keys` end or part from it. A beginning that `keys` leave out is
        not cut off: whoever uses an entry uses its prefix.
        """
        found: list[RunT] = []
        of, at, end = self.of, 0, len(keys)
        while at < end:
            run = of.get(keys[at])
            if run is None:
                at += 1
                continue
            own = run.keys
            start = 0 if own[0] == keys[at] else own.index(keys[at])
            last = at + len(own) - start - 1
            if last < end and keys[last] == own[-1]:
                found.append(run)
                at = last + 1
                continue
            same = _same(own, start, keys, at)
            found.append(self.cut(run, start + same))
            at += same
        return found

    def drop_end(self, run: RunT, count: int) -> list[bytes]:
        """Forget the last `count` entries of a run without extensions; the end stands first."""
        keys = run.keys[-count:]
        del run.keys[-count:]
        keys.reverse()
        for key in keys:
            del self.of[key]
        if not run.keys:
            if run.before is not None:
                del run.before.extensions[run]
            elif run.parent is not None:
                orphans = self._orphans[run.parent]
                del orphans[run]
                if not orphans:
                    del self._orphans[run.parent]
        return keys

    def drop(self, key: bytes) -> RunT:
        """Forget one entry anywhere. Returns its run, which is empty now and in no order."""
        run = self.of[key]
        at = run.keys.index(key)
        if at + 1 < len(run.keys):
            run = self.cut(run, at + 1)
        if at:
            self.cut(run, at)
        if run.extensions:
            for orphan in run.extensions:
                orphan.before = None
            self._orphans[key] = run.extensions
            run.extensions = {}
        self.drop_end(run, 1)
        return run


def _same(own: Sequence[bytes], start: int, keys: Sequence[bytes], at: int) -> int:
    """How many entries of `own` from `start` on equal those of `keys` from `at` on.

    The first are equal, and behind the first difference all differ.
    """
    low, high = 1, min(len(own) - start, len(keys) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if own[start + middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
