"""What workers copy between their devices and the region, counted instead of copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from backends.histogram import LatencyHistogram
from orchestrator.engine.stats import WorkerStats
from orchestrator.engine.step import LOAD, ChunkWork
from orchestrator.plan import Plan
from orchestrator.simulate.timing import Timing


class Copies:
    """All workers of one replica: each copies its part of every chunk, at the same time."""

    def __init__(self, plan: Plan, index: int, timing: Timing) -> None:
        self._timing = timing
        workers = plan.replicas[index].workers
        self._block_bytes = [worker.worker_bytes_per_block for worker in workers]
        # Ranks of a node that keep equal bytes share a slot, which the first of them writes.
        first: dict[tuple[int, int], int] = {}
        for worker in workers:
            first.setdefault((worker.node_rank, worker.slot), worker.rank)
        self._writers = set(first.values())
        self._columns = [column.group for column in plan.columns]
        self._pieces = [self._columns.count(group) for group in range(len(plan.groups))]
        self._chunk_blocks = plan.cache.blocks_per_chunk
        self._loaded = [0] * len(plan.groups)  # blocks, by group
        self._stored = [0] * len(plan.groups)
        self._latency = LatencyHistogram()
        self.loaded_s = 0.0

    def step(self, chunks: Sequence[ChunkWork]) -> int:
        """One step's; how many chunks it loads."""
        loads, blocks = 0, [0] * len(self._loaded)
        for chunk in chunks:
            if chunk.store:
                for row, group in zip(chunk.rows, self._columns, strict=True):
                    self._stored[group] += self._chunk_blocks * (row >= 0)
            mask = chunk.actions == LOAD
            count = int(np.count_nonzero(mask))
            if count:
                loads += 1
                self._count(chunk, mask, count, blocks)
        if loads:
            for group, more in enumerate(blocks):
                self._loaded[group] += more
            seconds = self._timing.copied_s(max(_bytes(blocks, each) for each in self._block_bytes))
            self._latency.add(seconds)
            self.loaded_s += seconds
        return loads

    def _count(
        self, chunk: ChunkWork, mask: np.ndarray[Any, Any], count: int, blocks: list[int]
    ) -> None:
        """A group with several blocks in one of the engine's has as many chunks in one of its."""
        size, place = self._chunk_blocks, [0] * len(blocks)
        for row, group in zip(chunk.rows, self._columns, strict=True):
            at, pieces = place[group], self._pieces[group]
            place[group] += 1
            if row < 0:
                continue
            if count == size or pieces == 1:
                blocks[group] += count
            else:
                own = np.repeat(mask, pieces)[at * size : (at + 1) * size]
                blocks[group] += int(np.count_nonzero(own))

    def workers(self) -> list[dict[str, Any]]:
        """What each rank tells of itself, as far as it is simulated."""
        return [
            {
                "rank": rank,
                "stats": asdict(
                    WorkerStats(
                        stored_bytes=_bytes(self._stored, each) if rank in self._writers else 0,
                        loaded_bytes=_bytes(self._loaded, each),
                        loaded_s=self.loaded_s,
                        load_latency=self._latency,
                    )
                ),
            }
            for rank, each in enumerate(self._block_bytes)
        ]


def _bytes(blocks: Sequence[int], block_bytes: Sequence[int]) -> int:
    return sum(n * each for n, each in zip(blocks, block_bytes, strict=True))
