"""Rows full of blocks for benchmarks of tiers, and steps done in alternating order."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from backends.block import COMPLETE, HEADER_BYTES, BlockKey, write_header
from backends.testing import RowBuffer
from backends.tier.pool import threads_of


def put_header(rows: RowBuffer, row: int, key: BlockKey) -> None:
    """The header of a block that an engine has just copied into its row."""
    write_header(
        rows.row_view(row),
        key,
        fingerprint=rows.fingerprint,
        slot_lengths=[rows.row_bytes - HEADER_BYTES],
        created_ns=time.time_ns(),
        state=COMPLETE,
    )


def stores_of_object_tier(threads: int) -> int:
    """The `concurrency` with which an object tier has so many threads, all of which load; it has no
    fewer than two."""
    return next(n for n in range(threads, 0, -1) if n == 1 or threads_of(n) <= threads)


def payload(row: int, rows: RowBuffer) -> np.ndarray:
    """What row number `row` holds behind its header, uint8."""
    return np.random.default_rng(row).integers(0, 256, rows.row_bytes - HEADER_BYTES, np.uint8)


def make_rows(size: int, count: int) -> RowBuffer:
    """`count` rows with payloads of `size` bytes."""
    rows = RowBuffer(count, HEADER_BYTES + size)
    for row in range(count):
        rows.row_view(row)[HEADER_BYTES:] = payload(row, rows)
    return rows


def in_turn(number: int, *steps: Callable[[], None]) -> None:
    """Do these, every other time in the opposite order."""
    for step in steps if number % 2 else reversed(steps):
        step()
