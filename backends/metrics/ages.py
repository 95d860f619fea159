"""How long ago the entry came that has been in the region longest."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backends.stack.observer import PRIMARY, Observer


class Ages(Observer):
    """Remembers of each entry of the region when it came: some 100 bytes an entry."""

    def __init__(self) -> None:
        self._came_s: dict[bytes, float] = {}

    def stored(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            now_s = time.monotonic()
            for key in keys:
                self._came_s.setdefault(key, now_s)

    def removed(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            for key in keys:
                self._came_s.pop(key, None)

    def oldest_s(self) -> float | None:
        """None where nothing is there."""
        # A dictionary keeps the order in which its keys came.
        first_s = next(iter(self._came_s.values()), None)
        return None if first_s is None else time.monotonic() - first_s
