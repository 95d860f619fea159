"""Runs batches whose tensors are on a CUDA device, on a stream of their own.

A batch starts after the work that the current stream held when it was submitted, and runs beside
whatever is queued there later. The transfers overlap with the caller only if the region's memory
is page-locked, which is the region's business; `kernel` says which it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from backends.copy.batch import Batch
from backends.copy.fragments import BlockMap
from backends.copy.handle import CopyHandle, CopyStats
from backends.copy.kernels import bytes_at
from backends.copy.staging import StagingBuffer
from backends.errors import CopyError

# Enough for transfers to dwarf the launches of a gather, little beside a KV cache.
_STAGING_BYTES = 64 << 20


class _CudaHandle:
    def __init__(
        self, start: torch.cuda.Event, end: torch.cuda.Event, moved_bytes: int, chunks: int
    ) -> None:
        self._start, self._end = start, end
        self._bytes, self._chunks = moved_bytes, chunks

    def done(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> CopyStats:
        self._end.synchronize()
        return CopyStats(self._bytes, self._start.elapsed_time(self._end) / 1e3, self._chunks)


class CudaEngine:
    """Copies in the order of submission. One thread at a time may use it."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        blocks: BlockMap,
        slot: NDArray[np.uint8],
        blocks_per_chunk: int,
        kernel: str,
    ) -> None:
        self._used_bytes = blocks_per_chunk * blocks.block_bytes
        self._device = blocks.device
        self._block_bytes = blocks.block_bytes
        self._capacity_chunks = max(1, _STAGING_BYTES // self._used_bytes)
        self._tails: NDArray[np.uint8] | None = slot[:, self._used_bytes :]
        self._memory: NDArray[np.uint8] | None = slot
        self._slot: torch.Tensor | None = torch.from_numpy(_unprotected(slot))
        self.kernel = "cuda-pinned" if self._slot.is_pinned() else "cuda-pageable"
        if kernel not in ("auto", "cuda", self.kernel):
            raise CopyError(
                f"copy kernel {kernel!r} is not available for tensors on {self._device}, expected "
                f"'auto' or {self.kernel!r}"
            )
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._staging: StagingBuffer | None = StagingBuffer(
                tensors, blocks, blocks_per_chunk, self._capacity_chunks
            )

    def run(self, batch: Batch) -> CopyStats:
        return self.submit(batch).wait()

    def submit(self, batch: Batch) -> CopyHandle:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        computed = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            start.record()
            for first in range(0, batch.rows.size, self._capacity_chunks):
                part = slice(first, first + self._capacity_chunks)
                if batch.to_slot:
                    self._store(batch.block_ids[part], batch.rows[part])
                else:
                    self._load(batch.block_ids[part], batch.rows[part])
            end.record()
        moved_bytes = batch.wanted_blocks * self._block_bytes
        return _CudaHandle(start, end, moved_bytes, batch.rows.size)

    def close(self) -> None:
        self._stream.synchronize()
        self._slot = self._tails = self._staging = self._memory = None

    def _store(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        assert self._slot is not None
        assert self._tails is not None
        assert self._staging is not None
        if self._tails.shape[1]:
            self._tails[rows] = 0
        self._staging.gather(block_ids)
        for place, row in enumerate(rows.tolist()):
            in_slot = self._slot[row, : self._used_bytes]
            in_slot.copy_(self._staging.chunks[place], non_blocking=True)

    def _load(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        assert self._slot is not None
        assert self._staging is not None
        for place, row in enumerate(rows.tolist()):
            in_slot = self._slot[row, : self._used_bytes]
            self._staging.chunks[place].copy_(in_slot, non_blocking=True)
        self._staging.scatter(block_ids)


def _unprotected(slot: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same memory as an array that torch takes without a warning; it has no read-only ones."""
    if slot.flags.writeable:
        return slot
    rows, slot_bytes = slot.shape
    return bytes_at(slot.ctypes.data, (rows, slot_bytes), slot.strides)
