"""What stands in a simulated tier, for all replicas that share it: names and their recency.

It keeps what the filesystem tier keeps to in fact. The capacity is one, whatever number of paths it
is on. What was used least recently goes first. A store or a load is seen by everybody, in the real
tier by a file's atime; that a block was looked up, or used in the region, is known to the replica
that did it and to nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence


class Medium:
    """`capacity` is in blocks, None: there is no end to it, and no order."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._clock = 0
        # When everybody saw it used, the oldest first.
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._endless: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._endless if self.capacity is None else self._seen)

    def __contains__(self, block: object) -> bool:
        return block in (self._endless if self.capacity is None else self._seen)

    def tick(self, count: int) -> int:
        """A time later than any before, with room for `count` blocks before it."""
        self._clock += count + 1
        return self._clock

    def seen_at(self, block: Hashable) -> int:
        return self._seen.get(block, 0)

    def show(self, blocks: Sequence[Hashable], at: int) -> None:
        """Everybody sees that these are used, the first one at `at`, each next one before it.
        What was not there is there now."""
        if self.capacity is None:
            self._endless.update(blocks)
            return
        for number in range(len(blocks) - 1, -1, -1):
            self._seen[blocks[number]] = at - number
            self._seen.move_to_end(blocks[number])

    def oldest(self, count: int, own: Recency, keep: Collection[Hashable]) -> list[Hashable]:
        """The `count` blocks that a replica with this view would evict, the first one first."""
        # Unprotected ones come in order; those that the replica used since are as old as that.
        found: list[tuple[int, Hashable]] = []
        younger: list[tuple[int, Hashable]] = []
        for block, seen_at in self._seen.items():
            if len(found) >= count:
                break
            if block in keep:
                continue
            used_at = own.of(block)
            if used_at > seen_at:
                younger.append((used_at, block))
            else:
                found.append((seen_at, block))
        if younger:
            # One that was used lately may still be older than what comes after it here.
            found = sorted([*found, *younger], key=lambda each: each[0])[:count]
        return [block for _, block in found]

    def evict(self, blocks: Sequence[Hashable]) -> None:
        for block in blocks:
            del self._seen[block]


class Recency:
    """When one replica used blocks without anybody else seeing it."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._used: dict[Hashable, int] = {}
        self._most = 4096

    def of(self, block: Hashable) -> int:
        return self._used.get(block, 0)

    def use(self, blocks: Sequence[Hashable], at: int) -> None:
        """These are used, the first one at `at`, each next one before it. What is not there is
        passed over."""
        medium = self._medium
        if medium.capacity is None:
            return
        for number, block in enumerate(blocks):
            if block in medium:
                self._used[block] = at - number
        if len(self._used) > self._most:
            self._used = {
                block: used_at
                for block, used_at in self._used.items()
                if used_at > medium.seen_at(block) > 0
            }
            self._most = max(4096, 2 * len(self._used))
