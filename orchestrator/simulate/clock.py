"""A replica's time in a simulation: it stands still but where the replica waits."""

from __future__ import annotations

import heapq
from typing import Final

_FIRST_STEP_S: Final = 0.001
_STEP_GROWTH: Final = 2.0
_LONGEST_STEP_S: Final = 1.0


class Clock:
    """Seconds, as deadlines and latencies go by. Called, it tells the time."""

    __slots__ = ("_due", "_step_s", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[float] = []
        self._step_s = _FIRST_STEP_S

    def __call__(self) -> float:
        return self.now_s

    def at_least(self, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)

    def expect(self, due_s: float) -> None:
        """Something will have ended then."""
        heapq.heappush(self._due, due_s)

    def wait(self) -> None:
        """Until the next thing ends. Where nothing is under way only a deadline can be waited for:
        longer and longer, because it is not known which."""
        while self._due:
            due_s = heapq.heappop(self._due)
            if due_s >= self.now_s:
                self.now_s, self._step_s = due_s, _FIRST_STEP_S
                return
        self.now_s += self._step_s
        self._step_s = min(_LONGEST_STEP_S, self._step_s * _STEP_GROWTH)
