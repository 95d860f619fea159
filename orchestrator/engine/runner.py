"""A worker's half of a step: load, agree, compute, store. It decides nothing.

Every rank makes the same collective calls whatever happens to its own bytes: a chunk that one rank
cannot load is a miss for all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from backends.block import BlockKey, is_whole
from backends.config import OffloadConfig
from backends.copy import GroupCopier
from backends.layout import WorkerGroup, cp_tokens, rank_slots, worker_groups
from backends.region.region import Region
from orchestrator.engine.content import BlockContent
from orchestrator.engine.kv import PagedKv
from orchestrator.engine.paging import Paging
from orchestrator.engine.stats import WorkerStats
from orchestrator.engine.step import FILL, LOAD, ChunkWork
from orchestrator.groups import Group

if TYPE_CHECKING:
    from backends.region.node.reader import Lease, NodeReader

VERIFY = ("all", "sample", "off")
SAMPLE_SHARE = 1 / 16

Int64Array = npt.NDArray[np.int64]


class AwayRows:
    """What of one step's loads is read from other replicas: a lease for each row, with the number
    of the chunk that it is for."""

    def __init__(self, reader: NodeReader) -> None:
        self.reader = reader
        self.leases: list[tuple[int, Lease]] = []

    def lease(self, chunk: int, row: int, key: BlockKey) -> bool:
        lease = self.reader.lease(row, key)
        if lease is not None:
            self.leases.append((chunk, lease))
        return lease is not None

    def kept(self, chunks: int) -> int:
        """How many of the leading chunks, all copied by now, were what they should be."""
        leases = [(chunk, lease) for chunk, lease in self.leases if chunk < chunks]
        still = self.reader.kept([lease for _, lease in leases])
        return leases[still][0] if still < len(leases) else chunks


class GroupWorker:
    """One KV-cache group on one worker: its tensors, their right content, the way to the region.

    What the engine calls a block is `pieces` blocks of this group, side by side, whose hashes begin
    with word `first_word` of that block's. `columns` has, for each of the group's chunks in a chunk
    of the engine, the place of its row.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: OffloadConfig,
        paging: Paging,
        slot: npt.NDArray[np.uint8],
        device: torch.device,
        *,
        device_blocks: int,
        copy_threads: int,
        copy_kernel: str,
    ) -> None:
        own = [n for n, column in enumerate(paging.columns) if column.group == group.group_index]
        self.columns = np.array(own, dtype=np.int64)
        self._pieces = np.arange(len(own), dtype=np.int64)
        smaller = sum(many for many in paging.pieces if many < len(own))
        self._words = slice(smaller, smaller + len(own))
        self._chunk_blocks = config.cache.blocks_per_chunk
        parallel = config.parallel
        tokens = cp_tokens(group.tokens_per_block, parallel.cp_size, parallel.cp_rank)
        self.content = BlockContent(group, tokens, device)
        dtype = getattr(torch, config.model.dtype)
        self.kv = PagedKv(group, device_blocks * len(own), dtype, config.layout, device)

        def copier(slot: npt.NDArray[np.uint8], loads_only: bool) -> GroupCopier:
            return GroupCopier(
                self.kv.tensors,
                block_dim=0,
                slot=slot,
                blocks_per_chunk=config.cache.blocks_per_chunk,
                threads=copy_threads,
                # Regions of others are not page-locked here, whatever one's own is.
                kernel="auto" if loads_only and device.type == "cuda" else copy_kernel,
                loads_only=loads_only,
            )

        self.copier = copier(slot, False)
        self._copier = copier
        self._away: dict[tuple[int, int], GroupCopier] = {}  # by replica and epoch

    def own_ids(self, block_ids: Int64Array) -> Int64Array:
        """The group's own ids of the engine's blocks, int64 [n, pieces]; -1 stays -1."""
        many = len(self._pieces)
        return np.where(block_ids[:, None] < 0, -1, block_ids[:, None] * many + self._pieces)

    def own_hashes(self, words: Int64Array) -> Int64Array:
        """Their hashes, int64 [n, pieces]. `words` is int64 [n, words a block of the engine]."""
        return np.ascontiguousarray(words[:, self._words])

    def batch(self, block_ids: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Own ids and rows of the group's chunks that have a row. Of n chunks of the engine:
        `block_ids` int64 [n, blocks_per_chunk], `rows` int64 [n, columns]."""
        own = rows[:, self.columns].ravel()
        ids = self.own_ids(block_ids.ravel()).reshape(-1, self._chunk_blocks)
        return ids[own >= 0], own[own >= 0]

    def load(
        self, block_ids: Int64Array, rows: Int64Array, away: AwayRows | None
    ) -> tuple[int, float]:
        """Copy chunks from their rows, as `batch` takes them, those of neighbours from there; bytes
        and seconds."""
        ids, own = self.batch(block_ids, rows)
        if away is None or not away.leases:
            copied = self.copier.load(ids, own)
            return copied.bytes, copied.seconds
        whose, there = np.divmod(own, away.reader.rows)
        moved, seconds = 0, 0.0
        for replica in np.unique(whose).tolist():
            copier = self._copier_of(away, replica - 1) if replica else self.copier
            copied = copier.load(ids[whose == replica], there[whose == replica])
            moved, seconds = moved + copied.bytes, seconds + copied.seconds
        return moved, seconds

    def _copier_of(self, away: AwayRows, replica: int) -> GroupCopier:
        lease = next(lease for _, lease in away.leases if lease.replica == replica)
        at = replica, lease.epoch
        if at not in self._away:
            self.forget(replica)
            self._away[at] = self._copier(away.reader.slots(lease), True)
        return self._away[at]

    def forget(self, replica: int) -> None:
        """Let go of a neighbour's region."""
        for at in [at for at in self._away if at[0] == replica]:
            self._away.pop(at).close()

    def close(self) -> None:
        self.copier.close()
        for replica in {replica for replica, _ in self._away}:
            self.forget(replica)

    def fill(self, block_ids: Int64Array, words: Int64Array) -> None:
        """Write what computing these blocks would give. int64 [n], [n, words]."""
        ids, hashes = self.own_ids(block_ids).ravel(), self.own_hashes(words).ravel()
        device_ids = torch.from_numpy(ids)
        for layer, content in enumerate(self.kv.words):
            content[device_ids.to(content.device)] = self.content.words(layer, hashes)

    def wrong(self, own_ids: Int64Array, hashes: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these, its own blocks, differ from what they should hold, bool [n]."""
        ids = torch.from_numpy(own_ids)
        bad = torch.zeros(len(own_ids), dtype=torch.bool)
        for layer, content in enumerate(self.kv.words):
            found = content[ids.to(content.device)]
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
        reader: NodeReader | None = None,
    ) -> None:
        """`reader` is the way to the rows of other replicas of this node; the caller closes it."""
        self._reader = reader
        parallel = config.parallel
        slots = rank_slots(config.groups, parallel, parallel.local_world_size)
        own = slots[parallel.rank]
        slot = region.slot_view(own)
        # Ranks of a node that keep equal bytes share a slot, and the first of them writes it.
        self._writes = own not in slots[parallel.rank - parallel.local_rank : parallel.rank]
        self._paging = Paging.of(config.groups, config.cache, parallel)
        self._headers = region.row_headers()
        self._verify = verify
        # Seeded by rank 0's coordinates only, so that all ranks sample the same chunks.
        self._sampler = random.Random(config.parallel.data_parallel_index)
        self._groups = [
            GroupWorker(
                group,
                config,
                self._paging,
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
        if self._reader is not None:
            for replica in self._reader.sweep():
                for worker in self._groups:
                    worker.forget(replica)
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
        away = None if self._reader is None else AwayRows(self._reader)
        usable = next(
            (n for n, chunk in enumerate(chunks) if not self._rows_hold(n, chunk, away)),
            len(chunks),
        )
        if usable < len(chunks):
            self.stats.refused_rows += 1
        if usable == 0:
            return 0
        wanted = chunks[:usable]
        ids = np.stack([np.where(c.actions == LOAD, c.block_ids, -1) for c in wanted])
        rows = np.array([chunk.rows for chunk in wanted], dtype=np.int64)
        seconds = 0.0
        for worker in self._groups:
            moved, took_s = worker.load(ids, rows, away)
            self.stats.loaded_bytes += moved
            seconds += took_s
        self.stats.loaded_s += seconds
        self.stats.load_latency.add(seconds)
        if away is not None and away.leases:
            usable = away.kept(usable)
            if usable < len(wanted):
                self.stats.refused_rows += 1
                wanted, ids, rows = wanted[:usable], ids[:usable], rows[:usable]
            if usable == 0:
                return 0
        if self._verify == "off":
            return usable
        if self._verify == "sample" and self._sampler.random() >= SAMPLE_SHARE:
            return usable
        return self._verified(wanted, ids, rows)

    def _verified(self, chunks: list[ChunkWork], ids: Int64Array, rows: Int64Array) -> int:
        """Compare every byte that was loaded; how many leading chunks are right."""
        words = np.concatenate([chunk.hashes for chunk in chunks])
        words = words.reshape(-1, self._paging.words_per_block)
        right = len(chunks)
        for worker in self._groups:
            chunk_blocks = ids.shape[1]
            had_row = rows[:, worker.columns].ravel() >= 0
            own, _ = worker.batch(ids, rows)
            hashes = worker.own_hashes(words).reshape(-1, chunk_blocks)[had_row]
            owner = np.repeat(np.arange(len(chunks)), len(worker.columns))[had_row]
            mask = own >= 0
            wrong = worker.wrong(own[mask], hashes[mask])
            self.stats.blocks_checked += len(wrong)
            if wrong.any():
                self.stats.blocks_wrong += int(wrong.sum())
                places = np.broadcast_to(owner[:, None], own.shape)[mask]
                right = min(right, int(places[wrong].min()))
        return right

    def _rows_hold(self, number: int, chunk: ChunkWork, away: AwayRows | None) -> bool:
        held = [(row, BlockKey(chunk.key, n)) for n, row in enumerate(chunk.rows) if row >= 0]
        own = len(self._headers)
        return bool(held) and all(
            is_whole(self._headers[row], key)
            if row < own
            else away is not None and away.lease(number, row, key)
            for row, key in held
        )

    def _fill(self, fills: list[tuple[ChunkWork, npt.NDArray[np.bool_]]]) -> None:
        if not fills:
            return
        many = self._paging.words_per_block
        ids = np.concatenate([chunk.block_ids[mask] for chunk, mask in fills])
        words = np.concatenate([chunk.hashes.reshape(-1, many)[mask] for chunk, mask in fills])
        if len(ids):
            began_s = time.perf_counter()
            for worker in self._groups:
                worker.fill(ids, words)
            self.stats.computed_s += time.perf_counter() - began_s
            self.stats.computed_tokens += len(ids) * self._paging.block_tokens

    def _store(self, chunks: list[ChunkWork]) -> None:
        if not chunks or not self._writes:
            return
        ids = np.stack([chunk.block_ids for chunk in chunks])
        rows = np.array([chunk.rows for chunk in chunks], dtype=np.int64)
        for worker in self._groups:
            copied = worker.copier.store(*worker.batch(ids, rows))
            self.stats.stored_bytes += copied.bytes
            self.stats.stored_s += copied.seconds

    def close(self) -> None:
        for worker in self._groups:
            worker.close()
        self._groups = []
        self._headers = None  # type: ignore[assignment]  # lets the region unmap
