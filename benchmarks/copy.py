"""Speed of KV copies against a contiguous libc memmove of the same bytes.

    python benchmarks/copy.py [--json FILE] [--kernel NAME] [--threads 1 2]

gather: blocks at random places of layers-first tensors to random rows of a shared-memory region;
scatter: the way back; contiguous: neighbouring blocks of a blocks-first tensor to neighbouring
rows and back. The memmove runs over the same memory (private tensors, shared region, both touched
before), in the same direction, with as many threads and without the GIL, between page-aligned
addresses (elsewhere glibc's can take three times as long). Each copy is timed right beside its
memmove, in alternating order, and a ratio is the median over the rounds, so that a machine whose
speed drifts does not decide it. Metadata is a call that moves 8-byte fragments.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path, and there this file would be taken for the
# standard library's `copy`; the root of the repository must be there instead.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from backends.copy import GroupCopier
from benchmarks._report import Cell, Report, make_parser, publish

ROW_HEADER_BYTES = 4096
SPARE_PLACES = 50
METADATA_BATCHES = (1, 10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory and region, every page touched."""

    kv: torch.Tensor
    slot: NDArray[np.uint8]
    region_address: int


@dataclass(frozen=True, slots=True)
class Measured:
    ratio: float
    copy_s: float
    memmove_s: float


