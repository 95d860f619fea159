"""Paged KV tensors seen as fragments: where each contiguous piece of a block lies, in order.

A block's fragments stand in the slot in (layer, plane) order without gaps. For tensors `[2,
num_blocks, ...]` (K and V planes) a layer has two of them, for `[num_blocks, 2, ...]` one, and one
tensor `[num_blocks, layers, ...]` with every layer side by side is one fragment altogether.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from backends.errors import CopyError


@dataclass(frozen=True, slots=True)
class Fragment:
    """One contiguous piece that every block has: block b's lies at `address + b * block_stride`.

    `slot_offset_bytes` is its place within the block's bytes in the slot; `tensor_index` and
    `tensor_offset_bytes` say which tensor `address` points into and how far.
    """

    address: int
    block_stride_bytes: int
    nbytes: int
    slot_offset_bytes: int
    tensor_index: int
    tensor_offset_bytes: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """All fragments of one KV group on one worker; `block_bytes` is their sum."""

    fragments: tuple[Fragment, ...]
    num_blocks: int
    block_bytes: int
    device: torch.device


def map_blocks(tensors: Sequence[torch.Tensor], block_dim: int) -> BlockMap:
    """Describes `tensors`, one a layer or one for all layers, of any dtype, all on one device.

    Dimension `block_dim` counts blocks. Dimensions after it must be contiguous: together they are
    one fragment. Dimensions before it (planes, layers) each give a further fragment, in order.
    Strides of the outer dimensions are free, so padded and sliced tensors are welcome. No tensor
    at all is a pipeline stage without a layer of the group: no fragments, no blocks.
    Raises CopyError for tensors that differ in blocks or device, whose fragments are not
    contiguous, or that overlap.
    """
    if not tensors:
        return BlockMap((), 0, 0, torch.device("cpu"))
    device, num_blocks = tensors[0].device, -1
    fragments: list[Fragment] = []
    block_bytes = 0
    for index, tensor in enumerate(tensors):
        _check_tensor(tensor, index, block_dim, device)
        if num_blocks not in (-1, tensor.shape[block_dim]):
            raise CopyError(
                f"tensor {index} has {tensor.shape[block_dim]} blocks, the ones before it "
                f"{num_blocks}; tensors of one group must have the same number of blocks"
            )
        num_blocks = tensor.shape[block_dim]
        nbytes = math.prod(tensor.shape[block_dim + 1 :]) * tensor.element_size()
        for offset_bytes in _outer_offsets(tensor, block_dim):
            fragments.append(
                Fragment(
                    address=tensor.data_ptr() + offset_bytes,
                    block_stride_bytes=tensor.stride(block_dim) * tensor.element_size(),
                    nbytes=nbytes,
                    slot_offset_bytes=block_bytes,
                    tensor_index=index,
                    tensor_offset_bytes=offset_bytes,
                )
            )
            block_bytes += nbytes
    _check_no_overlap(fragments, num_blocks)
    return BlockMap(tuple(fragments), num_blocks, block_bytes, device)


def _outer_offsets(tensor: torch.Tensor, block_dim: int) -> Iterator[int]:
    for place in itertools.product(*(range(size) for size in tensor.shape[:block_dim])):
        strides = tensor.stride()[:block_dim]
        yield sum(i * s for i, s in zip(place, strides, strict=True)) * tensor.element_size()


def _check_tensor(tensor: torch.Tensor, index: int, block_dim: int, device: torch.device) -> None:
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise CopyError(
            f"tensor {index} is {tensor.layout} on {tensor.device}; expected a strided tensor on "
            "cpu or cuda"
        )
    if tensor.device != device:
        raise CopyError(
            f"tensor {index} is on {tensor.device}, the first one on {device}; make one copier "
            "for each device"
        )
    if not 0 <= block_dim < tensor.dim() or tensor.numel() == 0:
        raise CopyError(
            f"tensor {index} has shape {tuple(tensor.shape)}; expected at least one block in "
            f"dimension {block_dim} and no empty dimension"
        )
    expected = 1
    for dim in range(tensor.dim() - 1, block_dim, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise CopyError(
                f"tensor {index} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: "
                f"after the block dimension {block_dim} it is not contiguous; permute it into its "
                "memory order, or pass its contiguous parts as separate tensors"
            )
        expected *= tensor.shape[dim]


def _check_no_overlap(fragments: Sequence[Fragment], num_blocks: int) -> None:
    """Refuses two (fragment, block) that share a byte: a load would leave either's bytes there.

    Fragments whose extents meet must interleave: same stride, each in its own part of a period.
    """
    ordered = sorted(fragments, key=lambda fragment: fragment.address)
    cluster: list[Fragment] = []
    end = 0
    for fragment in ordered:
        if cluster and fragment.address >= end:
            _check_interleaving(cluster, num_blocks)
            cluster = []
        cluster.append(fragment)
        extent = (num_blocks - 1) * fragment.block_stride_bytes + fragment.nbytes
        end = max(end, fragment.address + extent)
    _check_interleaving(cluster, num_blocks)


def _check_interleaving(cluster: Sequence[Fragment], num_blocks: int) -> None:
    origin = cluster[0].address
    if num_blocks == 1:
        apart = len(cluster) == 1
    else:
        period = cluster[0].block_stride_bytes
        # max() only keeps an expanded tensor (stride 0) from dividing by zero; it is refused below.
        spans = sorted(((f.address - origin) % max(period, 1), f.nbytes) for f in cluster)
        next_starts = [start for start, _ in spans[1:]] + [period]
        apart = all(f.block_stride_bytes == period for f in cluster) and all(
            start + nbytes <= next_start
            for (start, nbytes), next_start in zip(spans, next_starts, strict=True)
        )
    if not apart:
        raise CopyError(
            f"{len(cluster)} fragments near address {origin:#x} overlap each other or their own "
            "next block; pass each tensor once, without expanded or overlapping dimensions"
        )
