"""Histories of several replicas as one: what all of them together did, over one axis of time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

POINTS: Final = 120

History = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Series:
    """Time in seconds since the replicas began to serve: `edges` bound the steps that rates are
    of, and rates and levels have one value for each step, at its end."""

    histories: tuple[History, ...]
    edges: tuple[float, ...]

    @classmethod
    def of(cls, results: Sequence[Mapping[str, Any]]) -> Series:
        """As many steps as the finest history has samples, so that none has to be invented."""
        told = tuple(r["history"] for r in results if len((r.get("history") or {}).get("t_s", ())))
        steps = min(POINTS, max((len(history["t_s"]) - 1 for history in told), default=0))
        end_s = max((history["t_s"][-1] for history in told), default=0.0)
        edges = tuple(end_s * n / steps for n in range(steps + 1)) if steps else ()
        return cls(told, edges)

    @property
    def t_s(self) -> tuple[float, ...]:
        return self.edges[1:]

    def has(self, name: str) -> bool:
        return any(name in history for history in self.histories)

    def total(self, name: str) -> float:
        """What a count came to, of all replicas."""
        return sum(history[name][-1] for history in self.histories if name in history)

    def rate(self, name: str) -> list[float]:
        """How much a count grew a second, in all replicas together."""
        reached = [
            sum(_count_at(history, name, t) for history in self.histories) for t in self.edges
        ]
        steps = zip(reached, reached[1:], self.edges, self.edges[1:], strict=False)
        return [max(0.0, b - a) / (t - s) for a, b, s, t in steps]

    def ratio(self, name: str, per: str) -> list[float | None]:
        """How much one count grew for each one of another; None where the other did not grow."""
        return [
            a / b if b > 0 else None for a, b in zip(self.rate(name), self.rate(per), strict=True)
        ]

    def level(self, name: str, *, shared: bool = False) -> list[float]:
        """What a level was, the most in each step: of all replicas together, or, if they tell of
        the same thing, the largest."""
        found = []
        for start, end in zip(self.edges, self.edges[1:], strict=False):
            values = [_most(h, name, start, end) for h in self.histories if name in h]
            found.append(max(values, default=0.0) if shared else sum(values))
        return found


def _count_at(history: History, name: str, t_s: float) -> float:
    """A count between its samples, on a straight line; its last value from then on."""
    if name not in history:
        return 0.0
    times, values = history["t_s"], history[name]
    after = bisect_right(times, t_s)
    if after == 0:
        return 0.0
    if after == len(times):
        return values[-1]
    start, end = times[after - 1], times[after]
    part = (t_s - start) / (end - start)
    return values[after - 1] + part * (values[after] - values[after - 1])


def _most(history: History, name: str, start_s: float, end_s: float) -> float:
    """The largest sample in a step, or the last one before it; nothing once it has ended."""
    times, values = history["t_s"], history[name]
    if start_s >= times[-1]:
        return 0.0
    first, last = bisect_right(times, start_s), bisect_right(times, end_s)
    return max(values[max(0, first - 1) : max(1, last)], default=0.0)
