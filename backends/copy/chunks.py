"""Blocks of a sequence as whole chunks, for an engine that does not keep to their boundaries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def whole_chunks(
    block_ids: NDArray[np.integer], first: int, blocks_per_chunk: int
) -> NDArray[np.int64]:
    """Consecutive blocks, the first of them block number `first` of its sequence, as the chunks
    that they lie in: int64 [chunks, blocks_per_chunk], -1 where a chunk has others besides."""
    before = first % blocks_per_chunk
    chunks = -(-(before + len(block_ids)) // blocks_per_chunk) if len(block_ids) else 0
    ids = np.full(chunks * blocks_per_chunk, -1, dtype=np.int64)
    ids[before : before + len(block_ids)] = block_ids
    return ids.reshape(chunks, blocks_per_chunk)
