"""One engine step as the leader broadcasts it: a fixed-size int64 array, so that one collective
carries it whatever it says.

A step works on up to `chunks_max` chunks of one request. Per chunk: which rows (one a column, see
`backends.layout.columns`), and for each of its blocks the block id on the device, the hashes (their
first 64 bits, from which the content follows; several where a group has shorter blocks), and what
to do: LOAD from the rows, FILL as if computed, nothing. `store` says that the whole chunk goes to
its rows afterwards.

    word 0      operation: RUN or STOP
    word 1      number of chunks
    per chunk   store flag | key: 4 words | rows: columns words | actions | block ids | hashes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

STOP = 0
RUN = 1
NOTHING = 0
LOAD = 1
FILL = 2
_KEY_WORDS = 4


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What one step does with one chunk.

    `key` is 32 bytes. `rows` has one row a column, or -1 where nothing is to be loaded from, or
    stored to, any. `actions`, `block_ids` (-1: no such block) and `hashes` are int64
    [blocks_per_chunk], `hashes` as many times that as there are hashes a block.
    """

    key: bytes
    rows: tuple[int, ...]
    store: bool
    actions: Int64Array
    block_ids: Int64Array
    hashes: Int64Array

    @property
    def loads(self) -> bool:
        return bool((self.actions == LOAD).any())


class StepCodec:
    """Packs steps into the broadcast array and back."""

    def __init__(
        self, chunks_max: int, blocks_per_chunk: int, columns: int, hashes_per_block: int = 1
    ) -> None:
        self.chunks_max = chunks_max
        self._columns = columns
        # Where actions, block ids and hashes begin behind the rows.
        self._ids, self._hashes = blocks_per_chunk, 2 * blocks_per_chunk
        body_words = (2 + hashes_per_block) * blocks_per_chunk
        self._chunk_words = 1 + _KEY_WORDS + columns + body_words
        self.words = 2 + chunks_max * self._chunk_words

    def empty(self) -> Int64Array:
        return np.zeros(self.words, dtype=np.int64)

    def encode(self, array: Int64Array, chunks: Sequence[ChunkWork]) -> None:
        array[0], array[1] = RUN, len(chunks)
        body = array[2:].reshape(self.chunks_max, self._chunk_words)
        actions = 1 + _KEY_WORDS + self._columns
        for line, chunk in zip(body, chunks, strict=False):
            line[0] = chunk.store
            line[1 : 1 + _KEY_WORDS] = np.frombuffer(chunk.key, dtype=np.int64)
            line[1 + _KEY_WORDS : actions] = chunk.rows
            parts = line[actions:]
            parts[: self._ids] = chunk.actions
            parts[self._ids : self._hashes] = chunk.block_ids
            parts[self._hashes :] = chunk.hashes

    def decode(self, array: Int64Array) -> list[ChunkWork] | None:
        """The chunks of a step; None means that the run is over."""
        if array[0] == STOP:
            return None
        body = array[2:].reshape(self.chunks_max, self._chunk_words)
        chunks = []
        for line in body[: array[1]]:
            parts = line[1 + _KEY_WORDS + self._columns :]
            chunks.append(
                ChunkWork(
                    key=line[1 : 1 + _KEY_WORDS].tobytes(),
                    rows=tuple(int(r) for r in line[1 + _KEY_WORDS :][: self._columns]),
                    store=bool(line[0]),
                    actions=parts[: self._ids],
                    block_ids=parts[self._ids : self._hashes],
                    hashes=parts[self._hashes :],
                )
            )
        return chunks
