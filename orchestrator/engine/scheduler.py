"""The leader's decisions: what of a request is hit, what is computed, what is stored, and where.

Prefix matching goes by block on the device and by whole chunk in the region; at least one token of
a prompt is always computed. The scheduler only decides; workers copy. It is a generator of steps,
so that what the ranks agreed to have loaded decides what the next step does.

The engine serves one request at a time, so it waits for promotions by itself, asking the stack
again and again. The stack's verbs never wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice

import numpy as np

from backends.stack.primary import NO_ROW
from backends.stack.stack import TierStack
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.paging import Paging
from orchestrator.engine.stats import ReplicaStats
from orchestrator.engine.step import FILL, LOAD, NOTHING, ChunkWork, Int64Array
from orchestrator.plan import Plan
from orchestrator.workload.request import Request

POLL_S = 0.0002
ROOM_TIMEOUT_S = 2.0
"""How long a request may wait for rows that transfers hold before its stores are cut short."""
REST_TIMEOUT_S = 60.0
"""How long tiers may take to come to rest in lockstep."""

Steps = Generator[list[ChunkWork], int, None]
Rows = dict[bytes, tuple[int, ...]]


def chunks_per_step(plan: Plan) -> int:
    """The most chunks that one step works on."""
    return max(1, plan.settings.engine.max_tokens_per_step // plan.region.tokens_per_row)


def open_scheduler(plan: Plan, stack: TierStack) -> Scheduler:
    """A replica's scheduler, as the plan has it."""
    paging = Paging.of(plan.groups, plan.cache, plan.topology)
    return Scheduler(
        DeviceCache(plan.device_blocks, [window.blocks for window in paging.windows]),
        stack,
        paging,
        chunks_per_step=chunks_per_step(plan),
        lockstep=plan.settings.engine.lockstep,
    )


