"""A tier for an engine whose own memory keeps blocks without headers.

Each block passes through a row of ours: on its way down it is given a header there, on its way back
it is checked there and only then copied out. The copies are made by the caller's thread, so a tier
of large blocks takes part of a millisecond a block of it.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.block import COMPLETE, HEADER_BYTES, BlockKey, write_header
from backends.region.spec import row_bytes_for
from backends.tier.base import Bytes, Job, Lookup, Outcome, Rows, Tier

Chunk = Callable[[int], Bytes]
"""The engine's own memory of a chunk, uint8 [payload bytes], by the engine's number for it."""


class StagingRows:
    """Rows of anonymous memory, page-aligned: what `backends.tier.base.Rows` asks for."""

    def __init__(self, rows: int, payload_bytes: int) -> None:
        self._row_bytes = row_bytes_for(payload_bytes, 1)
        memory = np.frombuffer(mmap.mmap(-1, rows * self._row_bytes), np.uint8)
        self._rows = memory.reshape(rows, self._row_bytes)
        self.payload_bytes = payload_bytes
        self.free = list(range(rows))

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    def row_view(self, row: int) -> Bytes:
        view: Bytes = self._rows[row]
        return view

    def payload(self, row: int) -> Bytes:
        return self.row_view(row)[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]


@dataclass(frozen=True, slots=True)
class Moved:
    """How a transfer ended. `done` are places in its keys."""

    transfer: int
    done: tuple[int, ...]
    bytes_moved: int
    seconds: float


@dataclass(slots=True)
class _Transfer:
    number: int
    keys: Sequence[BlockKey]
    chunks: Sequence[int]
    load: bool
    began_s: float
    next: int = 0
    parts: int = 0
    done: list[int] = field(default_factory=list)
    nbytes: int = 0


class StagedTier:
    """Called from one thread. No method but `drain` and `close` waits."""

    def __init__(
        self, open_tier: Callable[[Rows], Tier], rows: StagingRows, chunk: Chunk, fingerprint: bytes
    ) -> None:
        self._rows = rows
        self._chunk = chunk
        self._fingerprint = fingerprint
        self._waiting: deque[_Transfer] = deque()
        self._parts: dict[int, tuple[_Transfer, range, list[int]]] = {}
        self._next_job = 0
        self.tier = open_tier(rows)

    @property
    def busy(self) -> bool:
        return bool(self._parts or self._waiting)

    def lookup(self, key: BlockKey) -> Lookup:
        return self.tier.lookup([key])[0]

    def submit(
        self, number: int, keys: Sequence[BlockKey], chunks: Sequence[int], *, load: bool
    ) -> None:
        """Begin a transfer of the caller's `number`; it ends in one Moved."""
        self._waiting.append(_Transfer(number, keys, chunks, load, time.monotonic()))
        self._pump()

    def poll(self) -> list[Moved]:
        """Transfers that ended since the last call."""
        ended = []
        for result in self.tier.poll():
            transfer, places, rows = self._parts.pop(result.job_id)
            for at, row, outcome in zip(places, rows, result.outcomes, strict=True):
                if outcome is Outcome.DONE:
                    if transfer.load:
                        self._chunk(transfer.chunks[at])[:] = self._rows.payload(row)
                    transfer.done.append(at)
            self._rows.free += rows
            transfer.parts -= 1
            transfer.nbytes += result.bytes_moved
            if not transfer.parts and transfer.next == len(transfer.keys):
                ended.append(self._moved(transfer))
        self._pump()
        return ended

    def drain(self, timeout_s: float) -> list[Moved]:
        """Wait for everything that was submitted; what has ended by then."""
        until_s, ended = time.monotonic() + timeout_s, list[Moved]()
        while self.busy and time.monotonic() < until_s:
            self.tier.drain(0.05)
            ended += self.poll()
        return ended

    def close(self) -> None:
        self.tier.close()

    def _moved(self, transfer: _Transfer) -> Moved:
        seconds = time.monotonic() - transfer.began_s
        return Moved(transfer.number, tuple(transfer.done), transfer.nbytes, seconds)

    def _pump(self) -> None:
        """Begin as much as there are rows for."""
        free = self._rows.free
        while self._waiting and free:
            transfer = self._waiting[0]
            end = min(len(transfer.keys), transfer.next + len(free))
            places, transfer.next = range(transfer.next, end), end
            if end == len(transfer.keys):
                self._waiting.popleft()
            rows = [free.pop() for _ in places]
            keys = tuple(transfer.keys[at] for at in places)
            job = Job(self._next_job, keys, tuple(rows))
            self._next_job += 1
            self._parts[job.job_id] = (transfer, places, rows)
            transfer.parts += 1
            if transfer.load:
                self.tier.submit_load(job)
                continue
            for at, row in zip(places, rows, strict=True):
                self._rows.payload(row)[:] = self._chunk(transfer.chunks[at])
                write_header(
                    self._rows.row_view(row),
                    transfer.keys[at],
                    fingerprint=self._fingerprint,
                    slot_lengths=[self._rows.payload_bytes],
                    created_ns=time.time_ns(),
                    state=COMPLETE,
                )
            self.tier.submit_store(job)
