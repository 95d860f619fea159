"""A worker's half of a step: load, agree, compute, store. It decides nothing.

Every rank makes the same collective calls whatever happens to its own bytes: a chunk that one rank
cannot load is a miss for all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from backends.block import BlockKey, holds
from backends.config import OffloadConfig
from backends.copy import GroupCopier
from backends.layout import WorkerGroup, cp_tokens, worker_groups
from backends.region.region import Region
from orchestrator.engine.content import BlockContent
from orchestrator.engine.kv import PagedKv
from orchestrator.engine.stats import WorkerStats
from orchestrator.engine.step import FILL, LOAD, ChunkWork
from orchestrator.groups import Group

VERIFY = ("all", "sample", "off")
SAMPLE_SHARE = 1 / 16

Int64Array = npt.NDArray[np.int64]


class GroupWorker:
    """One KV-cache group on one worker: its tensors, their right content, the way to the region."""

    def __init__(
        self,
        group: WorkerGroup,
        config: OffloadConfig,
        slot: npt.NDArray[np.uint8],
        device: torch.device,
        *,
        device_blocks: int,
        copy_threads: int,
        copy_kernel: str,
    ) -> None:
        self.index = group.group_index
        parallel = config.parallel
        tokens = cp_tokens(group.tokens_per_block, parallel.cp_size, parallel.cp_rank)
        self.content = BlockContent(group, tokens, device)
        dtype = getattr(torch, config.model.dtype)
        self.kv = PagedKv(group, device_blocks, dtype, config.layout, device)
        self.copier = GroupCopier(
            self.kv.tensors,
            block_dim=0,
            slot=slot,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            threads=copy_threads,
            kernel=copy_kernel,
        )

    def fill(self, block_ids: Int64Array, hashes: Int64Array) -> None:
        """Write what computing these blocks would give. int64 [n] both."""
        ids = torch.from_numpy(block_ids)
        for layer, words in enumerate(self.kv.words):
            words[ids.to(words.device)] = self.content.words(layer, hashes)

    def wrong(self, block_ids: Int64Array, hashes: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these blocks differ from what they should hold, bool [n]."""
        ids = torch.from_numpy(block_ids)
        bad = torch.zeros(len(block_ids), dtype=torch.bool)
        for layer, words in enumerate(self.kv.words):
            found = words[ids.to(words.device)]
            differs = (found != self.content.words(layer, hashes)).flatten(1).any(1)
            bad |= differs.cpu()
        return bad.numpy()


class WorkerRunner:
    """Executes steps on one worker."""

    def __init__(
        self,
        config: OffloadConfig,
        region: Region,
        device: torch.device,
        *,
        device_blocks: int,
        verify: str,
        copy_threads: int,
        copy_kernel: str,
    ) -> None:
        slot = region.slot_view(config.parallel.local_rank)
        self._headers = region.row_headers()
        self._verify = verify
        # Seeded by rank 0's coordinates only, so that all ranks sample the same chunks.
        self._sampler = random.Random(config.parallel.data_parallel_index)
        self._groups = [
            GroupWorker(
                group,
                config,
                slot,
                device,
                device_blocks=device_blocks,
                copy_threads=copy_threads,
                copy_kernel=copy_kernel,
            )
            for group in worker_groups(config.groups, config.model, config.cache, config.parallel)
            if group.block_bytes
        ]
        self.stats = WorkerStats()

    @property
    def copy_kernel(self) -> str:
        return self._groups[0].copier.kernel if self._groups else "none"

    def execute(self, chunks: Sequence[ChunkWork], group: Group) -> int:
        """Run one step; the number of leading loads that every rank made good."""
        loading = [chunk for chunk in chunks if chunk.loads]
        loaded = np.array([self._load(loading)], dtype=np.int64)
        group.all_reduce_min(loaded)
        agreed = int(loaded[0])
        missed = {chunk.key for chunk in loading[agreed:]}
        fills = [
            (chunk, (chunk.actions == FILL) | ((chunk.actions == LOAD) & (chunk.key in missed)))
            for chunk in chunks
        ]
        self._fill(fills)
        self._store([chunk for chunk in chunks if chunk.store])
        return agreed

    def _load(self, chunks: list[ChunkWork]) -> int:
        """Load and verify; how many leading chunks hold what they should."""
        usable = next(
            (n for n, chunk in enumerate(chunks) if not self._rows_hold(chunk)), len(chunks)
        )
        if usable < len(chunks):
            self.stats.refused_rows += 1
        if usable == 0:
            return 0
        wanted = chunks[:usable]
        ids = np.stack([np.where(c.actions == LOAD, c.block_ids, -1) for c in wanted])
        seconds = 0.0
        for worker in self._groups:
            rows = np.array([chunk.rows[worker.index] for chunk in wanted], dtype=np.int64)
            copied = worker.copier.load(ids, rows)
            self.stats.loaded_bytes += copied.bytes
            seconds += copied.seconds
        self.stats.loaded_s += seconds
        self.stats.load_latency.add(seconds)
        if self._verify == "off":
            return usable
        if self._verify == "sample" and self._sampler.random() >= SAMPLE_SHARE:
            return usable
        return self._verified(wanted, ids)

    def _verified(self, chunks: list[ChunkWork], ids: Int64Array) -> int:
        """Compare every byte that was loaded; how many leading chunks are right."""
        mask = ids >= 0
        owner = np.repeat(np.arange(len(chunks)), ids.shape[1]).reshape(ids.shape)[mask]
        hashes = np.stack([chunk.hashes for chunk in chunks])[mask]
        right = len(chunks)
        for worker in self._groups:
            wrong = worker.wrong(ids[mask], hashes)
            self.stats.blocks_checked += len(wrong)
            if wrong.any():
                self.stats.blocks_wrong += int(wrong.sum())
                right = min(right, int(owner[wrong].min()))
        return right

    def _rows_hold(self, chunk: ChunkWork) -> bool:
        return all(
            holds(self._headers[row], BlockKey(chunk.key, group))
            for group, row in enumerate(chunk.rows)
        )

    def _fill(self, fills: list[tuple[ChunkWork, npt.NDArray[np.bool_]]]) -> None:
        if not fills:
            return
        ids = np.concatenate([chunk.block_ids[mask] for chunk, mask in fills])
        hashes = np.concatenate([chunk.hashes[mask] for chunk, mask in fills])
        if len(ids):
            for worker in self._groups:
                worker.fill(ids, hashes)

    def _store(self, chunks: list[ChunkWork]) -> None:
        if not chunks:
            return
        ids = np.stack([chunk.block_ids for chunk in chunks])
        for worker in self._groups:
            rows = np.array([chunk.rows[worker.index] for chunk in chunks], dtype=np.int64)
            copied = worker.copier.store(ids, rows)
            self.stats.stored_bytes += copied.bytes
            self.stats.stored_s += copied.seconds

    def close(self) -> None:
        for worker in self._groups:
            worker.copier.close()
        self._groups = []
        self._headers = None  # type: ignore[assignment]  # lets the region unmap
