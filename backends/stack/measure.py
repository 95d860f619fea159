"""What the stack learns of a tier from its results: what a load costs, how fast it writes, whether
it works at all; and what it learns of the engine."""

from __future__ import annotations

from typing import Final

_DECAY: Final = 0.9


class LoadCost:
    """Seconds of a load as latency plus bytes over bandwidth: least squares over recent jobs, each
    weighing 0.9 of the next."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        x = float(nbytes)
        self._n = self._n * _DECAY + 1.0
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * seconds

    def seconds(self, nbytes: int) -> float | None:
        """What loading so many bytes would take; None before anything was measured."""
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-6 * mean_x * mean_x:
            # All of one size: which part is latency cannot be told, so it scales upwards only.
            return mean_y * max(1.0, nbytes / mean_x) if mean_x else mean_y
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        latency = max(0.0, mean_y - slope * mean_x)
        return latency + slope * nbytes


class EngineSpeed:
    """Tokens a second that the engine computes, over its recent steps."""

    __slots__ = ("_time_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._time_s = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        self._tokens = self._tokens * _DECAY + tokens
        self._time_s = self._time_s * _DECAY + seconds

    def seconds(self, tokens: int) -> float | None:
        """What computing so many tokens would take; None before anything was measured."""
        return tokens * self._time_s / self._tokens if self._tokens else None


class StoreRate:
    """Blocks a second that a tier writes while it has something to write."""

    __slots__ = ("_blocks", "_time_s")

    def __init__(self) -> None:
        self._blocks = self._time_s = 0.0

    def add(self, blocks: int, seconds: float) -> None:
        """It wrote so many blocks in so many seconds more of having something to write."""
        self._blocks = self._blocks * _DECAY + blocks
        self._time_s = self._time_s * _DECAY + seconds

    def blocks_per_s(self) -> float | None:
        return self._blocks / self._time_s if self._time_s > 0 else None


class Breaker:
    """Takes a tier out whose jobs all fail, and tries it again, one job at a time."""

    __slots__ = ("_failed", "_failures", "_most_s", "_retry_s", "_start_s", "opened", "until_s")

    def __init__(self, failures: int, retry_s: float, most_s: float) -> None:
        self._failures = failures
        self._start_s = self._retry_s = retry_s
        self._most_s = most_s
        self._failed = 0
        self.until_s: float | None = None
        self.opened = 0

    @property
    def state(self) -> str:
        return "closed" if self.until_s is None else "open"

    def allows(self, now_s: float) -> bool:
        """Whether the tier may be given a job. While it is out, one job is let through each time
        that the wait is over: whoever asks then has to send it."""
        if self.until_s is None:
            return True
        if now_s < self.until_s:
            return False
        self.until_s = now_s + self._retry_s
        return True

    def closed(self, now_s: float) -> bool:
        """`allows`, without using up the try."""
        return self.until_s is None or now_s >= self.until_s

    def ended(self, now_s: float, *, worked: bool) -> None:
        """A job ended; `worked` if any part of it did."""
        if worked:
            self._failed, self.until_s, self._retry_s = 0, None, self._start_s
            return
        self._failed += 1
        if self._failed >= self._failures:
            if self.until_s is not None:
                self._retry_s = min(self._most_s, 2 * self._retry_s)
            else:
                self.opened += 1
            self.until_s = now_s + self._retry_s
