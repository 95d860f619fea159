"""When a path that failed is tried again."""

from __future__ import annotations

import threading
import time


class Breaker:
    """Open for a while after a failure, twice as long after each further one.

    After the pause all may try again, and the first failure of them opens it again: a fault that
    has ended costs nobody more than the pause. `tolerance` failures in a row are needed at first.
    """

    def __init__(self, first_s: float, most_s: float, tolerance: int = 1) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = 0.0
        self._opened_s = 0.0
        self._until_s = 0.0
        self.reason = ""

    def closed(self) -> bool:
        return self._until_s == 0.0 or time.monotonic() >= self._until_s

    def remaining_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def succeeded(self, began_s: float) -> None:
        """Something that began at `began_s`, on the clock of `time.monotonic`, went well."""
        if self._failures and began_s >= self._opened_s:
            with self._lock:
                self._failures = 0
                self._pause_s = self._until_s = 0.0
                self.reason = ""

    def failed(self, began_s: float, reason: str) -> None:
        with self._lock:
            # What began before the pause says nothing new.
            if began_s < self._opened_s:
                return
            self._failures += 1
            self.reason = reason
            if self._failures >= self._tolerance:
                self._pause_s = min(self._most_s, self._pause_s * 2 or self._first_s)
                self._opened_s = time.monotonic()
                self._until_s = self._opened_s + self._pause_s