class Scheduler:
    """One replica's decisions: device cache, tier stack, counters."""

    def __init__(
        self,
        device: DeviceCache,
        stack: TierStack,
        paging: Paging,
        *,
        chunks_per_step: int,
        lockstep: bool = False,
    ) -> None:
        """`lockstep`: let the tiers come to rest after every step, so that nothing is under way
        when the next decision is made."""
        self._device = device
        self._stack = stack
        self._paging = paging
        self._block_tokens = paging.block_tokens
        self._chunk_blocks = paging.blocks_per_chunk
        self._chunks_per_step = chunks_per_step
        # Stored by the last step: whole once every rank has come to the next one.
        self._written: list[bytes] = []
        self._lockstep = lockstep
        self.pause: Callable[[], None] = lambda: time.sleep(POLL_S)
        self.monotonic: Callable[[], float] = time.monotonic
        self.now_s = 0.0  # the workload's own time, which eviction goes by
        stack.clock = lambda: self.now_s
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
        self.now_s = request.arrival_s
        per_hash = self._paging.hashes_per_block
        hashes = request.hashes[per_hash - 1 :: per_hash][:blocks]
        keys = hashes[self._chunk_blocks - 1 :: self._chunk_blocks]
        hit_max = min((request.prompt_tokens - 1) // self._block_tokens, len(hashes))

        index = self._stack.index
        if self._written and index.rows_free < 2 * len(keys) * index.groups:
            # What the last request wrote could not be evicted yet, and something else would go.
            yield from self._wait()
        block_ids = self._device.take_prefix(hashes[:hit_max])
        on_device = len(block_ids)
        first = on_device // self._chunk_blocks
        found, whole = yield from self._find(keys, first, hit_max // self._chunk_blocks)
        load_end = first + found
        self._stack.touch(keys[:load_end], keys)
        loading = self._stack.prepare_load(keys[first:load_end])
        on_device_from = self._device.held_from(block_ids)
        held_from = self._paging.held_from(on_device_from, on_device, load_end)
        block_ids += self._device.take_free(blocks - on_device)
        parted = first + whole if whole > found else 0
        storing = yield from self._rows_for(keys, parted, self._paging.chunks_held_from(held_from))

        work = _RequestWork(
            self._chunk_blocks,
            (NO_ROW,) * index.groups,
            self._paging.words(request.hashes, len(hashes)),
            keys,
            block_ids,
            on_device,
            load_end,
            dict(zip(keys[first:load_end], zip(*loading.rows, strict=True), strict=True)),
            storing,
            again=bool(self._paging.windows),
        )
        yield from self._run(work, keys[first:load_end])

        if work.load_end < load_end:
            held_from = on_device_from  # computed from there on
        self._device.register(block_ids[: len(hashes)], hashes, held_from)
        self._device.give_back(block_ids)
        stats = self.stats
        stats.requests += 1
        stats.prompt_tokens += request.prompt_tokens
        stats.output_tokens += request.output_tokens
        stats.hit_tokens_device += on_device * self._block_tokens
        for chunk in range(first, work.load_end):
            cached = max(0, on_device - chunk * self._chunk_blocks)
            tokens = (self._chunk_blocks - cached) * self._block_tokens
            source = loading.sources.get(keys[chunk])
            if source is None:
                stats.hit_tokens_shm += tokens
            else:
                before = stats.hit_tokens_below.get(source, 0)
                stats.hit_tokens_below[source] = before + tokens

    def _find(
        self, keys: Sequence[bytes], first: int, end: int
    ) -> Generator[list[ChunkWork], int, tuple[int, int]]:
        """How many chunks from `first` on are in the region, or have been brought there; and how
        many of them would be but for their windows."""
        if first >= end:
            return 0, 0
        parent = keys[first - 1] if first else None
        while True:
            found = self._stack.lookup(keys[first:end], first=first, parent=parent, keep=keys)
            if not found.waits:
                return found.hits, found.whole
            yield from self._wait()

    def _rows_for(
        self, keys: Sequence[bytes], parted: int, held_from: Sequence[int]
    ) -> Generator[list[ChunkWork], int, Rows]:
        """Rows for the request's chunks that the region does not have, waiting a little for those
        that transfers hold. What there is no room for is not stored."""
        rows: Rows = {}
        until_s = self.monotonic() + ROOM_TIMEOUT_S
        while True:
            storing = self._stack.prepare_store(keys, keep=keys, parted=parted, held_from=held_from)
            rows.update(zip(storing.keys, zip(*storing.rows, strict=True), strict=True))
            waits = self._written or self._stack.busy
            if not storing.short or not waits or self.monotonic() >= until_s:
                self._stack.counters.skipped_stores += storing.short
                return rows
            yield from self._wait()

    def _wait(self) -> Generator[list[ChunkWork], int, None]:
        """Let something change: what the last step wrote become whole, or a tier get further."""
        if self._written:
            # An empty step: when all ranks have come to it, they have ended the one before.
            yield from self._step([])
        elif self._lockstep and self._stack.busy:
            self._stack.drain(REST_TIMEOUT_S)
        else:
            self.pause()
        self._stack.step()

    def _run(
        self, work: _RequestWork, prepared: Sequence[bytes]
    ) -> Generator[list[ChunkWork], int, None]:
        """Yield the request's steps."""
        unloaded = list(prepared)
        while step := list(islice(work, self._chunks_per_step)):
            loading = [chunk.key for chunk in step if chunk.loads]
            agreed = yield from self._step(step)
            # What it did not have to load, because the device had it all, is done with as well.
            through = unloaded.index(loading[-1]) + 1 if loading else 0
            done, unloaded = unloaded[:through], unloaded[through:]
            failed = loading[agreed : agreed + 1]
            if failed:
                work.failed(failed[0])
                done, unloaded = [*done, *unloaded], []
            self._stack.complete_load(done, failed)
            self._stack.step()
            if self._lockstep:
                self._stack.drain(REST_TIMEOUT_S)
        self._stack.complete_load(unloaded)
        if self._lockstep:
            if self._written:
                yield from self._step([])
            self._stack.drain(REST_TIMEOUT_S)

    def _step(self, step: list[ChunkWork]) -> Generator[list[ChunkWork], int, int]:
        written = [chunk.key for chunk in step if chunk.store]
        agreed = yield step
        # Every rank was in this step's collective, so it had ended the step before.
        self.settle()
        self._written = written
        return agreed

    def settle(self) -> None:
        """All ranks have passed a collective since the last step: what it wrote is whole."""
        written, self._written = self._written, []
        if written:
            self._stack.complete_store(written)


class _RequestWork(Iterator[ChunkWork]):
    """The chunks of one request on which there is something to do, one after the other."""

    def __init__(
        self,
        chunk_blocks: int,
        no_rows: tuple[int, ...],
        words: Int64Array,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        on_device: int,
        load_end: int,
        loading: Rows,
        storing: Rows,
        *,
        again: bool,
    ) -> None:
        """`words` as `Paging` has them. `again`: what is to be done when a load has failed."""
        self._size = chunk_blocks
        self._no_rows = no_rows
        self._words = words
        self._keys = keys
        self._block_ids = np.asarray(block_ids, dtype=np.int64)
        self._on_device = on_device
        self.load_end = load_end
        self._loading = loading
        self._storing = storing
        self._chunk = 0
        self._again = again

    def failed(self, key: bytes) -> None:
        """This chunk could not be loaded everywhere: compute from there on, or from the hit on the
        device on where the windows that were loaded do not reach back to there."""
        self.load_end = self._keys.index(key)
        if self._again:
            self.load_end = self._chunk = self._on_device // self._size

    def __next__(self) -> ChunkWork:
        size, blocks = self._size, len(self._words)
        while self._chunk * size < blocks:
            chunk = self._chunk
            self._chunk += 1
            work = self._work(chunk, chunk * size, min(size, blocks - chunk * size))
            if work is not None:
                return work
        raise StopIteration

    def _work(self, chunk: int, start: int, count: int) -> ChunkWork | None:
        size, loads = self._size, chunk < self.load_end
        actions = np.full(size, NOTHING, dtype=np.int64)
        cached = min(max(self._on_device - start, 0), count)
        actions[cached:count] = LOAD if loads else FILL
        key, rows, store = bytes(32), self._no_rows, False
        if count == size:
            key = self._keys[chunk]
            stored = self._storing.pop(key, None)
            store = stored is not None
            if stored is not None:
                rows = stored
            elif loads:
                rows = self._loading.get(key, rows)
                if rows == self._no_rows:
                    return None  # in every group it is before what the window needs
        if cached == count and not store:
            return None
        ids, words = self._block_ids[start : start + size], self._words[start : start + size]
        if count < size:
            ids = np.concatenate([ids[:count], np.full(size - count, -1, dtype=np.int64)])
            empty = np.zeros((size - count, words.shape[1]), dtype=np.int64)
            words = np.concatenate([words, empty])
        return ChunkWork(key, rows, store, actions, ids, words.ravel())
