"""A replica's own section of the node's index: what of its rows others may read, and what it is
about to store. Written by its leader's one thread, and by nobody else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.node.file import NodeFile
from backends.region.node.layout import (
    CLAIMED,
    EMPTY,
    EPOCH,
    HANDLE_LENGTH,
    HANDLE_MOST,
    READY,
    ROW_BITS,
    USES_WRITTEN,
    tags,
)
from backends.region.node.spec import ENTRY_WORDS, USES, WAYS

_FULL: Final = (1 << WAYS) - 1
_NO_ROW: Final = -1
START: Final = 1 << 63  # of a run, in the first word of a use
REPLICA_BITS: Final = 48

Block = tuple[bytes, int]  # key and group


class Fence:
    """A full memory barrier: what this process wrote or read before it comes before what follows.

    A release and then an acquire of a lock that nobody else has. Streaming stores, and loads on
    processors that order them less than x86, would otherwise pass a version.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


class Section:
    """Entries, versions and uses of one replica. Blocks are keys with a group; each has one row."""

    def __init__(self, file: NodeFile, replica: int) -> None:
        """Takes the section; it is closed until `open`. Raises RegionError if it is another's."""
        file.own(replica)
        sections, self.replica = file.sections, replica
        self._head = sections.head[replica]
        self._handle = sections.handle[replica]
        self._versions = sections.versions[replica]
        self._uses = sections.uses[replica]
        self._entries = sections.table[replica].reshape(-1, ENTRY_WORDS)
        buckets = file.spec.buckets
        self._mask = buckets - 1
        self._taken = bytearray(buckets)  # a bit for each way
        self._slot: dict[Block, int] = {}
        self._row: dict[Block, int] = {}
        self.block_of: dict[int, Block] = {}
        self.fence = Fence()
        # What the section's last owner left is nobody's; its versions must never come again.
        self._head[EPOCH] = 0
        self.fence()
        self._versions[:] = (self._versions | np.uint64(1)) + np.uint64(1)
        self._entries[:] = EMPTY
        self._head[USES_WRITTEN] = 0

    def open(self, handle: RegionHandle) -> None:
        """Others may read this replica's region from now on."""
        told = json.dumps(handle.to_dict()).encode()
        if len(told) > HANDLE_MOST:
            raise RegionError(
                f"the handle of region {handle.name} has {len(told)} bytes, at most {HANDLE_MOST} "
                "fit; choose a shorter run id"
            )
        self._handle[: len(told)] = np.frombuffer(told, np.uint8)
        self._head[HANDLE_LENGTH] = len(told)
        self.fence()
        self._head[EPOCH] = handle.generation | 1

    def version(self, row: int) -> int:
        return int(self._versions[row])

    @property
    def shared(self) -> int:
        """Rows that others may read."""
        return len(self._row)

    def claim(self, keys: Sequence[bytes], group: int, stamp_ns: int) -> None:
        """This replica is about to store these, none of which it has. `stamp_ns` is the time, on
        the clock of `time.monotonic_ns`, which processes of a node share."""
        if keys:
            self._write(keys, group, CLAIMED, [0] * len(keys), stamp_ns)

    def publish(self, keys: Sequence[bytes], group: int, rows: Sequence[int]) -> None:
        """These blocks are whole in these rows. Their rows are not any other block's."""
        if not keys:
            return
        self._retire([row for row in rows if row in self.block_of])
        self.fence()
        self._versions[rows] |= np.uint64(1)
        blocks = [(key, group) for key in keys]
        self._retire([self._row[block] for block in blocks if block in self._row])
        self._row.update(zip(blocks, rows, strict=True))
        self.block_of.update(zip(rows, blocks, strict=True))
        self._write(keys, group, READY, rows, 0)

    def withdraw(self, keys: Collection[bytes], group: int) -> None:
        """These are no longer claimed, or to be read: their rows may be given away after this."""
        blocks = [(key, group) for key in keys]
        self._retire([self._row[block] for block in blocks if block in self._row])
        self._clear([block for block in blocks if block in self._slot])

    def use(self, runs: Iterable[tuple[int, int, int, bool]]) -> None:
        """Tell owners of uses: (replica, row, version, whether a run begins with it), in order."""
        words = [
            ((START if begins else 0) | replica << REPLICA_BITS | row, version)
            for replica, row, version, begins in runs
        ][-USES:]
        if not words:
            return
        written = int(self._head[USES_WRITTEN])
        places = np.arange(written, written + len(words)) % USES
        self._uses[places] = np.array(words, np.uint64)
        self.fence()
        self._head[USES_WRITTEN] = written + len(words)

    def close(self) -> None:
        """Nothing of this replica may be read any more."""
        self._head[EPOCH] = 0
        self.fence()

    def _write(
        self, keys: Sequence[bytes], group: int, state: int, rows: Sequence[int], stamp_ns: int
    ) -> None:
        """Entries for blocks, in place of those that they have. A full bucket takes none."""
        named = tags(keys, group)
        places, chosen = [], []
        buckets = (named[:, 0] & np.uint64(self._mask)).tolist()
        for at, (key, bucket) in enumerate(zip(keys, buckets, strict=True)):
            slot = self._slot.get((key, group))
            if slot is None:
                taken = self._taken[bucket]
                if taken == _FULL:
                    continue
                way = (~taken & taken + 1).bit_length() - 1
                self._taken[bucket] = taken | 1 << way
                slot = self._slot[key, group] = bucket * WAYS + way
            places.append(slot)
            chosen.append(at)
        if not places:
            return
        words = np.empty((len(places), ENTRY_WORDS), np.uint64)
        words[:, :2] = named[chosen]
        words[:, 2] = np.array(rows, np.uint64)[chosen] | np.uint64(state << ROW_BITS)
        words[:, 3] = stamp_ns
        self._entries[places] = words

    def _retire(self, rows: Sequence[int]) -> None:
        """Make the versions of rows even: whoever reads them finds out that they changed."""
        if not rows:
            return
        self._versions[rows] += np.uint64(1)
        self.fence()
        for row in rows:
            block = self.block_of.pop(row)
            del self._row[block]
            if block in self._slot:
                self._clear([block])

    def _clear(self, blocks: Sequence[Block]) -> None:
        slots = [self._slot.pop(block) for block in blocks if block in self._slot]
        if slots:
            self._entries[slots, 2] = EMPTY
        for slot in slots:
            bucket, way = divmod(slot, WAYS)
            self._taken[bucket] &= ~(1 << way)
