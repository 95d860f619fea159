"""Map a worker's own slots into its page table before the first copy needs them.

The pages are there (reserve), but each process pays a fault, and the first to touch a page also
pays for zeroing it. Every worker does its own slots, all at once, so that the work is spread over
the processes that need it. Neighbours share the page in which one slot ends and the next begins;
both map it, and neither writes a byte of the other.

Small slots lie so close that skipping the others costs more than mapping them: there a worker
first populates its share of the whole region, which zeroes it, and then maps the rest, which the
others are zeroing meanwhile, by read faults: those map sixteen ready pages at a time, for writing
too, because shared memory needs no notice of a first write.
"""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.region import memory
from backends.region.spec import HEADER_BYTES, RegionSpec

# Offset, bytes, advice.
_Work = tuple[int, int, int]
METHODS = ("populate", "touch")
# One call of the kernel works for at most this long a range, so that signals are seen between.
_STEP_BYTES = 64 << 20
# Below this, one call per slot costs more than the neighbours' pages (docs/adr/0002-region.md).
SPAN_BELOW_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class PrefaultReport:
    """`bytes` are those of the worker's own slots, `ranges` the pieces of memory that were mapped.

    `got` is populate (MADV_POPULATE_WRITE) or touch (a write to each page, on kernels before 5.14),
    `span` whether the whole region was mapped because the slots are small.
    `huge_bytes` is what this process has mapped by huge pages afterwards.
    """

    asked: str
    got: str
    local_rank: int
    bytes: int
    ranges: int
    seconds: float
    span: bool = False
    huge_bytes: int = 0


def page_ranges(
    spec: RegionSpec, local_rank: int, page_bytes: int = mmap.PAGESIZE
) -> Iterator[tuple[int, int]]:
    """Whole pages (offset, bytes) that hold a worker's slots, ascending and apart.

    Local rank 0 leads: it writes the row headers, so they and page 0 are in its share.
    """
    # Runs once per row of a region that may have a million, so nothing is computed twice.
    row_bytes = spec.row_bytes
    past_slot = spec.slot_offset_in_row(local_rank) + spec.slot_bytes
    first = HEADER_BYTES + (0 if local_rank == 0 else past_slot - spec.slot_bytes)
    last = HEADER_BYTES + past_slot
    end = first // page_bytes * page_bytes
    start = 0 if local_rank == 0 else end
    for base in range(0, spec.rows * row_bytes, row_bytes):
        low = (base + first) // page_bytes * page_bytes
        if low > end:
            yield start, end - start
            start = low
        end = -(-(base + last) // page_bytes) * page_bytes
    yield start, end - start


def prefault_slots(
    flat: npt.NDArray[np.uint8],
    spec: RegionSpec,
    local_rank: int,
    *,
    method: str = "populate",
    threads: int = 1,
) -> PrefaultReport:
    """Map all pages of one worker's slots for writing. `flat` is the whole region, uint8 [bytes].

    The GIL is free meanwhile. Contents stay as they are. Raises OSError.
    """
    began = time.perf_counter()
    got, span, ranges = method, False, 0
    if method == "populate":
        span = spec.local_world_size > 1 and spec.slot_bytes < SPAN_BELOW_BYTES
        work = _span_work(spec, local_rank) if span else _slot_work(spec, local_rank)
        try:
            ranges = _advise(flat.ctypes.data, work, threads)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            got, span = "touch", False
    if got == "touch":
        ranges = _touch(flat, spec, local_rank)
    return PrefaultReport(
        asked=method,
        got=got,
        local_rank=local_rank,
        bytes=spec.rows * spec.slot_bytes,
        ranges=ranges,
        seconds=time.perf_counter() - began,
        span=span,
    )


def _advise(address: int, work: Iterator[_Work], threads: int) -> int:
    def advise(piece: _Work) -> None:
        memory.madvise(address + piece[0], piece[1], piece[2])

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            return sum(1 for _ in pool.map(advise, work))
    count = 0
    for piece in work:
        advise(piece)
        count += 1
    return count


def _slot_work(spec: RegionSpec, local_rank: int) -> Iterator[_Work]:
    for offset, nbytes in page_ranges(spec, local_rank):
        yield from _steps(offset, offset + nbytes, memory.MADV_POPULATE_WRITE)


def _span_work(spec: RegionSpec, local_rank: int) -> Iterator[_Work]:
    pages = -(-spec.nbytes // mmap.PAGESIZE)
    first, last = (
        pages * rank // spec.local_world_size * mmap.PAGESIZE
        for rank in (local_rank, local_rank + 1)
    )
    yield from _steps(first, last, memory.MADV_POPULATE_WRITE)
    yield from _steps(last, pages * mmap.PAGESIZE, memory.MADV_POPULATE_READ)
    yield from _steps(0, first, memory.MADV_POPULATE_READ)


def _steps(start: int, end: int, advice: int) -> Iterator[_Work]:
    for offset in range(start, end, _STEP_BYTES):
        yield offset, min(_STEP_BYTES, end - offset), advice


def _touch(flat: npt.NDArray[np.uint8], spec: RegionSpec, local_rank: int) -> int:
    """Write back one byte per page, of the worker's own bytes only: nobody else writes those."""
    offset = spec.slot_offset_in_row(local_rank)
    for row in range(spec.rows):
        start = spec.row_offset(row) + offset
        own = flat[start : start + spec.slot_bytes]
        own[-start % mmap.PAGESIZE :: mmap.PAGESIZE] |= 0
        own[0] |= 0
    return spec.rows
