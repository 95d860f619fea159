"""Notices that nothing moves any more: no event, and no processor time spent.

A hung collective ends by its group's own timeout. What that cannot see is a worker without peers
that stands still, and an agent or zygote that does not tell of an end; this does. A worker that
computes for long without a word is busy, and is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import psutil

# Two ticks of the kernel's usual clock.
_BUSY_S = 0.02
_LOOK_S = 1.0


class Stillness:
    """How long each replica has stood still, against a limit in seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._moved: dict[int, tuple[float, float]] = {}  # when it last moved, CPU time by then
        self._looked_s = 0.0
        self._told: set[int] = set()

    def look(self, replicas: Mapping[int, Sequence[int]], told: Collection[int]) -> int | None:
        """A replica that has stood still for too long, None if there is none.

        `replicas` are those to look at, each with the pids of its workers; `told` are those that
        had something to tell since the last look.
        """
        now_s = time.monotonic()
        self._told.update(told)
        if now_s - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now_s
        told, self._told = self._told, set()
        for index in self._moved.keys() - replicas.keys():
            del self._moved[index]
        for index, pids in replicas.items():
            used_s = sum(map(_processor_s, pids))
            since_s, before_s = self._moved.get(index, (now_s, -1.0))
            if index in told or abs(used_s - before_s) >= _BUSY_S:
                self._moved[index] = (now_s, used_s)
            elif now_s - since_s > self.limit_s:
                return index
        return None


def process_status(pid: int) -> str:
    """`running`, `sleeping`, `stopped`, …, in psutil's words; `gone` where there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _processor_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
