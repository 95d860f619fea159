"""How the engine pages a model: one block id for all KV-cache groups at once.

A device block is as long as the longest block of any group; a group with shorter ones has several
in it, side by side in its own tensors. Groups that keep a sliding window hold their content in some
of the device blocks only: see `device_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.config import CacheConfig, KvGroup
from backends.layout import Column, ShardSizes, blocks_per_unit, columns, unit_tokens

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """A group that keeps a sliding window. `blocks`: how many of a hit's last device blocks it
    needs; `chunks`: how many of its own chunks, `parts` of which are in a chunk of the engine."""

    blocks: int
    chunks: int
    parts: int
    columns: tuple[int, ...]

    def loaded_from(self, chunks: int, blocks_per_chunk: int) -> int:
        """The first device block that is whole once a hit of `chunks` chunks is loaded."""
        first = max(0, chunks * self.parts - self.chunks)
        return -(-first * blocks_per_chunk // self.parts)


@dataclass(frozen=True, slots=True)
class Paging:
    """`block_tokens` are those of the sequence in a device block, `pieces` the numbers of blocks
    that groups have in one, each once."""

    block_tokens: int
    hashes_per_block: int
    blocks_per_chunk: int
    pieces: tuple[int, ...]
    columns: tuple[Column, ...]
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, groups: Sequence[KvGroup], cache: CacheConfig, sizes: ShardSizes) -> Paging:
        context = sizes.pcp_size * sizes.dcp_size
        block_tokens = unit_tokens(groups, cache) * context
        every, windows = columns(groups, cache, sizes), []
        for index, group in enumerate(groups):
            if group.sliding_window is not None:
                own = [(n, column) for n, column in enumerate(every) if column.group == index]
                windows.append(
                    Window(
                        blocks=-(-(group.sliding_window - 1) // block_tokens),
                        # The parts' reaches, each rounded down, add up to the chunks of the window.
                        chunks=sum(column.reach or 0 for _, column in own),
                        parts=len(own),
                        columns=tuple(n for n, _ in own),
                    )
                )
        return cls(
            block_tokens=block_tokens,
            hashes_per_block=block_tokens // cache.tokens_per_hash,
            blocks_per_chunk=cache.blocks_per_chunk,
            pieces=tuple(sorted(set(blocks_per_unit(groups, cache)))),
            columns=every,
            windows=tuple(windows),
        )

    @property
    def words_per_block(self) -> int:
        """Hashes that the content of one device block follows from."""
        return sum(self.pieces)

    def words(self, hashes: Sequence[bytes], blocks: int) -> Int64Array:
        """The first 64 bits of the hashes at the end of every group's blocks, int64
        [blocks, words_per_block], the numbers of `pieces` side by side."""
        per = self.hashes_per_block
        known = hashes[: blocks * per] if len(self.pieces) > 1 else hashes[per - 1 :: per][:blocks]
        if not known:
            return np.zeros((0, self.words_per_block), dtype=np.int64)
        words = np.frombuffer(b"".join(known), dtype=np.int64).reshape(len(known), -1)[:, 0]
        if len(self.pieces) == 1 and self.pieces[0] == 1:
            return np.ascontiguousarray(words)[:, None]
        found = [words.reshape(blocks, many, -1)[:, :, -1] for many in self.pieces]
        return np.concatenate(found, axis=1)

    def held_from(self, device_blocks: Sequence[int], on_device: int, chunks: int) -> list[int]:
        """Of each window, the first device block that holds its content once a request has it all:
        `device_blocks` from there on of the `on_device` blocks that were there, what a hit of
        `chunks` chunks loads, and all that is computed."""
        found = []
        for window, first in zip(self.windows, device_blocks, strict=True):
            if chunks * self.blocks_per_chunk > on_device:
                loaded = window.loaded_from(chunks, self.blocks_per_chunk)
                first = first if loaded <= on_device else loaded
            found.append(first)
        return found

    def chunks_held_from(self, held_from: Sequence[int]) -> list[int]:
        """By column, the first chunk of the engine that is all there."""
        first = [0] * len(self.columns)
        for window, block in zip(self.windows, held_from, strict=True):
            for column in window.columns:
                first[column] = -(-block // self.blocks_per_chunk)
        return first
