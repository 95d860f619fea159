"""A worker's slot of every row of a region, as addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.errors import CopyError


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Row r's slot lies at `address + r * row_stride_bytes` and is `slot_bytes` long."""

    address: int
    num_rows: int
    row_stride_bytes: int
    slot_bytes: int


def map_slot(slot: NDArray[np.uint8], used_bytes: int, *, loads_only: bool = False) -> SlotMap:
    """Describes a slot view: uint8 `[rows, slot_bytes]`, contiguous within a row, writable unless
    it is for `loads_only`.

    Raises CopyError for another kind of array, or if `used_bytes`, the bytes of a whole chunk, do
    not fit a slot.
    """
    may_be_used = slot.flags.writeable or loads_only
    if slot.dtype != np.uint8 or slot.ndim != 2 or not may_be_used:
        raise CopyError(
            f"slot is a {'' if slot.flags.writeable else 'read-only '}{slot.dtype} array of shape "
            f"{slot.shape}, expected a writable uint8 array [rows, slot_bytes]"
        )
    num_rows, slot_bytes = slot.shape
    row_stride_bytes, byte_stride = slot.strides
    if byte_stride != 1 or (num_rows > 1 and row_stride_bytes < slot_bytes):
        raise CopyError(
            f"slot has strides {slot.strides}, expected (at least {slot_bytes}, 1): contiguous "
            "within a row, rows that do not overlap"
        )
    if used_bytes > slot_bytes:
        raise CopyError(
            f"a chunk takes {used_bytes} bytes of a slot of {slot_bytes}; make the slot as large "
            "as the largest worker's chunk"
        )
    return SlotMap(slot.ctypes.data, num_rows, row_stride_bytes, slot_bytes)
