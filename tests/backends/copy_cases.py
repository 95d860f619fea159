"""Shared memory, KV tensors of every layout, and a model of what a slot must hold.

The model goes block by block over whole tensors and knows nothing of fragments or strides.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_DIM = {"kv_inner": 0, "kv_outer": 1, "mla": 0, "blocks_first": 0}


@dataclass(frozen=True)
class Case:
    layout: str
    layers: int
    num_blocks: int
    blocks_per_chunk: int
    inner: tuple[int, ...] = (4, 2)
    dtype: torch.dtype = torch.bfloat16
    pad: int = 0
    """Elements between one block and the next that belong to neither."""

    @property
    def block_dim(self) -> int:
        return BLOCK_DIM[self.layout]


def shared_region(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Anonymous shared memory, filled with bytes that must not leak into a store."""
    memory = mmap.mmap(-1, rows * row_bytes)
    region = np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)
    region[:] = 0xEE
    return region


def make_tensors(case: Case, seed: int) -> list[torch.Tensor]:
    """KV tensors with random bytes; padded ones are views of larger tensors."""
    shape = {
        "kv_inner": (case.num_blocks, 2, *case.inner),
        "kv_outer": (2, case.num_blocks, *case.inner),
        "mla": (case.num_blocks, *case.inner),
        "blocks_first": (case.num_blocks, case.layers, *case.inner),
    }[case.layout]
    count = 1 if case.layout == "blocks_first" else case.layers
    return [_random_tensor(case, shape, seed + index) for index in range(count)]


def _random_tensor(case: Case, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    before, after = shape[: case.block_dim + 1], shape[case.block_dim + 1 :]
    fragment = int(np.prod(after))
    itemsize = torch.empty(0, dtype=case.dtype).element_size()
    raw = rng.integers(0, 256, (*before, (fragment + case.pad) * itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(case.dtype)[..., :fragment].unflatten(-1, after)


def tensor_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The elements' bytes in logical order, as a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def block_bytes(case: Case, tensors: list[torch.Tensor], block: int) -> NDArray[np.uint8]:
    """What one block looks like in a slot: layer after layer, in each K before V."""
    return np.concatenate([tensor_bytes(t.select(case.block_dim, block)) for t in tensors])


def chunk_bytes(
    case: Case, tensors: list[torch.Tensor], ids: NDArray[np.int64], slot_bytes: int
) -> NDArray[np.uint8]:
    """What a store of one chunk must leave in its slot, zeroes included."""
    expected = np.zeros(slot_bytes, np.uint8)
    for place, block in enumerate(ids.tolist()):
        if block >= 0:
            content = block_bytes(case, tensors, block)
            expected[place * content.size : (place + 1) * content.size] = content
    return expected


def ids_of(*chunks: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(chunks, dtype=np.int64)
