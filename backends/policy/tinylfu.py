"""W-TinyLFU: a window, and a main part that only the more frequent enter. Einziger, Friedman and
Manes, ACM ToS 2017; its segmented main part is Karedla, Love and Wherry's, Computer 1994."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from backends.policy.keyed import KeyPolicy
from backends.policy.sketch import FrequencySketch

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8

_Order = OrderedDict[bytes, None]


class TinyLfu(KeyPolicy):
    """What is new stands in a small window. What leaves it stays only if it was lately seen more
    often than what the main part would let go. In the main part a second use protects."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._sketch = FrequencySketch(capacity)
        self._counted: tuple[bytes, int] | None = None  # of which key it is known how often
        self._window: _Order = OrderedDict()  # least recent first, as the others
        self._probation: _Order = OrderedDict()
        self._protected: _Order = OrderedDict()
        self._window_share = max(1, int(capacity * _WINDOW_SHARE))
        self._protected_share = int((capacity - self._window_share) * _PROTECTED_SHARE)

    def _put_all(self, keys: Sequence[bytes]) -> None:
        self._seen(keys)
        window, share = self._window, self._window_share
        if len(self) > self.capacity - 1:
            window.update(dict.fromkeys(keys))
            return
        # While there is room nothing competes: what the window cannot hold goes on.
        for key in keys:
            window[key] = None
            if len(window) > share:
                oldest, _ = window.popitem(last=False)
                self._probation[oldest] = None

    def _put(self, key: bytes) -> None:
        self._put_all((key,))

    def _seen(self, keys: Sequence[bytes]) -> None:
        self._sketch.add(keys)
        self._counted = None

    def _use(self, key: bytes) -> None:
        self._seen((key,))
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_share:
                oldest, _ = self._protected.popitem(last=False)
                self._probation[oldest] = None

    def _candidate(self) -> bytes:
        window, count = self._window, self._sketch.count
        while True:
            main = self._probation or self._protected
            if not main:
                return next(iter(window))
            victim = next(iter(main))
            if len(window) <= self._window_share:
                return victim
            newcomer = next(iter(window))
            if self._counted is None or self._counted[0] is not victim:
                self._counted = victim, count(victim)
            if count(newcomer) <= self._counted[1]:
                return newcomer
            del window[newcomer]
            self._probation[newcomer] = None

    def _spare(self, key: bytes) -> None:
        self._part_of(key).move_to_end(key)

    def _drop(self, key: bytes, evicted: bool) -> None:
        del self._part_of(key)[key]

    def _part_of(self, key: bytes) -> _Order:
        if key in self._window:
            return self._window
        return self._probation if key in self._probation else self._protected
