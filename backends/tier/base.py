"""The contract of a secondary tier. Every tier, ours or a user's, passes `backends.testing`.

A tier is asynchronous and batched. The leader of a replica calls it from one thread, once or more
in every engine step, so **no method but `drain` and `close` may wait**: not for a disk, not for
the network, not for a lock that is held while somebody waits for those. Work goes to the tier's
own threads; its results come back through `poll`.

A tier answers per key. One bad block never fails its batch, a full disk sheds stores and goes on
loading, and a block that cannot be proved right is not there: wrong bytes are never given out.

What a caller may count on beyond each method's own words:

- A key of a job ends in exactly one outcome and a job in exactly one result, an empty job too, and
  also when the tier is closed under it. Nothing that the disk or the network does raises out of a
  method; TierError is for a caller's mistake (a job id that is in use, a submit after `close`).
- A key that is stored DONE is a HIT at once in this process, and stays one until the quota evicts
  it or it is found CORRUPT. Other processes see it after a while, whole.
- PENDING ends: whoever goes on asking, and does nothing else, gets HIT or MISS as soon as the
  storage answers, whatever became of the store or of its writer.
- A key that was found CORRUPT is a MISS until its next store, which writes it anew.
- A batch goes prefix first. When the quota makes a tier forget, it forgets the later keys of a
  batch before the earlier ones, because an extension is of no use without its prefix.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from backends.block import BlockKey
from backends.config import ParallelConfig
from backends.errors import TierError

Bytes = npt.NDArray[np.uint8]
COUNTERS: Final = ("stored", "loaded", "shed", "corrupt", "late", "failed", "evicted")


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
    SHED = "shed"  # not tried: no room, a full queue, or a tier that is taken out or closed
    LATE = "late"  # its deadline passed first
    FAILED = "failed"  # anything else; the result says what


@dataclass(frozen=True, slots=True)
class Job:
    """One batch. `keys[i]` is stored from, or loaded into, row `rows[i]`.

    `job_id` is the caller's and names no other job of this tier, of either kind. A key may stand in
    a batch more than once, a row only once, and it is in no other load that has no result yet.

    `deadline_s` is on the clock of `time.monotonic`; None waits for ever. The caller keeps the rows
    alive and unchanged (store) or unread (load) until `poll` has given the job's result, also where
    the deadline has passed: a late write into a row that was given away would be a wrong byte. So
    a tier whose disk hangs in the middle of a row may give its result late, but a key that has not
    been begun when the deadline passes ends LATE then and is not begun any more.
    """

    job_id: int
    keys: tuple[BlockKey, ...]
    rows: tuple[int, ...]
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.rows):
            raise TierError(
                f"job {self.job_id} has {len(self.keys)} keys and {len(self.rows)} rows, expected "
                "one row for each key"
            )


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended, key by key. `reasons[i]` says why `outcomes[i]` is not DONE, else "".

    `bytes_moved` counts what was written or read for keys that ended DONE, headers included; a key
    that was there already, or stood twice in the batch, is moved once or not at all. `seconds` is
    the time from submit to the end.
    """

    job_id: int
    outcomes: tuple[Outcome, ...]
    reasons: tuple[str, ...]
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds, headers included, of all who share it. `capacity_bytes` None: no limit.

    `oldest_s` is how long ago the least recently used block was used, None when empty.
    """

    bytes: int
    blocks: int
    capacity_bytes: int | None
    oldest_s: float | None


class Evicted(NamedTuple):
    """Blocks that a tier let go to keep its quota. `more`: others as well, so many that it does not
    know any more which."""

    keys: Sequence[BlockKey]
    more: bool


NONE_EVICTED: Final = Evicted((), False)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier is, for those who choose how to use it and for its tests.

    persistent: blocks outlive the process, killed or not. shared: other processes see them. quota:
    it has a capacity that it keeps at every moment. corruption: it finds damaged bytes.
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
        """What is known of each key now, in order. A HIT may still turn out MISSING on load.

        After `close` every key is a MISS.
        """

    @abstractmethod
    def submit_store(self, job: Job) -> None:
        """Begin to store rows whose headers are COMPLETE. The tier seals them: it writes
        checksums into the rows' headers, and nothing else.

        A key that is there already, and right, is DONE without being written again. A store is
        seen by lookups, here and elsewhere, whole or not at all. A row that is not COMPLETE, or
        whose header has another key or fingerprint (`block.check_row`), is FAILED and stored
        nowhere. A LATE store may have landed. Raises TierError after `close`.
        """

    @abstractmethod
    def submit_load(self, job: Job) -> None:
        """Begin to load blocks into rows, header included. A row whose key is not DONE holds
        unspecified bytes and an EMPTY header. Raises TierError after `close`.
        """

    @abstractmethod
    def poll(self) -> Sequence[JobResult]:
        """Results of jobs that ended since the last call; each job's exactly once.

        A row is the caller's again when its job's result is given: the tier touches it no more.
        """

    def evicted(self) -> Evicted:
        """What this process has driven out here since the last call, whoever stored it.

        Of those who share a tier, who evicts a block tells of it, and nobody else: so it is told
        once. A key may have been stored again since. A tier that does not know tells of none.
        """
        return NONE_EVICTED

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - most tiers keep no order
        """These keys were used, though not loaded from here, and are to be kept longest, the first
        one longer than the others. May be ignored."""

    @abstractmethod
    def usage(self) -> Usage:
        """What the tier holds now, as far as it knows."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Counts of blocks since the start by name: those of COUNTERS, and any of the tier's own.

        stored counts blocks that were written, loaded blocks that were given out whole; the others
        count keys that ended so, and blocks that the quota drove out.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job has ended (results stay for `poll`); False on time-out."""

    def settle(self, timeout_s: float) -> bool:
        """`drain`, and find out what others who share the storage have done until now. May wait.

        For runs that are to come out the same each time: what is looked up next, and what goes to
        make room, then follows from what was done before and not from when it is noticed.
        """
        return self.drain(timeout_s)

    @abstractmethod
    def close(self) -> None:
        """End all work and give everything back. May be called again. `poll` still works.

        Keys not begun are SHED, those begun are waited for, because a row may be unmapped next. A
        tier may give up on I/O that does not come back; such a job stays without a result, and its
        rows must not be used again.
        """
