"""How long ago the entry came that has been in the region longest."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backends.stack.observer import PRIMARY, Observer


class Ages(Observer):
    """Remembers of each row of the region when its entry came: some 150 bytes a row."""

    def __init__(self) -> None:
        self._came_s: dict[tuple[bytes, int], float] = {}

    def stored(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            now_s = time.monotonic()
            for key in keys:
                self._came_s.setdefault((key, group), now_s)

    def removed(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if tier == PRIMARY:
            for key in keys:
                self._came_s.pop((key, group), None)

    def oldest_s(self) -> float | None:
        """None where nothing is there."""
        # A dictionary keeps the order in which its keys came.
        first_s = next(iter(self._came_s.values()), None)
        return None if first_s is None else time.monotonic() - first_s
