"""Runs batches whose tensors are on the CPU: at once, or one after another in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from backends.copy.batch import Batch
from backends.copy.fragments import BlockMap
from backends.copy.handle import CopyHandle, CopyStats
from backends.copy.kernels import make_kernel
from backends.copy.slot import map_slot


class _CpuHandle:
    def __init__(self, future: Future[CopyStats]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> CopyStats:
        return self._future.result()


class CpuEngine:
    """Copies in the order of submission. One thread at a time may use it."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        blocks: BlockMap,
        slot: NDArray[np.uint8],
        blocks_per_chunk: int,
        threads: int,
        kernel: str,
    ) -> None:
        slot_map = map_slot(slot, blocks_per_chunk * blocks.block_bytes, loads_only=True)
        self.kernel, self._copy = make_kernel(kernel, blocks, slot_map, blocks_per_chunk, threads)
        self._block_bytes = blocks.block_bytes
        # The kernel works on addresses; these keep the memory behind them alive until close().
        self._memory: tuple[object, ...] = (tuple(tensors), slot)
        self._background: ThreadPoolExecutor | None = None
        self._last: Future[CopyStats] | None = None

    def run(self, batch: Batch) -> CopyStats:
        if self._last is not None and not self._last.done():
            return self.submit(batch).wait()
        return self._timed_copy(batch)

    def submit(self, batch: Batch) -> CopyHandle:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="kvquay-copy")
        self._last = self._background.submit(self._timed_copy, batch)
        return _CpuHandle(self._last)

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown(wait=True)
        self._memory = ()

    def _timed_copy(self, batch: Batch) -> CopyStats:
        start_s = time.perf_counter()
        self._copy(batch)
        seconds = time.perf_counter() - start_s
        return CopyStats(batch.wanted_blocks * self._block_bytes, seconds, batch.rows.size)
