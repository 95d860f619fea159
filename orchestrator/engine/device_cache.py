"""Metadata of the paged device cache: which block id holds which hash, and which is used next.

The discipline is the field's usual one: a request takes blocks from the head of a free list and
gives them back when it ends. A freed block keeps its hash until it is taken again, so it can still
be hit. The end of a sequence is given back first, and blocks without a hash go to the very front.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class DeviceCache:
    """Block ids `[0, blocks)`; the leader owns it, workers are told ids."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the leading blocks that are present out of the free list; their ids."""
        taken = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            del self._free[block_id]
            taken.append(block_id)
        return taken

    def take_free(self, count: int) -> list[int]:
        """Take the next `count` free blocks; what they held is forgotten.

        Raises ValueError when there are fewer: a caller admits only what fits.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free of {self.blocks}")
        taken = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is not None:
                del self._by_hash[block_hash]
            taken.append(block_id)
        return taken

    def register(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """The blocks now hold these hashes. A hash that another block holds stays there."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in self._by_hash:
                self._by_hash[block_hash] = block_id
                self._hash_of[block_id] = block_hash

    def give_back(self, block_ids: Sequence[int]) -> None:
        """End of a request: its blocks, in sequence order, become free, the last one first."""
        for block_id in reversed(block_ids):
            self._free[block_id] = None
            if block_id not in self._hash_of:
                self._free.move_to_end(block_id, last=False)
