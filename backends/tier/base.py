"""The contract of a secondary tier. Every tier, ours or a user's, passes `backends.testing`.

A tier is asynchronous and batched. The leader of a replica calls it from one thread, once or more in
every engine step, so **no method but `drain` and `close` may wait**: not for a disk, not for the
network, not for a lock that is held while somebody waits for those. Work goes to the tier's own
threads; its results come back through `poll`.

A tier answers per key. One bad block never fails its batch, a full disk sheds stores and goes on
loading, and a block that cannot be proved right is not there: wrong bytes are never given out.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.block import BlockKey
from backends.config import ParallelConfig

Bytes = npt.NDArray[np.uint8]


class Lookup(enum.Enum):
    """What a tier knows of a key now."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # being found out, or being stored; ask again


class Outcome(enum.Enum):
    """How one key of a job ended."""

    DONE = "done"
    MISSING = "missing"  # load: it is not, or no longer, there
    CORRUPT = "corrupt"  # load: it was there and wrong; it is in quarantine now
    SHED = "shed"  # store: no room, a full queue, or a tier that is taken out
    LATE = "late"  # its deadline passed first
    FAILED = "failed"  # anything else; the result says what


@dataclass(frozen=True, slots=True)
class Job:
    """One batch. `keys[i]` is stored from, or loaded into, row `rows[i]`.

    `deadline_s` is on the clock of `time.monotonic`; None waits for ever. The caller keeps the rows
    alive and unchanged (store) or unread (load) until `poll` has given the job's result, also where
    the deadline has passed: a late write into a row that was given away would be a wrong byte.
    """

    job_id: int
    keys: tuple[BlockKey, ...]
    rows: tuple[int, ...]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended, key by key. `reasons[i]` says why `outcomes[i]` is not DONE, else ""."""

    job_id: int
    outcomes: tuple[Outcome, ...]
    reasons: tuple[str, ...]
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds. `capacity_bytes` None: no limit. Ages in seconds, None when empty."""

    bytes: int
    blocks: int
    capacity_bytes: int | None
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier is, for those who choose how to use it and for its tests.

    persistent: blocks outlive the process. shared: other processes see them. quota: it has a
    capacity that it keeps. corruption: it finds damaged bytes.
    """

    persistent: bool
    shared: bool
    quota: bool
    corruption: bool


class Rows(Protocol):
    """The memory that blocks are stored from and loaded into: a region, or a test's buffer."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, header and padding included: a multiple of 4096."""

    def row_view(self, row: int) -> Bytes:
        """A whole row, uint8 [row_bytes], 4096-byte aligned, writable."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What every tier is given beside its own settings.

    `fingerprint` (32 bytes) is the namespace's digest: blocks of another one are not seen.
    `manifest` says in words what went into it. All rows have `rows.row_bytes`, of which all behind
    the header is stored.
    """

    fingerprint: bytes
    manifest: dict[str, object]
    rows: Rows
    parallel: ParallelConfig
    engine_id: str


class Tier(ABC):
    """A secondary tier. Methods are called from one thread; none but the last two may wait."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        """What is known of each key now, in order. A HIT may still turn out MISSING on load."""

    @abstractmethod
    def submit_store(self, job: Job) -> None:
        """Begin to store rows whose headers are COMPLETE. The tier seals them: it writes
        checksums into the rows' headers, and nothing else.

        A key that is there already, and right, is DONE without being written again. A store is
        seen by lookups, here and elsewhere, whole or not at all.
        """

    @abstractmethod
    def submit_load(self, job: Job) -> None:
        """Begin to load blocks into rows, header included. A row whose key is not DONE holds
        unspecified bytes and an EMPTY header."""

    @abstractmethod
    def poll(self) -> Sequence[JobResult]:
        """Results of jobs that ended since the last call; each job's exactly once."""

    @abstractmethod
    def usage(self) -> Usage:
        """What the tier holds now, as far as it knows."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Counts since the start by name: stored, loaded, shed, corrupt, late, failed, evicted, ..."""

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job has ended (results stay for `poll`); False on time-out."""

    @abstractmethod
    def close(self) -> None:
        """End all work and give everything back. May be called again. `poll` still works."""
