"""Metadata of the paged device cache: which block id holds which hash, and which is used next.

The discipline is the field's usual one: a request takes blocks from the head of a free list and
gives them back when it ends. A freed block keeps its hash until it is taken again, so it can still
be hit. The end of a sequence is given back first, and blocks without a hash go to the very front.

A block has room for every KV-cache group. Groups that keep a sliding window are brought back for
the end of a hit alone, so a block may hold its hash's content without theirs; a prefix is hit only
where they have the last blocks of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import repeat


class DeviceCache:
    """Block ids `[0, blocks)`; the leader owns it, workers are told ids."""

    def __init__(self, blocks: int, windows: Sequence[int] = ()) -> None:
        """`windows`: of each group that keeps one, how many of a prefix's last blocks it needs."""
        self.blocks = blocks
        self._windows = windows
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # By windowed group, the blocks whose content is there in it.
        self._held: list[set[int]] = [set() for _ in windows]

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the leading blocks that are present, as a prefix that can be gone on from, out of
        the free list; their ids."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        taken = found[: self._usable(found)]
        for block_id in taken:
            del self._free[block_id]
        return taken

    def _usable(self, block_ids: Sequence[int]) -> int:
        """The longest prefix of these whose last blocks every windowed group has."""
        end = len(block_ids)
        while end:
            gap = -1
            for most, held in zip(self._windows, self._held, strict=True):
                for at in range(end - 1, max(end - 1 - most, gap), -1):
                    if block_ids[at] not in held:
                        gap = max(gap, at)
            if gap < 0:
                return end
            end = gap
        return 0

    def held_from(self, block_ids: Sequence[int]) -> list[int]:
        """Of each windowed group, from which of these on it has all."""
        first = []
        for held in self._held:
            at = len(block_ids)
            while at and block_ids[at - 1] in held:
                at -= 1
            first.append(at)
        return first

    def take_free(self, count: int) -> list[int]:
        """Take the next `count` free blocks; what they held is forgotten.

        Raises ValueError when there are fewer: a caller admits only what fits.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free of {self.blocks}")
        take = self._free.popitem
        taken = [take(last=False)[0] for _ in range(count)]
        hashes = map(self._hash_of.pop, taken, repeat(None))
        deque(map(self._by_hash.__delitem__, filter(None, hashes)), 0)
        for held in self._held:
            held.difference_update(taken)
        return taken

    def register(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], held_from: Sequence[int] = ()
    ) -> None:
        """The blocks now hold these hashes, in each windowed group from its `held_from` on. A hash
        that another block holds stays there, unless this one holds it in more groups."""
        by_hash = self._by_hash
        for held, first in zip(self._held, held_from, strict=True):
            held.update(block_ids[first:])
        if self._held:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                other = by_hash.get(block_hash, block_id)
                if any(block_id in held and other not in held for held in self._held):
                    del by_hash[block_hash], self._hash_of[other]
        new = [(h, b) for b, h in zip(block_ids, hashes, strict=True) if h not in by_hash]
        by_hash.update(new)
        self._hash_of.update([(block_id, block_hash) for block_hash, block_id in new])

    def give_back(self, block_ids: Sequence[int]) -> None:
        """End of a request: its blocks, in sequence order, become free, the last one first."""
        self._free.update(dict.fromkeys(reversed(block_ids)))
        for block_id in reversed(block_ids):
            if block_id not in self._hash_of:
                self._free.move_to_end(block_id, last=False)
