"""Ways to copy KV fragments without a compiler, against a contiguous libc memmove.

    python benchmarks/copy_fallbacks.py [--json FILE] [--chunks 250]

The figures behind the choice of the fallback in docs/adr/0003-copy-kernel.md. Same places, memory
and measure as benchmarks/copy.py, one thread.
"""

from __future__ import annotations

import os
import sys

sys.path.pop(0)  # this directory holds a copy.py, see there
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks._report import Cell, Report, make_parser, publish
from benchmarks.copy import SPARE_PLACES, Memory, compare, make_memmove, make_memory

LAYERS = 64
FRAGMENT_BYTES = 32 * 1024
CHUNK_BYTES = LAYERS * FRAGMENT_BYTES
STAGED_FRAGMENTS = 64  # the best of 4 to 300: staging that stays in the cache


def make_ways(memory: Memory, chunks: int) -> dict[str, Callable[[slice], None]]:
    """Each way gathers (or scatters, where it says so) a part of the chunks."""
    places = chunks + SPARE_PLACES
    random = np.random.default_rng(0)
    blocks, rows = random.permutation(places)[:chunks], random.permutation(places)[:chunks]
    ids, row_list = blocks.tolist(), rows.tolist()
    id_index, row_index = torch.from_numpy(blocks), torch.from_numpy(rows)
    kv_words = memory.kv.view(torch.int64).view(LAYERS, places, -1)
    kv_bytes = memory.kv.view(LAYERS, places, -1).numpy()
    words_per_fragment = FRAGMENT_BYTES // 8
    by_row = torch.from_numpy(memory.slot).view(torch.int64)
    slot_words = by_row.view(places, LAYERS, words_per_fragment).unbind(1)
    slot_bytes = memory.slot.reshape(places, LAYERS, FRAGMENT_BYTES).swapaxes(0, 1)

    def tensor_copy(part: slice) -> None:
        for layer, slot in zip(kv_words, slot_words, strict=True):
            for block, row in zip(ids[part], row_list[part], strict=True):
                slot[row].copy_(layer[block])

    def foreach_copy(part: slice) -> None:
        for layer, slot in zip(kv_words, slot_words, strict=True):
            of_block, of_row = layer.unbind(0), slot.unbind(0)
            torch._foreach_copy_(
                [of_row[r] for r in row_list[part]], [of_block[b] for b in ids[part]]
            )

    def staged(part: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        starts = range(0, chunks, STAGED_FRAGMENTS)
        pieces = [slice(first, first + STAGED_FRAGMENTS) for first in starts]
        return [(id_index[part][piece], row_index[part][piece]) for piece in pieces]

    def index_gather(part: slice) -> None:
        for layer, slot in zip(kv_words, slot_words, strict=True):
            for some_ids, some_rows in staged(part):
                slot.index_copy_(0, some_rows, layer.index_select(0, some_ids))

    def index_scatter(part: slice) -> None:
        for layer, slot in zip(kv_words, slot_words, strict=True):
            for some_ids, some_rows in staged(part):
                layer.index_copy_(0, some_ids, slot.index_select(0, some_rows))

    def numpy_loop(part: slice) -> None:
        for layer, slot in zip(kv_bytes, slot_bytes, strict=True):
            for block, row in zip(ids[part], row_list[part], strict=True):
                slot[row] = layer[block]

    return {
        "loop of Tensor.copy_": tensor_copy,
        "torch._foreach_copy_": foreach_copy,
        "index_select, index_copy_": index_gather,
        "index_select, index_copy_ (scatter)": index_scatter,
        "loop of numpy assignments": numpy_loop,
    }


def main() -> None:
    parser = make_parser("KV copies without a compiler")
    parser.add_argument("--chunks", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = make_memory(options.chunks + SPARE_PLACES, CHUNK_BYTES)
    kv_address = -(-memory.kv.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    rows: list[list[Cell]] = []
    ratios: dict[str, float] = {}
    with ThreadPoolExecutor(1) as pool:
        to_region = make_memmove(memory.region_address, kv_address, 1, pool)
        to_kv = make_memmove(kv_address, memory.region_address, 1, pool)
        for what, way in make_ways(memory, options.chunks).items():
            memmove = to_kv if what.endswith("(scatter)") else to_region
            measured = compare(way, memmove, options.chunks, CHUNK_BYTES, options.rounds, 1)
            rows.append([what, CHUNK_BYTES / measured.copy_s_per_chunk / 1e9, measured.ratio])
            ratios[f"{what}/memcpy"] = measured.ratio
    publish(
        Report(
            title=f"KV copies without a compiler: {options.chunks} chunks of 64 layers x 32 KiB",
            columns=("what", "GB/s", "ratio"),
            rows=rows,
            ratios=ratios,
        ),
        options.json,
    )


if __name__ == "__main__":
    main()
