"""What replicas say that they are writing, where there are several paths.

A block is claimed on the path that is the first in its order, wherever it is written: replicas may
prefer different paths, or find different ones full or broken, and must not write it to each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from backends.tier.filesystem.ledger import Ledger


class Claims:
    """Claims on all paths together. `home` gives the number of a block's path."""

    def __init__(self, ledgers: Sequence[Ledger], home: Callable[[int], int]) -> None:
        self._ledgers = ledgers
        self._home = home

    def claim(self, block_ids: Iterable[int]) -> set[int]:
        """See `Ledger.claim`. Where a path fails, its blocks are written without a claim."""
        elsewhere: set[int] = set()
        for ledger, ids in self._by_home(block_ids):
            with contextlib.suppress(OSError):
                elsewhere |= ledger.claim(ids)
        return elsewhere

    def unclaim(self, block_ids: Iterable[int]) -> None:
        for ledger, ids in self._by_home(block_ids):
            with contextlib.suppress(OSError):
                ledger.unclaim(ids)

    def _by_home(self, block_ids: Iterable[int]) -> list[tuple[Ledger, list[int]]]:
        found: dict[int, list[int]] = {}
        for block_id in block_ids:
            found.setdefault(self._home(block_id), []).append(block_id)
        return [(self._ledgers[number], ids) for number, ids in found.items()]
