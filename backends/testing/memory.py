"""MemoryTier: a right and complete tier in this process's memory, for tests of tiers and of users.

It is what the conformance suite is measured by, and a lower tier for a test that needs one without
a disk. Its storage, a MemoryMedium, outlives it, so that a test can reopen a tier, look at what it
stored, damage it, or make it hang.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from backends.block import BlockKey
from backends.testing.harness import Opener, TierHarness
from backends.tier.base import Bytes, Capabilities, Job, TierContext, Usage
from backends.tier.blocking import BlockingTier
from backends.tier.settings import Size

_RECENCY_SPARE: Final = 1024


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """`capacity` in bytes of blocks with their headers; None has no limit."""

    capacity: Size | None = None


@dataclass(slots=True)
class StoredBlock:
    """What stands under a key, and when it was used last, on the clock of `time.monotonic`."""

    data: bytes
    used_s: float


class MemoryMedium:
    """Where MemoryTiers store: blocks by fingerprint and key. Stands for the disk."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, BlockKey], StoredBlock] = {}
        self.quarantine: list[tuple[bytes, BlockKey]] = []
        self._running = threading.Event()
        self._running.set()

    def stall(self) -> None:
        """From now on every access waits."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def access(self) -> None:
        """What every read and write begins with."""
        self._running.wait()


class MemoryTier(BlockingTier):
    """Keeps blocks as bytes, the least recently used go when `capacity` is reached."""

    name = "memory"
    capabilities = Capabilities(persistent=False, shared=False, quota=True, corruption=True)
    settings_type: ClassVar = MemorySettings

    def __init__(
        self, context: TierContext, settings: MemorySettings, medium: MemoryMedium | None = None
    ) -> None:
        self._medium = medium or MemoryMedium()
        self._capacity_bytes = settings.capacity
        # How recently a key was used: by which call, and how far to the front of its batch.
        self._recency: dict[BlockKey, tuple[int, int]] = {}
        self._calls = 0
        super().__init__(context)
        self._make_room(0)

    def submit_store(self, job: Job) -> None:
        self.touch(job.keys)
        super().submit_store(job)

    def submit_load(self, job: Job) -> None:
        self.touch(job.keys)
        super().submit_load(job)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._calls += 1
        if len(self._recency) > 2 * len(self._medium.blocks) + _RECENCY_SPARE:
            stored = {key for _, key in list(self._medium.blocks)}
            self._recency = {key: at for key, at in self._recency.items() if key in stored}
        for index, key in enumerate(keys):
            self._recency[key] = (self._calls, -index)

    def has_block(self, key: BlockKey) -> bool:
        self._medium.access()
        return self._at(key) in self._medium.blocks

    def write_block(self, key: BlockKey, block: Bytes) -> None:
        self._medium.access()
        self._make_room(block.size, key)
        self._medium.blocks[self._at(key)] = StoredBlock(block.tobytes(), time.monotonic())

    def read_block(self, key: BlockKey, into: Bytes) -> int | None:
        self._medium.access()
        stored = self._medium.blocks.get(self._at(key))
        if stored is None:
            return None
        stored.used_s = time.monotonic()
        found = np.frombuffer(stored.data, dtype=np.uint8)[: into.size]
        into[: found.size] = found
        return found.size

    def set_aside(self, key: BlockKey) -> None:
        self._medium.access()
        stored = self._medium.blocks.pop(self._at(key), None)
        if stored is not None:
            self._medium.quarantine.append(self._at(key))

    def usage(self) -> Usage:
        own = self._own()
        oldest_s = min((stored.used_s for _, stored in own), default=None)
        return Usage(
            bytes=sum(len(stored.data) for _, stored in own),
            blocks=len(own),
            capacity_bytes=self._capacity_bytes,
            oldest_s=None if oldest_s is None else time.monotonic() - oldest_s,
        )

    def _at(self, key: BlockKey) -> tuple[bytes, BlockKey]:
        return self.context.fingerprint, key

    def _own(self) -> list[tuple[BlockKey, StoredBlock]]:
        # One call copies it: another thread may store meanwhile.
        every = list(self._medium.blocks.items())
        return [
            (key, stored) for (space, key), stored in every if space == self.context.fingerprint
        ]

    def _make_room(self, needed_bytes: int, newcomer: BlockKey | None = None) -> None:
        """Drive out what was used least recently; the newcomer itself, if that is it."""
        if self._capacity_bytes is None:
            return
        own = {key: len(stored.data) for key, stored in self._own()}
        while sum(own.values()) + needed_bytes > self._capacity_bytes:
            candidates = [*own, newcomer] if newcomer else [*own]
            victim = min(candidates, key=lambda key: self._recency.get(key, (0, 0)), default=None)
            if victim is None:
                return
            if victim == newcomer:
                room = f"a block of {needed_bytes} bytes in a capacity of {self._capacity_bytes}"
                raise OSError(errno.ENOSPC, f"no room for {room}")
            del own[victim]
            self._medium.blocks.pop(self._at(victim), None)
            self.forget(victim, evicted=True)


class MemoryHarness(TierHarness):
    """MemoryTiers on one medium; how the conformance suite reaches them, and behind them."""

    capabilities = MemoryTier.capabilities
    can_stall = True
    tier_type: ClassVar[type[MemoryTier]] = MemoryTier

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.medium = MemoryMedium()

    def opener(self, capacity_bytes: int | None = None) -> Opener:
        return partial(self.tier_type, settings=MemorySettings(capacity_bytes), medium=self.medium)

    def raw_list(self) -> Mapping[str, int]:
        return {f"{at}": len(stored.data) for at, stored in list(self.medium.blocks.items())}

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        stored = self.medium.blocks.get((fingerprint, key))
        return None if stored is None else stored.data

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        self.medium.blocks[fingerprint, key] = StoredBlock(data, time.monotonic())

    def stall(self) -> None:
        self.medium.stall()

    def resume(self) -> None:
        self.medium.resume()
