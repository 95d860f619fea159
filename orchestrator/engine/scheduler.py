"""The leader's decisions: what of a request is hit, what is computed, what is stored, and where.

Prefix matching goes by block on the device and by whole chunk in the region; at least one token of
a prompt is always computed. The scheduler only decides; workers copy. It is a generator of steps,
so that what the ranks agreed to have loaded decides what the next step does.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import islice

import numpy as np

from backends.config import CacheConfig
from backends.primary import PrimaryIndex
from backends.stack import Chunk, TierStack
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.stats import ReplicaStats
from orchestrator.engine.step import FILL, LOAD, NOTHING, ChunkWork
from orchestrator.workload.request import Request

Steps = Generator[list[ChunkWork], int, None]


class Scheduler:
    """One replica's metadata: device cache, primary index, counters."""

    def __init__(
        self,
        device: DeviceCache,
        index: PrimaryIndex,
        cache: CacheConfig,
        *,
        cp_size: int,
        groups: int,
        chunks_per_step: int,
        below: TierStack | None = None,
    ) -> None:
        self._device = device
        self._index = index
        self._block_tokens = cache.tokens_per_block * cp_size
        self._hashes_per_block = self._block_tokens // cache.tokens_per_hash
        self._chunk_blocks = cache.blocks_per_chunk
        self._no_rows = (-1,) * groups
        self._chunks_per_step = chunks_per_step
        self._below = below
        self.stats = ReplicaStats()

    def steps(self, request: Request) -> Steps:
        """The steps that serve a request. Send back, for each, how many of its loading chunks all
        ranks loaded; the first one that some rank could not load, and all behind it, is a miss.
        """
        sequence_tokens = request.prompt_tokens + request.output_tokens
        blocks = -(-sequence_tokens // self._block_tokens)
        if blocks > self._device.blocks:
            self.stats.rejected += 1
            return
        per_hash = self._hashes_per_block
        hashes = request.hashes[per_hash - 1 :: per_hash][:blocks]
        keys = hashes[self._chunk_blocks - 1 :: self._chunk_blocks]
        hit_max = min((request.prompt_tokens - 1) // self._block_tokens, len(hashes))

        block_ids = self._device.take_prefix(hashes[:hit_max])
        on_device = len(block_ids)
        first = on_device // self._chunk_blocks
        wanted = keys[first : hit_max // self._chunk_blocks]
        found = first + len(self._index.lookup(wanted))
        load_end, tier = yield from self._promote(keys, found, first + len(wanted))
        self._index.touch(keys[first:load_end])
        block_ids += self._device.take_free(blocks - on_device)

        work = _RequestWork(self, hashes, keys, block_ids, on_device, load_end)
        loaded_end = yield from self._run(work)
        in_region = self._loaded_tokens(first, min(found, loaded_end), on_device)
        in_all = self._loaded_tokens(first, loaded_end, on_device)

        self._index.touch(keys)
        self._device.register(block_ids[: len(hashes)], hashes)
        self._device.give_back(block_ids)
        stats = self.stats
        stats.requests += 1
        stats.prompt_tokens += request.prompt_tokens
        stats.output_tokens += request.output_tokens
        stats.hit_tokens_device += on_device * self._block_tokens
        stats.hit_tokens_shm += in_region
        if tier is not None:
            before = stats.hit_tokens_below.get(tier, 0)
            stats.hit_tokens_below[tier] = before + in_all - in_region

    def _loaded_tokens(self, first: int, end: int, on_device: int) -> int:
        """Tokens of chunks `[first, end)` that the device did not have."""
        if end <= first:
            return 0
        return max(0, end * self._chunk_blocks - on_device) * self._block_tokens

    def _promote(
        self, keys: Sequence[bytes], start: int, end: int
    ) -> Generator[list[ChunkWork], int, tuple[int, str | None]]:
        """Bring the chunks from `start` on that a lower tier has into the region.

        Returns the end of what is there now, and the name of the tier that it came from.
        """
        if self._below is None or start >= end:
            return start, None
        tier, count = self._below.find(keys[start:end])
        if tier is None:
            return start, None
        # An empty step: when all ranks have passed it, none still writes to a row that may be
        # evicted for what is about to be loaded.
        yield []
        pinned = frozenset(keys)
        chunks = []
        for key in keys[start : start + count]:
            rows = self.rows_for(key, pinned)
            if rows is None:
                break
            chunks.append(Chunk(key, rows))
        done = self._below.load(tier, chunks) if chunks else 0
        for chunk in chunks[done:]:
            self._index.drop(chunk.key)
        self._index.counters.promoted += done
        return start + done, tier.name

    def rows_for(self, key: bytes, pinned: Collection[bytes]) -> tuple[int, ...] | None:
        """Rows for a new chunk, waiting a little for transfers where they hold all the others."""
        rows = self._index.prepare_store(key, pinned)
        while rows is None and self._below is not None and self._below.wait_for_rows():
            rows = self._index.prepare_store(key, pinned)
        return rows

    def forget(self, key: bytes) -> None:
        """A chunk of the region could not be used."""
        self._index.drop(key)
        self._index.counters.errors += 1

    def _run(self, work: _RequestWork) -> Generator[list[ChunkWork], int, int]:
        """Yield the request's steps; returns the end of the chunks that were really loaded."""
        while step := list(islice(work, self._chunks_per_step)):
            loading = [chunk for chunk in step if chunk.loads]
            agreed = yield step
            if agreed < len(loading):
                work.failed(loading[agreed].key)
        return work.load_end


class _RequestWork(Iterator[ChunkWork]):
    """The chunks of one request on which there is something to do, decided one after the other."""

    def __init__(
        self,
        scheduler: Scheduler,
        hashes: Sequence[bytes],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        on_device: int,
        load_end: int,
    ) -> None:
        self._scheduler = scheduler
        self._index = scheduler._index
        self._hashes = hashes
        self._keys = keys
        self._pinned = frozenset(keys)
        self._block_ids = block_ids
        self._on_device = on_device
        self.load_end = load_end
        self._storing = True
        self._chunk = 0

    def failed(self, key: bytes) -> None:
        """This chunk could not be loaded everywhere: forget it, and compute from there on."""
        self.load_end = self._keys.index(key)
        self._scheduler.forget(key)

    def __next__(self) -> ChunkWork:
        size = self._scheduler._chunk_blocks
        while self._chunk * size < len(self._hashes):
            chunk = self._chunk
            self._chunk += 1
            work = self._work(chunk, chunk * size, min(size, len(self._hashes) - chunk * size))
            if work is not None:
                return work
        raise StopIteration

    def _work(self, chunk: int, start: int, count: int) -> ChunkWork | None:
        size = self._scheduler._chunk_blocks
        actions = np.full(size, NOTHING, dtype=np.int64)
        cached = min(max(self._on_device - start, 0), count)
        actions[cached:count] = LOAD if chunk < self.load_end else FILL
        key, rows, store = bytes(32), self._scheduler._no_rows, False
        if count == size:
            key = self._keys[chunk]
            present = self._index.rows_of(key)
            if present is not None:
                rows = present
            elif not self._storing:
                self._index.counters.skipped_stores += 1
            else:
                new = self._scheduler.rows_for(key, self._pinned)
                self._storing = store = new is not None
                self._index.counters.stored += store
                self._index.counters.skipped_stores += not store
                rows = new or rows
        if cached == count and not store:
            return None
        ids = np.full(size, -1, dtype=np.int64)
        ids[:count] = self._block_ids[start : start + count]
        hashes = np.zeros(size, dtype=np.int64)
        hashes[:count] = [
            int.from_bytes(h[:8], "little", signed=True)
            for h in self._hashes[start : start + count]
        ]
        return ChunkWork(key, rows, store, actions, ids, hashes)
