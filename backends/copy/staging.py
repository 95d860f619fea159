"""A dense buffer on the tensors' device in which chunks take the shape they have in a slot.

A chunk in the buffer is one run of bytes, so it crosses to or from a slot in one copy, and the
gather or scatter of its fragments happens at the device's own memory speed. The operations are
plain torch ones and run on whatever stream is current.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from backends.copy.batch import SKIPPED
from backends.copy.fragments import BlockMap

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class StagingBuffer:
    """Room for `capacity_chunks` chunks: `chunks` is a byte view `[capacity, bytes of a chunk]`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        blocks: BlockMap,
        blocks_per_chunk: int,
        capacity_chunks: int,
    ) -> None:
        self._device = blocks.device
        word_bytes = _common_word_bytes(tensors, blocks)
        word = _WORDS[word_bytes]
        words = torch.empty(
            (capacity_chunks * blocks_per_chunk, blocks.block_bytes // word_bytes),
            dtype=word,
            device=blocks.device,
        )
        self._words = words
        self.chunks = words.view(torch.uint8).view(capacity_chunks, -1)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for fragment in blocks.fragments:
            tensor = tensors[fragment.tensor_index]
            storage = tensor.untyped_storage()
            offset_bytes = (
                tensor.storage_offset() * tensor.element_size() + fragment.tensor_offset_bytes
            )
            width = fragment.nbytes // word_bytes
            in_tensor = torch.empty(0, dtype=word, device=blocks.device).set_(
                storage,
                offset_bytes // word_bytes,
                (blocks.num_blocks, width),
                (fragment.block_stride_bytes // word_bytes, 1),
            )
            first = fragment.slot_offset_bytes // word_bytes
            self._pairs.append((in_tensor, words[:, first : first + width]))

    def gather(self, block_ids: NDArray[np.int64]) -> None:
        """Tensors to buffer, for `block_ids [n, blocks_per_chunk]`; skipped blocks become zero."""
        ids, places = self._indices(block_ids)
        if ids.numel() < block_ids.size:
            self._words[: block_ids.size].zero_()
        for in_tensor, in_buffer in self._pairs:
            in_buffer.index_copy_(0, places, in_tensor.index_select(0, ids))

    def scatter(self, block_ids: NDArray[np.int64]) -> None:
        """Buffer to tensors, for `block_ids [n, blocks_per_chunk]`, skipped blocks left alone."""
        ids, places = self._indices(block_ids)
        for in_tensor, in_buffer in self._pairs:
            in_tensor.index_copy_(0, ids, in_buffer.index_select(0, places))

    def _indices(self, block_ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        flat = block_ids.reshape(-1)
        places = np.flatnonzero(flat != SKIPPED)
        both = torch.from_numpy(np.stack((flat[places], places)))
        if self._device.type == "cuda":
            # From pageable memory the transfer would wait for the stream, and the caller with it.
            both = both.pin_memory().to(self._device, non_blocking=True)
        return both[0], both[1]


def _common_word_bytes(tensors: Sequence[torch.Tensor], blocks: BlockMap) -> int:
    """The widest word that every fragment starts, ends and strides on: fewer elements to index."""
    common = 8
    for f in blocks.fragments:
        storage_address = tensors[f.tensor_index].untyped_storage().data_ptr()
        offset_bytes = f.address - storage_address
        stride_bytes = f.block_stride_bytes if blocks.num_blocks > 1 else 0
        common = math.gcd(
            common, storage_address, offset_bytes, stride_bytes, f.nbytes, f.slot_offset_bytes
        )
    return common
