"""Counts by name, from many threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping


class Counters:
    """All counts of one tier since it was opened."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def add_all(self, more: Mapping[str, int]) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
