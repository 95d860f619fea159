"""Files of evicted blocks, kept to be written over.

Where a cache is full, every new block drives out an old one of the same size. To rename the old
file and write over it costs no inode, no allocation, no freeing, and no trim: on some filesystems
that is most of the cost of storing a small block.

Whoever reads the old block meanwhile may see bytes of the new one. That is found: the checksum
differs, and the file does not have the old name any more, which makes it a miss and not damage.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

# Where the capacity allows spares, so many are made at a time.
AHEAD: Final = 32
# Spares are never more than one in so many of the blocks that there are, or can be.
SHARE: Final = 16


class Spares:
    """Names of spare files in the writer's own directory, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._names: deque[str] = deque()
        self._taken_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._names)

    def put(self, name: str) -> None:
        with self._lock:
            self._names.append(name)

    def take(self) -> str | None:
        with self._lock:
            self._taken_s = time.monotonic()
            return self._names.popleft() if self._names else None

    def ahead(self, blocks: int) -> int:
        """How many may be made at a time where so many blocks stand: a small part of them, since
        on a full disk there may be far fewer than the capacity lets expect."""
        return min(AHEAD, self.most, blocks // SHARE)

    def run_low(self, blocks: int) -> bool:
        """Whether more are to be made before they are used up, which takes others a while."""
        return len(self._names) <= min(self.most - AHEAD, blocks // SHARE - 1)

    def idle_s(self) -> float:
        """How long nobody has asked for one."""
        return time.monotonic() - self._taken_s

    def take_all(self) -> list[str]:
        with self._lock:
            names = list(self._names)
            self._names.clear()
            return names
