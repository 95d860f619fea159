"""Speed of KV copies against a contiguous libc memmove of the same bytes.

    python benchmarks/copy.py [--json FILE] [--kernel NAME] [--threads 1 2]

gather: blocks at random places of layers-first tensors to random rows of a shared-memory region;
scatter: the way back; contiguous: neighbouring blocks of a blocks-first tensor to neighbouring
rows and back. The memmove runs over the same memory (private tensors, shared region, both touched
before), in the same direction, with as many threads and without the GIL, between page-aligned
addresses (elsewhere glibc's can take three times as long). A round moves every chunk in some calls,
each timed right beside a memmove of as many bytes, in alternating order; a ratio is the median over
all those pairs, so that a machine whose speed drifts does not decide it. Metadata is a call that
moves 8-byte fragments.
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
# More calls are more samples, but glibc streams only large copies (here from 192 MiB a thread), and
# a smaller memmove would make a baseline that is easy to beat.
CALLS_PER_ROUND = 2
METADATA_BATCHES = (1, 10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory and region, every page touched."""

    kv: torch.Tensor
    slot: NDArray[np.uint8]
    region_address: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over all pairs of calls."""

    ratio: float
    copy_s_per_chunk: float
    memmove_s_per_chunk: float


@dataclass(frozen=True, slots=True)
class Task:
    """What is copied: `stores` into the region, or back from it."""

    what: str
    stores: bool
    tensors: list[torch.Tensor]
    block_ids: NDArray[np.int64]
    rows: NDArray[np.int64]


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
    destination: int, source: int, threads: int, pool: ThreadPoolExecutor
) -> Callable[[int, int], None]:
    """A function of (offset, nbytes) that moves this part of the memory."""
    memmove = ctypes.CDLL(None).memmove  # unlike ctypes.pythonapi, CDLL releases the GIL
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove.restype = ctypes.c_void_p

    def run(offset: int, nbytes: int) -> None:
        edges = [offset + nbytes * t // threads // 64 * 64 for t in range(threads)]
        edges.append(offset + nbytes)

        def part(t: int) -> None:
            memmove(destination + edges[t], source + edges[t], edges[t + 1] - edges[t])

        others = [pool.submit(part, t) for t in range(1, threads)]
        part(0)
        for other in others:
            other.result()

    return run


def timed(call: Callable[..., object], *arguments: object) -> float:
    start_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start_s


def compare(
    copy: Callable[[slice], object],
    memmove: Callable[[int, int], None],
    chunks: int,
    chunk_bytes: int,
    rounds: int,
    calls_per_round: int = CALLS_PER_ROUND,
) -> Measured:
    """Times `copy(part of the chunks)` beside a memmove of as many bytes."""
    per_call = chunks // calls_per_round
    copies_s: list[float] = []
    memmoves_s: list[float] = []
    for round_index in range(rounds + 1):
        for first in range(0, chunks - per_call + 1, per_call):
            part = slice(first, first + per_call)
            memmove_first = len(copies_s) % 2 == 0
            if memmove_first:
                memmove_s = timed(memmove, first * chunk_bytes, per_call * chunk_bytes)
            copy_s = timed(copy, part)
            if not memmove_first:
                memmove_s = timed(memmove, first * chunk_bytes, per_call * chunk_bytes)
            if round_index:  # the first round only warms up
                copies_s.append(copy_s)
                memmoves_s.append(memmove_s)
    ratios = [m / c for m, c in zip(memmoves_s, copies_s, strict=True)]
    return Measured(
        statistics.median(ratios),
        statistics.median(copies_s) / per_call,
        statistics.median(memmoves_s) / per_call,
    )


def metadata_us_per_chunk(layers: int, batch: int, kernel: str) -> float:
    """Median time of one store of `batch` chunks with 8-byte fragments, over the chunks."""
    tensors = list(torch.zeros(layers, batch, 1, dtype=torch.int64))
    slot = np.zeros((batch, layers * 8), np.uint8)
    ids = np.random.default_rng(0).permutation(batch).reshape(batch, 1)
    rows = np.random.default_rng(1).permutation(batch)
    with GroupCopier(tensors, block_dim=0, slot=slot, blocks_per_chunk=1, kernel=kernel) as copier:
        calls = max(5, 1000 // batch)
        times_s = [timed(copier.store, ids, rows) for _ in range(calls)]
    return statistics.median(times_s) / batch * 1e6


def make_tasks(memory: Memory, chunks: int, layers: int) -> list[Task]:
    places = chunks + SPARE_PLACES
    layers_first = list(memory.kv.view(layers, places, -1))
    blocks_first = [memory.kv.view(places, -1)]
    random = np.random.default_rng(0)
    blocks, rows = random.permutation(places)[:chunks], random.permutation(places)[:chunks]
    anywhere = (blocks.reshape(-1, 1), rows)
    in_order = (np.arange(chunks).reshape(-1, 1), np.arange(chunks))
    return [
        Task("gather", True, layers_first, *anywhere),
        Task("scatter", False, layers_first, *anywhere),
        Task("contiguous store", True, blocks_first, *in_order),
        Task("contiguous load", False, blocks_first, *in_order),
    ]


def measure(
    task: Task, memory: Memory, threads: int, pool: ThreadPoolExecutor, kernel: str, rounds: int
) -> tuple[Measured, str]:
    """Returns the figures and the name of the kernel that was used."""
    kv_address = -(-memory.kv.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    source, destination = kv_address, memory.region_address
    if not task.stores:
        source, destination = destination, source
    chunks, chunk_bytes = task.rows.size, memory.slot.shape[1]
    copier = GroupCopier(
        task.tensors,
        block_dim=0,
        slot=memory.slot,
        blocks_per_chunk=1,
        threads=threads,
        kernel=kernel,
    )
    verb = copier.store if task.stores else copier.load
    measured = compare(
        lambda part: verb(task.block_ids[part], task.rows[part]),
        make_memmove(destination, source, threads, pool),
        chunks,
        chunk_bytes,
        rounds,
    )
    # The memmove has written over the copies, or over their source: copy once more, then look.
    verb(task.block_ids, task.rows)
    for chunk in range(0, chunks, max(1, chunks // 16)):
        block = np.concatenate([t[task.block_ids[chunk, 0]].numpy() for t in task.tensors])
        if not np.array_equal(block, memory.slot[task.rows[chunk]]):
            raise SystemExit(f"{task.what}: chunk {chunk} came out wrong")
    copier.close()
    return measured, copier.kernel


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

    chunk_bytes = options.layers * options.fragment_kib * 1024
    memory = make_memory(options.chunks + SPARE_PLACES, chunk_bytes)
    tasks = make_tasks(memory, options.chunks, options.layers)
    rows: list[list[Cell]] = []
    ratios: dict[str, float] = {}
    worst = dict.fromkeys((task.what.partition(" ")[0] for task in tasks), float("inf"))
    used_kernel = ""
    with ThreadPoolExecutor(max(options.threads)) as pool:
        for threads in options.threads:
            for task in tasks:
                measured, used_kernel = measure(
                    task, memory, threads, pool, options.kernel, options.rounds
                )
                copy_s, memmove_s = measured.copy_s_per_chunk, measured.memmove_s_per_chunk
                gb_per_chunk = chunk_bytes / 1e9
                speeds = (gb_per_chunk / copy_s, gb_per_chunk / memmove_s)
                rows.append([task.what, threads, *speeds, measured.ratio, copy_s * 1e6])
                ratios[f"{task.what}/memcpy, {threads} thread(s)"] = measured.ratio
                name = task.what.partition(" ")[0]
                worst[name] = min(worst[name], measured.ratio)
    for batch in METADATA_BATCHES:
        us = metadata_us_per_chunk(options.layers, batch, options.kernel)
        rows.append([f"metadata, batch of {batch}", 1, None, None, None, us])
    ratios |= {f"{name}/memcpy": ratio for name, ratio in worst.items()}
    publish(
        Report(
            title=(
                f"KV copies: kernel {used_kernel}, {options.chunks} chunks of {options.layers} "
                f"layers x {options.fragment_kib} KiB, median of {options.rounds} rounds"
            ),
            columns=("what", "threads", "GB/s", "memmove GB/s", "ratio", "us/chunk"),
            rows=rows,
            ratios=ratios,
            notes=("Ratios without a thread count are the worst over threads and directions.",),
        ),
        options.json,
    )


if __name__ == "__main__":
    main()
