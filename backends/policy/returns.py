"""Learns when what was used comes back, and what it is worth to keep it until then.

Everything that waits to be used again is of some kind, and has an age. For each kind and each bin
of ages this counts how many reached the bin and how many came back within it. Those who are still
waiting count too, up to the age they have (Kaplan and Meier, 1958), and so do those that were let
go, as long as they are remembered: otherwise what is let go would never be seen to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from typing import Final

GROWTH: Final = 1.5
EDGES_S: Final = (0.0, *accumulate(repeat(GROWTH, 21), lambda edge, by: edge * by, initial=1.0))
"""Where bins of ages begin, in seconds: 0, 1, 1.5, 2.25, ... The last one has no end."""
BINS: Final = len(EDGES_S)

_PRIOR_RETURN: Final = 0.05
"""Chance to come back within a bin, before anything was seen. Bins grow with age, so that this
alone makes the index fall with age: the order is LRU until something is learned."""
_PRIOR_POOLED: Final = 4.0  # how many sightings that chance is worth
_PRIOR_RATIO: Final = 10.0  # returns after which a kind differs from its family, and that from all
_PRIOR_KIND: Final = 100.0  # sightings in a bin after which a kind has a shape of its own
_MOST_SEEN: Final = 1 << 14


class Returns:
    """Counts of `families` x `members` kinds, kind = family * members + member."""

    def __init__(self, families: int, members: int) -> None:
        self._members = members
        self._reached = [[0.0] * BINS for _ in range(families * members)]
        self._returned = [[0.0] * BINS for _ in range(families * members)]
        self._seen = 0

    def reach(self, kind: int, at: int) -> None:
        """One of this kind begins bin `at`, waiting."""
        self._reached[kind][at] += 1.0
        self._seen += at == 0

    def change(self, before: int, after: int) -> None:
        """One that is in its first bin turned out to be of another kind."""
        self._reached[before][0] -= 1.0
        self._reached[after][0] += 1.0

    def come_back(self, kind: int, at: int) -> None:
        """One of this kind was used again in bin `at`."""
        self._returned[kind][at] += 1.0

    def indices(self) -> list[list[float]]:
        """For each kind and bin: the most returns per second of keeping that a wait of any length
        from there on can promise. Also forgets, by halves, what is long ago.

        That is the index of Gittins (1979) for a bandit whose every step costs its time: to keep
        what has the highest is best where many compete for a fixed space.
        """
        reached, returned = self._reached, self._returned
        pooled = [
            (sum(column) + _PRIOR_POOLED * _PRIOR_RETURN) / (sum(row) + _PRIOR_POOLED)
            for row, column in zip(
                zip(*reached[: -self._members], strict=True),
                zip(*returned[: -self._members], strict=True),
                strict=True,
            )
        ]
        expected = [_dot(row, pooled) for row in reached]
        seen = [sum(row) for row in returned]
        found = []
        for kind in range(len(reached)):
            family = kind - kind % self._members
            siblings = slice(family, family + self._members)
            ratio = _ratio(sum(seen[siblings]), sum(expected[siblings]), 1.0)
            ratio = _ratio(seen[kind], expected[kind], ratio)
            chances = [
                (back + _PRIOR_KIND * min(0.9, chance * ratio)) / (there + _PRIOR_KIND)
                for back, there, chance in zip(returned[kind], reached[kind], pooled, strict=True)
            ]
            found.append(_gittins(chances))
        if self._seen > _MOST_SEEN:
            self._seen //= 2
            for row in (*reached, *returned):
                row[:] = [count / 2 for count in row]
        return found


def _dot(row: Sequence[float], chances: Sequence[float]) -> float:
    return sum(count * chance for count, chance in zip(row, chances, strict=True))


def _ratio(seen: float, expected: float, usual: float) -> float:
    return (seen + _PRIOR_RATIO * usual) / (expected + _PRIOR_RATIO)


def _gittins(chances: Sequence[float]) -> list[float]:
    """`chances[b]`: to come back within bin b, having reached it."""
    widths_s = [after - before for before, after in pairwise(EDGES_S)]
    widths_s.append(EDGES_S[-1] * (GROWTH - 1))
    found = []
    for start in range(BINS):
        waiting, back, kept_s, best = 1.0, 0.0, 0.0, 0.0
        for at in range(start, BINS):
            chance = chances[at]
            kept_s += waiting * widths_s[at] * (1 - chance / 2)
            back += waiting * chance
            waiting *= 1 - chance
            best = max(best, back / kept_s)
        found.append(best)
    return found
