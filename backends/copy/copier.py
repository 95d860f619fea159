"""The copier of one KV group: checked batches in, bytes moved."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from backends.copy.batch import Batch, Limits, check_batch
from backends.copy.cpu import CpuEngine
from backends.copy.cuda import CudaEngine
from backends.copy.fragments import map_blocks
from backends.copy.handle import CopyHandle, CopyStats
from backends.copy.slot import map_slot
from backends.errors import CopyError


class _Engine(Protocol):
    kernel: str

    def run(self, batch: Batch) -> CopyStats: ...

    def submit(self, batch: Batch) -> CopyHandle: ...

    def close(self) -> None: ...


class GroupCopier:
    """Moves blocks of one KV group between `tensors` and this worker's slot of region rows.

    `tensors` and `block_dim` are as `backends.copy.fragments.map_blocks` takes them; the order of
    the tensors is the order of layers in the slot. `slot` is uint8 `[rows, slot_bytes]`, contiguous
    within a row. In a slot, block j of a chunk starts at `j * worker_bytes_per_block`, so a partial
    chunk is a prefix of the slot. Several groups are several copiers over one slot.

    In `block_ids` (int64 `[n, blocks_per_chunk]`) -1 skips a block: a store writes zeroes in its
    place, a load leaves the tensors alone. A store always writes the whole slot, zeroes where there
    is no block, so that no earlier bytes leave with it. `rows` is int64 `[n]`.

    With `loads_only` the slot may be a read-only array, of another replica's region; every store
    raises CopyError.

    Every call checks its batch first and raises CopyError before anything is written. Batches of
    one copier run in the order they were submitted. A copier belongs to one thread at a time.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        block_dim: int,
        slot: NDArray[np.uint8],
        blocks_per_chunk: int,
        threads: int = 1,
        kernel: str = "auto",
        loads_only: bool = False,
    ) -> None:
        if min(blocks_per_chunk, threads) < 1:
            raise CopyError(
                f"blocks_per_chunk is {blocks_per_chunk} and threads is {threads}, expected at "
                "least 1 each"
            )
        blocks = map_blocks(tensors, block_dim)
        self._limits = Limits(
            num_blocks=blocks.num_blocks if tensors else None,
            num_rows=slot.shape[0] if slot.ndim else 0,
            blocks_per_chunk=blocks_per_chunk,
        )
        self._worker_bytes_per_block = blocks.block_bytes
        self._open = True
        self._loads_only = loads_only
        map_slot(slot, blocks_per_chunk * blocks.block_bytes, loads_only=loads_only)
        self._engine: _Engine
        if blocks.device.type == "cuda":
            self._engine = CudaEngine(tensors, blocks, slot, blocks_per_chunk, kernel)
        else:
            self._engine = CpuEngine(tensors, blocks, slot, blocks_per_chunk, threads, kernel)

    @property
    def worker_bytes_per_block(self) -> int:
        """Bytes that this worker keeps of one block, over all its layers of the group."""
        return self._worker_bytes_per_block

    @property
    def kernel(self) -> str:
        """What really copies: `c-avx512`, `c-avx2`, `c-portable`, `numpy` (no extension was
        built), `cuda-pinned`, or `cuda-pageable` (the slot is not page-locked)."""
        return self._engine.kernel

    def store(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> CopyStats:
        """Copies blocks to their rows and returns when they are there. Rows must be distinct."""
        return self._engine.run(self._check(block_ids, rows, to_slot=True, keep=False))

    def load(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> CopyStats:
        """Copies rows to their blocks and returns when they are there. Blocks must be distinct."""
        return self._engine.run(self._check(block_ids, rows, to_slot=False, keep=False))

    def submit_store(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> CopyHandle:
        """Like `store`, but returns at once. The arrays may be reused, blocks and rows not yet."""
        return self._engine.submit(self._check(block_ids, rows, to_slot=True, keep=True))

    def submit_load(self, block_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> CopyHandle:
        """Like `load`, but returns at once. The arrays may be reused, blocks and rows not yet."""
        return self._engine.submit(self._check(block_ids, rows, to_slot=False, keep=True))

    def close(self) -> None:
        """Waits for what was submitted and lets go of tensors and slot. May be called again."""
        if self._open:
            self._open = False
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(
        self, block_ids: NDArray[np.int64], rows: NDArray[np.int64], *, to_slot: bool, keep: bool
    ) -> Batch:
        if not self._open:
            raise CopyError("the copier is closed; make a new one over the region that is open")
        if to_slot and self._loads_only:
            raise CopyError("the copier is for loads only; store to one's own region")
        return check_batch(block_ids, rows, self._limits, to_slot=to_slot, keep=keep)
