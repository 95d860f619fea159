"""The two ways to copy on the CPU: the compiled kernel, and numpy where there is none.

Both take a checked batch, write every byte that a store owes to the slot (zeroes included), and
touch nothing that was not asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from backends.copy.batch import Batch
from backends.copy.fragments import BlockMap, Fragment
from backends.copy.slot import SlotMap
from backends.errors import CopyError

CopyBatch = Callable[[Batch], None]

# A second thread pays from here: starting one costs about what it takes to copy a quarter of this.
MIN_BYTES_PER_THREAD = 1 << 20


def available_kernels() -> tuple[str, ...]:
    """Names that `kernel=` accepts for tensors on the CPU of this machine, best first."""
    native = _native()
    return (*(() if native is None else native.kernels()), "numpy")


def make_kernel(
    name: str, blocks: BlockMap, slot: SlotMap, blocks_per_chunk: int, threads: int
) -> tuple[str, CopyBatch]:
    """Returns the kernel's real name and a function that copies one batch.

    `auto` takes the best one. The compiled kernels release the GIL for the whole batch and use up
    to `threads` threads; `numpy` releases it fragment by fragment and uses one thread.
    Raises CopyError for a kernel that this machine does not have.
    """
    available = available_kernels()
    if name == "auto":
        name = available[0]
    if name not in available:
        raise CopyError(
            f"copy kernel {name!r} is not available here, expected 'auto' or one of {available}; "
            "c-... need the compiled extension (`pip install` with a C compiler builds it)"
        )
    native = _native()
    if name == "numpy" or native is None:
        return "numpy", _numpy_kernel(blocks, slot, blocks_per_chunk)
    return name, _native_kernel(native, name, blocks, slot, blocks_per_chunk, threads)


def _native() -> ModuleType | None:
    try:
        from backends.copy import _kernel
    except ImportError:
        return None
    return _kernel


def _native_kernel(
    native: ModuleType,
    name: str,
    blocks: BlockMap,
    slot: SlotMap,
    blocks_per_chunk: int,
    threads: int,
) -> CopyBatch:
    fragments = np.array(
        [
            (f.address, f.block_stride_bytes, f.nbytes, f.slot_offset_bytes)
            for f in blocks.fragments
        ],
        dtype=np.int64,
    ).reshape(-1, 4)

    def copy(batch: Batch) -> None:
        useful_threads = 1 + batch.wanted_blocks * blocks.block_bytes // MIN_BYTES_PER_THREAD
        native.copy(
            name,
            min(threads, useful_threads),
            batch.to_slot,
            fragments,
            batch.block_ids,
            batch.rows,
            blocks_per_chunk,
            slot.address,
            slot.row_stride_bytes,
            slot.slot_bytes,
            blocks.block_bytes,
        )

    return copy


def _numpy_kernel(blocks: BlockMap, slot: SlotMap, blocks_per_chunk: int) -> CopyBatch:
    used_bytes = blocks_per_chunk * blocks.block_bytes
    rows = bytes_at(slot.address, (slot.num_rows, slot.slot_bytes), (slot.row_stride_bytes, 1))
    views = [
        (_tensor_view(f, blocks.num_blocks), _slot_view(f, blocks, slot, blocks_per_chunk))
        for f in blocks.fragments
    ]

    def copy(batch: Batch) -> None:
        places = [
            (block_id, row, position)
            for row, ids in zip(batch.rows.tolist(), batch.block_ids.tolist(), strict=True)
            for position, block_id in enumerate(ids)
        ]
        for in_tensor, in_slot in views:
            if batch.to_slot:
                for block_id, row, position in places:
                    in_slot[row, position] = in_tensor[block_id] if block_id >= 0 else 0
            else:
                for block_id, row, position in places:
                    if block_id >= 0:
                        in_tensor[block_id] = in_slot[row, position]
        if batch.to_slot and used_bytes < slot.slot_bytes:
            rows[batch.rows, used_bytes:] = 0

    return copy


def _tensor_view(fragment: Fragment, num_blocks: int) -> NDArray[np.uint8]:
    shape = (num_blocks, fragment.nbytes)
    return bytes_at(fragment.address, shape, (fragment.block_stride_bytes, 1))


def _slot_view(
    fragment: Fragment, blocks: BlockMap, slot: SlotMap, blocks_per_chunk: int
) -> NDArray[np.uint8]:
    return bytes_at(
        slot.address + fragment.slot_offset_bytes,
        (slot.num_rows, blocks_per_chunk, fragment.nbytes),
        (slot.row_stride_bytes, blocks.block_bytes, 1),
    )


def bytes_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint8]:
    """A view of foreign memory, which its owner (the engine) keeps alive."""
    if not all(shape):
        return np.empty(shape, np.uint8)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * extent).from_address(address)
    return as_strided(np.ctypeslib.as_array(memory), shape, strides)