def make_memory(places: int, chunk_bytes: int) -> Memory:
    kv = torch.arange(places * chunk_bytes // 8, dtype=torch.int64).view(torch.uint8)
    row_bytes = ROW_HEADER_BYTES + chunk_bytes
    descriptor = os.memfd_create("kvquay-benchmark")
    os.ftruncate(descriptor, places * row_bytes)
    region = np.frombuffer(mmap.mmap(descriptor, places * row_bytes), np.uint8)
    os.close(descriptor)
    region.fill(0)
    slot = region.reshape(places, row_bytes)[:, ROW_HEADER_BYTES:]
    return Memory(kv, slot, region.ctypes.data)


def make_memmove(
    destination: int, source: int, nbytes: int, threads: int, pool: ThreadPoolExecutor
) -> Callable[[], None]:
    memmove = ctypes.CDLL(None).memmove  # unlike ctypes.pythonapi, CDLL releases the GIL
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove.restype = ctypes.c_void_p
    edges = [nbytes * t // threads // 64 * 64 for t in range(threads)] + [nbytes]

    def part(t: int) -> None:
        memmove(destination + edges[t], source + edges[t], edges[t + 1] - edges[t])

    def run() -> None:
        others = [pool.submit(part, t) for t in range(1, threads)]
        part(0)
        for other in others:
            other.result()

    return run


def timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def compare(copy: Callable[[], object], memmove: Callable[[], object], rounds: int) -> Measured:
    timed(copy), timed(memmove)
    copies_s, memmoves_s = [], []
    for round_index in range(rounds):
        if round_index % 2:
            copies_s.append(timed(copy))
            memmoves_s.append(timed(memmove))
        else:
            memmoves_s.append(timed(memmove))
            copies_s.append(timed(copy))
    ratios = [m / c for m, c in zip(memmoves_s, copies_s, strict=True)]
    return Measured(
        statistics.median(ratios), statistics.median(copies_s), statistics.median(memmoves_s)
    )


def metadata_us_per_chunk(layers: int, batch: int, kernel: str) -> float:
    """Median time of one store of `batch` chunks with 8-byte fragments, over the chunks."""
    tensors = list(torch.zeros(layers, batch, 1, dtype=torch.int64))
    slot = np.zeros((batch, layers * 8), np.uint8)
    ids = np.random.default_rng(0).permutation(batch).reshape(batch, 1)
    rows = np.random.default_rng(1).permutation(batch)
    with GroupCopier(tensors, block_dim=0, slot=slot, blocks_per_chunk=1, kernel=kernel) as copier:
        calls = max(5, 1000 // batch)
        times_s = [timed(lambda: copier.store(ids, rows)) for _ in range(calls)]
    return statistics.median(times_s) / batch * 1e6


def main() -> None:
    parser = make_parser("KV copies against a contiguous memmove of the same bytes")
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--fragment-kib", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--kernel", default="auto", help="auto, c-avx512, c-avx2, c-portable, numpy"
    )
    options = parser.parse_args()

    chunks, layers = options.chunks, options.layers
    fragment_bytes = options.fragment_kib * 1024
    chunk_bytes = layers * fragment_bytes
    places = chunks + SPARE_PLACES
    memory = make_memory(places, chunk_bytes)
    layers_first = list(memory.kv.view(layers, places, fragment_bytes))
    blocks_first = [memory.kv.view(places, chunk_bytes)]
    random = np.random.default_rng(0)
    at_random = (
        random.permutation(places)[:chunks].reshape(-1, 1),
        random.permutation(places)[:chunks],
    )
    in_order = (np.arange(chunks).reshape(-1, 1), np.arange(chunks))

    rows: list[list[Cell]] = []
    ratios: dict[str, float] = {}
    worst = dict.fromkeys(("gather", "scatter", "contiguous"), float("inf"))
    pool = ThreadPoolExecutor(max(options.threads))
    kernel = ""
    for threads in options.threads:
        kv_address = -(-memory.kv.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        total_bytes = chunks * chunk_bytes
        to_region = make_memmove(memory.region_address, kv_address, total_bytes, threads, pool)
        to_kv = make_memmove(kv_address, memory.region_address, total_bytes, threads, pool)
        for what, tensors, (ids, region_rows) in (
            ("gather", layers_first, at_random),
            ("scatter", layers_first, at_random),
            ("contiguous store", blocks_first, in_order),
            ("contiguous load", blocks_first, in_order),
        ):
            copier = GroupCopier(
                tensors,
                block_dim=0,
                slot=memory.slot,
                blocks_per_chunk=1,
                threads=threads,
                kernel=options.kernel,
            )
            kernel = copier.kernel
            stores = what in ("gather", "contiguous store")
            verb = copier.store if stores else copier.load
            measured = compare(
                lambda: verb(ids, region_rows),  # noqa: B023 - called within this turn of the loop
                to_region if stores else to_kv,
                options.rounds,
            )
            # The memmove has written over the copy, or the copy over its source: copy once more.
            verb(ids, region_rows)
            for place in random.integers(0, chunks, 8).tolist():
                block = np.concatenate([t[ids[place, 0]].numpy() for t in tensors])
                if not np.array_equal(block, memory.slot[region_rows[place]]):
                    raise SystemExit(f"{what}: chunk {place} came out wrong")
            copier.close()
            rows.append(
                [
                    what,
                    threads,
                    total_bytes / measured.copy_s / 1e9,
                    total_bytes / measured.memmove_s / 1e9,
                    measured.ratio,
                    measured.copy_s / chunks * 1e6,
                ]
            )
            ratios[f"{what}/memcpy, {threads} thread(s)"] = measured.ratio
            name = what.partition(" ")[0]
            worst[name] = min(worst[name], measured.ratio)
    pool.shutdown()
    for batch in METADATA_BATCHES:
        us = metadata_us_per_chunk(layers, batch, options.kernel)
        rows.append([f"metadata, batch of {batch}", 1, None, None, None, us])

    ratios |= {f"{name}/memcpy": ratio for name, ratio in worst.items()}
    publish(
        Report(
            title=(
                f"KV copies: kernel {kernel}, {chunks} chunks of {layers} layers x "
                f"{options.fragment_kib} KiB, median of {options.rounds} rounds"
            ),
            columns=("what", "threads", "GB/s", "memmove GB/s", "ratio", "us/chunk"),
            rows=rows,
            ratios=ratios,
            notes=(
                "A ratio without a thread count is the worst over thread counts and directions.",
            ),
        ),
        options.json,
    )


if __name__ == "__main__":
    main()
