"""Checks of one batch of (blocks, row) before a byte is written.

Everything is vectorised: a check costs a few passes over the ids, not a step per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.errors import CopyError

SKIPPED = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """What ids may be; `num_blocks` None where this worker keeps nothing of a block."""

    num_blocks: int | None
    num_rows: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch: C-contiguous int64 `block_ids [n, blocks_per_chunk]` and `rows [n]`."""

    to_slot: bool
    block_ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    wanted_blocks: int


def check_batch(
    block_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    limits: Limits,
    *,
    to_slot: bool,
    keep: bool,
) -> Batch:
    """Returns the batch, with its own copy of the arrays if `keep`.

    Raises CopyError for a wrong dtype or shape, an id or row out of bounds, a row twice in a
    store, or a block twice in a load.
    """
    for name, array in (("block_ids", block_ids), ("rows", rows)):
        if not isinstance(array, np.ndarray) or array.dtype != np.int64:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise CopyError(f"{name} is {found}, expected a numpy array of int64")
    expected = (rows.size, limits.blocks_per_chunk)
    if rows.ndim != 1 or block_ids.shape != expected:
        raise CopyError(
            f"block_ids has shape {block_ids.shape} and rows {rows.shape}; expected "
            f"(n, {limits.blocks_per_chunk}) and (n,)"
        )
    if rows.size == 0:
        return Batch(to_slot, block_ids, rows, 0)
    _check_bounds("row", rows, 0, limits.num_rows)
    _check_bounds("block id", block_ids, SKIPPED, limits.num_blocks)
    wanted = block_ids.size
    if block_ids.min() == SKIPPED:
        wanted = int(np.count_nonzero(block_ids != SKIPPED))
    if to_slot:
        _check_distinct("row", rows, "stored to")
    else:
        chosen = block_ids if wanted == block_ids.size else block_ids[block_ids != SKIPPED]
        _check_distinct("block id", chosen.reshape(-1), "loaded into")
    if keep:
        return Batch(to_slot, block_ids.copy(order="C"), rows.copy(), wanted)
    return Batch(to_slot, np.ascontiguousarray(block_ids), np.ascontiguousarray(rows), wanted)


def _check_bounds(name: str, values: NDArray[np.int64], low: int, end: int | None) -> None:
    smallest, largest = int(values.min()), int(values.max())
    if smallest < low or (end is not None and largest >= end):
        wrong = smallest if smallest < low else largest
        limit = f"{low} <= {name}" + ("" if end is None else f" < {end}")
        raise CopyError(f"{name} is {wrong}, expected {limit}; nothing was copied")


def _check_distinct(name: str, values: NDArray[np.int64], verb: str) -> None:
    ordered = np.sort(values)
    repeated = ordered[1:] == ordered[:-1]
    if repeated.any():
        twice = int(ordered[int(repeated.argmax())])
        raise CopyError(
            f"{name} {twice} is {verb} more than once in a batch, expected each at most once; "
            "nothing was copied"
        )
