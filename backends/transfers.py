"""A worker's transfers between its KV tensors and its slot of the region, for a foreign engine.

The engine names the blocks of each KV-cache group one after the other, beginning anywhere in a
chunk, and the rows that they go to or come from. Every row is looked at first: rows stay pinned
until a transfer ends, so one that is not meant for its block any more is a fault of the program or
of the memory, and ends in an error rather than in a wrong block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from backends.block import BlockKey, holds, is_whole
from backends.copy import CopyHandle, GroupCopier
from backends.copy.chunks import whole_chunks
from backends.errors import ConfigError, RegionError
from backends.region.region import Region
from backends.tier.base import Bytes

Int64Array = NDArray[np.int64]


class Blocks(NamedTuple):
    """The engine's blocks, group by group: `ids` int64 [n], of which `counts[g]` are group g's, the
    first of them block number `firsts[g]` of its sequence."""

    ids: Int64Array
    counts: Sequence[int]
    firsts: Sequence[int]


class Ended(NamedTuple):
    """A transfer that has ended. `seconds` are those of its copies."""

    job_id: int
    nbytes: int
    seconds: float


class SlotTransfers:
    """One worker's. The stream that copies run on, and whether they overlap, is the copier's."""

    def __init__(
        self,
        region: Region,
        local_rank: int,
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        bytes_per_block: Sequence[int],
        blocks_per_chunk: int,
        threads: int,
        kernel: str,
    ) -> None:
        """`groups` are the tensors of each KV-cache group, [blocks, bytes of one of its layers];
        `bytes_per_block` are what the plan says this worker keeps, by group.

        The region is closed by `close`. Raises ConfigError where the engine keeps something else.
        """
        found = [sum(t.shape[1] * t.element_size() for t in group) for group in groups]
        if found != list(bytes_per_block):
            raise ConfigError(
                f"a block has {found} bytes on this worker, by KV-cache group, the plan says "
                f"{list(bytes_per_block)}; plan with this model's config.json (model=hf), the "
                "engine's block size (engine.tokens_per_block) and KV dtype (model.dtype)"
            )
        self._region = region
        self._creator = local_rank == 0
        self._headers: Bytes | None = region.row_headers()
        self._blocks = blocks_per_chunk
        self._jobs: dict[int, list[CopyHandle]] = {}
        slot = region.slot_view(local_rank)
        self._copiers = [
            GroupCopier(
                group,
                block_dim=0,
                slot=slot,
                blocks_per_chunk=blocks_per_chunk,
                threads=threads,
                kernel=kernel,
            )
            for group in groups
        ]

    def submit(
        self,
        job_id: int,
        blocks: Blocks,
        rows: Sequence[int],
        keys: Sequence[BlockKey],
        *,
        load: bool,
    ) -> None:
        """Begin to load rows into blocks, or to store blocks into rows. Raises RegionError."""
        assert self._headers is not None
        may = is_whole if load else holds
        for row, key in zip(rows, keys, strict=True):
            if not may(self._headers[row], key):
                raise RegionError(
                    f"row {row} of the region is not meant for block {key.hash.hex()[:16]} of "
                    f"group {key.group} any more; report it, with this replica's log"
                )
        if self._creator:
            # A name is needed until every process has mapped the region, and if there is work they
            # have.
            self._region.unlink()
        submit = GroupCopier.submit_load if load else GroupCopier.submit_store
        self._jobs[job_id] = [
            submit(copier, ids, np.array(at, dtype=np.int64))
            for copier, ids, at in self._batches(blocks, rows)
        ]

    def _batches(
        self, blocks: Blocks, rows: Sequence[int]
    ) -> Iterator[tuple[GroupCopier, Int64Array, Sequence[int]]]:
        """By group, block ids [chunks, blocks_per_chunk] with -1 where a chunk begins before the
        blocks that are meant, or ends behind them, and the chunks' rows."""
        block, row = 0, 0
        for copier, count, first in zip(self._copiers, blocks.counts, blocks.firsts, strict=True):
            ids = whole_chunks(blocks.ids[block : block + count], first, self._blocks)
            if len(ids):
                yield copier, ids, rows[row : row + len(ids)]
            block, row = block + count, row + len(ids)
        if (block, row) != (len(blocks.ids), len(rows)):
            raise RegionError(
                f"the engine gave {len(blocks.ids)} blocks for {len(rows)} rows, {block} for {row} "
                "fit each other"
            )

    def poll(self) -> list[Ended]:
        """Transfers that ended since the last call."""
        ended = [job for job, copies in self._jobs.items() if all(c.done() for c in copies)]
        found = []
        for job in ended:
            stats = [copy.wait() for copy in self._jobs.pop(job)]
            found.append(Ended(job, sum(s.bytes for s in stats), sum(s.seconds for s in stats)))
        return found

    def wait(self, job_ids: Iterable[int]) -> None:
        for job in job_ids:
            for copy in self._jobs.get(job, ()):
                copy.wait()

    def close(self) -> None:
        for copier in self._copiers:
            copier.close()
        self._copiers = []
        self._headers = None
        self._region.close()
