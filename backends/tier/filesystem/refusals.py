"""Blocks that lookups are to MISS for a while, whatever probes say: found wrong, or unreadable."""

from __future__ import annotations

import time
from typing import Final

_MOST: Final = 65536


class Refusals:
    """By block id. Takes no lock."""

    def __init__(self) -> None:
        self._until_s: dict[int, float] = {}

    def refuse(self, block_id: int, for_s: float) -> None:
        """For `for_s` from now on, or until it is stored or loaded."""
        if len(self._until_s) >= _MOST:
            self._until_s.clear()
        self._until_s[block_id] = time.monotonic() + for_s

    def end(self, block_id: int) -> None:
        if self._until_s:
            self._until_s.pop(block_id, None)

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, block_id: int) -> bool:
        until_s = self._until_s.get(block_id) if self._until_s else None
        if until_s is None:
            return False
        if time.monotonic() < until_s:
            return True
        self._until_s.pop(block_id, None)
        return False
