"""Go through everything on a path: enter it into the index, and count it for the ledger.

Slow and in the background. It goes shard by shard, so that counting holds up writers of one shard,
for as long as its directories take, and only where the ledger turned out to be wrong.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from backends.tier.filesystem import naming
from backends.tier.filesystem.io import DIRECTORY
from backends.tier.filesystem.volume import Volume
from backends.tier.index import Index
from backends.tier.spaces import Namespaces

_PAUSE_S: Final = 0.001
_CLOCK_NS: Final = 50_000_000


class Count(NamedTuple):
    """What a shard holds."""

    bytes: int
    blocks: int


class Scanner:
    """Of one path. `row_bytes` is the size of the tier's own blocks."""

    def __init__(
        self, volume: Volume, index: Index, namespaces: Namespaces, row_bytes: int,
        stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._volume = volume
        self._index = index
        self._namespaces = namespaces
        self._row_bytes = row_bytes
        self._stopped = stopped
        self._changed_ns: dict[str, int] = {}

    def scan(self) -> bool:
        """All of it; False if it was stopped, or if some of it could not be read.

        Raises OSError where something could not be read that was never counted before.
        """
        names = self._namespace_names()
        self.count_quarantine()
        failed: OSError | None = None
        for shard in range(naming.SHARDS):
            if self._stopped():
                return False
            began_s = time.monotonic()
            try:
                self.count(shard, names)
            except OSError as error:
                failed = error
            # As long again: a scan leaves the counts, and the interpreter, to others.
            if (took_s := time.monotonic() - began_s) > _PAUSE_S:
                time.sleep(took_s)
        if failed is not None and not self._volume.ledger.totals().counted:
            raise failed
        return failed is None

    def look_again(self) -> bool:
        """Only what has changed since it was last looked at here: directories with another mtime.

        False if it was stopped. Raises OSError.
        """
        self._index.generation += 1
        names = self._namespace_names()
        for shard in range(naming.SHARDS):
            if self._stopped():
                return False
            changed = [self._has_changed(f"{name}/{shard:02x}") for name in names]
            if any(changed):
                self.count(shard, names)
                self._index.forget_unseen(self._volume.number, shard)
        return True

    def _has_changed(self, leaf: str) -> bool:
        place, now_ns = self._volume.place, time.time_ns()
        try:
            changed_ns = place.io.stat(place.root, leaf).st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        before_ns = self._changed_ns.get(leaf)
        # A filesystem's clock is coarse: what changes next may bear the same time as this.
        settled = now_ns - changed_ns > _CLOCK_NS
        self._changed_ns[leaf] = changed_ns if settled else -1
        return changed_ns != before_ns

    def count(self, shard: int, names: list[str] | None = None, *, exactly: bool = False) -> None:
        """Enter one shard into the index and make the ledger agree with it. Raises OSError.

        `exactly`: hold the counts all the while, so that what follows can rely on them.
        """
        if names is None:
            names = self._namespace_names()
        ledger = self._volume.ledger
        before = ledger.counts()[shard]
        if not exactly:
            found = self._walk(shard, names)
            # As the ledger says, and nobody has changed it meanwhile: no need to hold it.
            if np.array_equal(before, found) and np.array_equal(ledger.counts()[shard], before):
                return
        with ledger.counting() as counts:
            found = self._walk(shard, names)
            counts.set(shard, found.bytes, found.blocks)

    def count_quarantine(self) -> None:
        self._volume.quarantine.count()

    def _namespace_names(self) -> list[str]:
        entries = self._volume.place.io.scandir(self._volume.place.root, ".")
        return [e.name for e in entries if e.is_directory and naming.is_namespace(e.name)]

    def _walk(self, shard: int, names: list[str]) -> Count:
        nbytes = blocks = 0
        for name in names:
            leaf = f"{name}/{shard:02x}"
            try:
                entries = self._volume.place.io.scandir(self._volume.place.root, leaf)
            except OSError as error:
                # Nothing yet, or something of somebody else's in its place.
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue
                raise
            files = [entry.name for entry in entries if not entry.is_directory]
            found = self._enter(self._namespaces.number(name), leaf, files)
            nbytes, blocks = nbytes + found.bytes, blocks + found.blocks
        return Count(nbytes, blocks)

    def _enter(self, namespace: int, leaf: str, files: list[str]) -> Count:
        """Enter a directory's blocks. Those of ours that the index has are not looked at again."""
        space, volume = self._namespaces[namespace], self._volume.number
        nbytes = blocks = 0
        unknown = []
        for file in files:
            key = naming.parse_block_name(file)
            if key is None:
                continue
            block_id = space.block_id(key)
            if space.leaf(block_id) != leaf:
                continue
            if namespace == 0 and self._index.mark_seen(block_id, volume):
                nbytes, blocks = nbytes + self._row_bytes, blocks + 1
            else:
                unknown.append((file, key, block_id))
        if unknown:
            directory = self._volume.place.io.open(self._volume.place.root, leaf, DIRECTORY)
            try:
                for file, key, block_id in unknown:
                    try:
                        found = self._volume.place.io.stat(directory, file)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(found.st_mode):
                        nbytes, blocks = nbytes + found.st_size, blocks + 1
                        used_ns = found.st_atime_ns
                        self._index.add(block_id, key, namespace, volume, used_ns, shown=True)
            finally:
                self._volume.place.io.close(directory)
        return Count(nbytes, blocks)
