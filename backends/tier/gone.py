"""Blocks that a tier has let go by itself, kept until its caller asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from backends.block import BlockKey
from backends.tier.base import NONE_EVICTED, Evicted

MOST: Final = 1 << 16


class Gone:
    """Of one tier. Any of its threads adds, the caller's takes; neither waits for long."""

    def __init__(self, most: int = MOST) -> None:
        """More than `most` are not kept: then it is known only that there were some."""
        self._most = most
        self._lock = threading.Lock()
        self._keys: list[BlockKey] = []
        self._more = False

    def add(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            if not self._more:
                self._keys.extend(keys)
            if len(self._keys) > self._most:
                self._keys, self._more = [], True

    def take(self) -> Evicted:
        """What was added since the last call."""
        if not self._keys and not self._more:
            return NONE_EVICTED
        with self._lock:
            taken = Evicted(tuple(self._keys), self._more)
            self._keys, self._more = [], False
        return taken
