"""What a leader reads of the other replicas' sections: who lives, who has a block, what they used.

An entry that is found is a hint: whoever reads the row checks it (see `reader`). Nothing here
waits, and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from backends.region.node.file import NodeFile
from backends.region.node.layout import CLAIMED, EPOCH, READY, ROW_BITS, USES_WRITTEN, tags
from backends.region.node.section import REPLICA_BITS, START, Section
from backends.region.node.spec import USES

LOOK_S: Final = 0.02  # how often it is asked who lives
CLAIM_S: Final = 10.0  # a claim that is older keeps nobody from storing
_ROW_MASK: Final = np.uint64((1 << ROW_BITS) - 1)
_NOWHERE: Final = -1


class Place(NamedTuple):
    """Where a block stands, and the version that its row had."""

    replica: int
    row: int
    version: int


class Neighbours:
    """The other replicas of the node, by `data_parallel_rank_local`."""

    def __init__(self, file: NodeFile, own: Section) -> None:
        self._file = file
        self._own = own
        self._sections = file.sections
        self._rows = file.spec.rows
        self._others = [n for n in range(file.spec.replicas) if n != own.replica]
        self._epochs = dict.fromkeys(self._others, 0)
        self._avoided: dict[int, float] = {}
        self._uses_read: dict[int, int] = {}
        self._living = np.empty(0, np.int64)
        self._look_at_s = 0.0
        self.lost = 0  # that ended without closing their section

    def look(self) -> None:
        """Ask who lives, unless that was done a moment ago."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        living = []
        for replica in self._others:
            epoch = int(self._sections.head[replica, EPOCH])
            owned = bool(epoch) and self._file.owned(replica)
            if self._epochs[replica] and not owned:
                self.lost += epoch == self._epochs[replica]
            if owned and epoch != self._epochs[replica]:
                self._uses_read[replica] = 0
                self._avoided.pop(replica, None)
            self._epochs[replica] = epoch if owned else 0
            if owned and self._avoided.get(replica, 0.0) <= now_s:
                living.append(replica)
        self._living = np.array(living, np.int64)

    def avoid(self, replica: int, seconds: float) -> None:
        """Do not look for blocks with this one for a while: its rows cannot be had."""
        self._avoided[replica] = time.monotonic() + seconds
        self._living = self._living[self._living != replica]

    def find(self, keys: Sequence[bytes], group: int) -> list[Place | None]:
        """Of each block, a place from which it can be read."""
        found: list[Place | None] = [None] * len(keys)
        self.look()
        if not len(self._living) or not keys:
            return found
        match, entries = self._matching(keys, group)
        state = entries[..., 2] >> np.uint64(ROW_BITS)
        match &= state == READY
        # First axis last: of each block the first of those that have it.
        by_block = match.transpose(1, 0, 2).reshape(len(keys), -1)
        at = np.flatnonzero(by_block.any(1))
        if not at.size:
            return found
        who, way = np.divmod(by_block[at].argmax(1), match.shape[2])
        rows = (entries[who, at, way, 2] & _ROW_MASK).astype(np.int64)
        replicas = self._living[who]
        inside = rows < self._rows
        versions = self._sections.versions[replicas, np.where(inside, rows, 0)]
        readable = inside & (versions & np.uint64(1) == 1)
        places = zip(
            at.tolist(),
            replicas.tolist(),
            rows.tolist(),
            versions.tolist(),
            readable.tolist(),
            strict=True,
        )
        for n, replica, row, version, may in places:
            if may:
                found[n] = Place(replica, row, version)
        return found

    def taken(self, keys: Sequence[bytes], group: int, since_ns: int | None = None) -> list[bool]:
        """Of each block, whether another has it or claims it; `since_ns`: before our own claim."""
        self.look()
        if not len(self._living) or not keys:
            return [False] * len(keys)
        match, entries = self._matching(keys, group)
        state, stamp = entries[..., 2] >> np.uint64(ROW_BITS), entries[..., 3].astype(np.int64)
        now_ns = time.monotonic_ns()
        valid = (state == CLAIMED) & (now_ns - stamp < int(CLAIM_S * 1e9))
        if since_ns is not None:
            lower = (self._living < self._own.replica)[:, None, None]
            valid &= (stamp < since_ns) | ((stamp == since_ns) & lower)
        match &= (state == READY) | valid
        by_block = match.transpose(1, 0, 2).reshape(len(keys), -1)
        taken: list[bool] = np.logical_or.reduce(by_block, axis=1).tolist()
        return taken

    def _matching(
        self, keys: Sequence[bytes], group: int
    ) -> tuple[
        np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
        np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
    ]:
        """bool [living, n, ways], and the entries themselves, u64 [living, n, ways, 4]."""
        named = tags(keys, group)
        buckets = (named[:, 0] & np.uint64(self._file.spec.buckets - 1)).astype(np.int64)
        entries = self._sections.table[self._living[:, None], buckets[None, :]]
        same = (entries[..., 0] == named[None, :, None, 0]) & (
            entries[..., 1] == named[None, :, None, 1]
        )
        return same, entries

    def uses(self) -> list[list[int]]:
        """Rows of this replica that others used since the last call, a list for each run."""
        runs: list[list[int]] = []
        own = self._own
        self.look()
        for replica in self._living.tolist():
            written = int(self._sections.head[replica, USES_WRITTEN])
            read = self._uses_read[replica]
            if written == read:
                continue
            own.fence()
            self._uses_read[replica] = written
            read = max(read if read <= written else 0, written - USES)
            words = self._sections.uses[replica][np.arange(read, written) % USES]
            run: list[int] = []
            for word, version in words.tolist():
                if word & START and run:
                    runs.append(run)
                    run = []
                whose, row = (word & ~START) >> REPLICA_BITS, word & (1 << ROW_BITS) - 1
                if whose == own.replica and row in own.block_of and own.version(row) == version:
                    run.append(row)
            if run:
                runs.append(run)
        return runs
