"""Namespaces by small numbers, so that the index can hold blocks of all of them."""

from __future__ import annotations

import threading

from backends.tier.naming import Namespace


class Namespaces:
    """Number 0 is the tier's own; others are found on its disks, count there, and are evicted."""

    def __init__(self, own: Namespace) -> None:
        self._lock = threading.Lock()
        self._all = [own]
        self._numbers = {own.name: 0}

    def number(self, name: str) -> int:
        with self._lock:
            if name not in self._numbers:
                self._numbers[name] = len(self._all)
                self._all.append(Namespace(name))
            return self._numbers[name]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Namespace:
        return self._all[number]
