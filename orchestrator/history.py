"""How a replica's numbers changed over its run, in a bounded number of samples.

A history begins with a sample every `interval_s`. When it is full, each two neighbours become one
and samples come half as often: a run of seconds and one of days both end with some hundred samples,
and the first and the last moment are always among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SAMPLES: Final = 240
INTERVAL_S: Final = 0.1


class History:
    """Samples of named numbers. A count grows, so that of two neighbours the later one says it all;
    of a level the larger one is kept, because a queue that was full once must stay visible."""

    def __init__(self, *, most: int = SAMPLES, interval_s: float = INTERVAL_S) -> None:
        """`most` is even and at least 4."""
        self._most = most
        self.interval_s = interval_s
        self._t: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._levels: set[str] = set()

    def due(self, t_s: float) -> bool:
        """Whether a sample at `t_s` is wanted. Times do not go backwards."""
        return not self._t or t_s - self._t[-1] >= self.interval_s

    def add(self, t_s: float, counts: Mapping[str, float], levels: Mapping[str, float]) -> None:
        """Keep a sample. Its names are those of the first sample."""
        if not self._t:
            self._columns = {name: [] for name in (*counts, *levels)}
            self._levels = set(levels)
        elif len(self._t) == self._most:
            self._halve()
        self._t.append(t_s)
        for values in (counts, levels):
            for name, value in values.items():
                self._columns[name].append(value)

    def _halve(self) -> None:
        """The first sample is where every line begins; it stays alone."""
        self.interval_s *= 2
        self._t = self._t[:1] + self._t[2::2] + self._t[-1:]
        for name, column in self._columns.items():
            ends = [*range(2, len(column), 2), len(column) - 1]
            kept = column[:1]
            for end in ends:
                kept.append(max(column[end - 1 : end + 1]) if name in self._levels else column[end])
            self._columns[name] = kept

    def to_dict(self) -> dict[str, Any]:
        """`t_s`, and a list as long for each name, in plain JSON types."""
        return {"t_s": list(self._t), **{name: list(c) for name, c in self._columns.items()}}
