"""AIBrix's KV cache manager: its first level alone, or a second level (RocksDB, files) alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from peer_protocol import STAMP_BYTES, Bytes, Way, Work, serve

TOKENS = 16
HEADS, HEAD_SIZE = 8, 128
SLACK = 1.1


def set_up(work: Work) -> None:
    """It is configured by its environment, which it reads when it is imported."""
    name = "AIBRIX_KV_CACHE_OL"
    kind = work.options["kind"]
    os.environ |= {
        f"{name}_L1_CACHE_ENABLED": str(int(kind == "l1")),
        f"{name}_L1_CACHE_CAPACITY_GB": str(
            (work.capacity_blocks * work.block_bytes * SLACK + (64 << 20)) / (1 << 30)
        ),
        f"{name}_CHUNK_SIZE": str(work.count * TOKENS),
        f"{name}_L2_CACHE_NUM_ASYNC_WORKERS": str(work.depth),
        f"{name}_L2_CACHE_PER_TOKEN_TIMEOUT_MS": "1000",
        f"{name}_ROCKSDB_ROOT": work.directory,
        f"{name}_SHFS_ROOT": work.directory,
    }
    if kind != "l1":
        os.environ[f"{name}_L2_CACHE_BACKEND"] = kind.upper()


def open_manager(work: Work) -> Any:
    set_up(work)
    import aibrix_kvcache
    import torch
    from aibrix_kvcache import cache_manager

    logging.disable(logging.WARNING)
    # Where there is no device, memory cannot be page-locked for one.
    cache_manager.TESTING_DISABLE_PIN_MEMORY = True
    layers = work.block_bytes // (2 * TOKENS * HEADS * HEAD_SIZE * 2)
    spec = aibrix_kvcache.KVCacheBlockSpec(
        block_ntokens=TOKENS,
        block_dtype=torch.bfloat16,
        block_layout=aibrix_kvcache.KVCacheBlockLayout.LCND,
        tensor_spec=aibrix_kvcache.KVCacheTensorSpec(
            heads=list(range(HEADS)), layers=list(range(layers)), head_size=HEAD_SIZE
        ),
    )
    if spec.block_nbytes != work.block_bytes:
        raise RuntimeError(f"blocks have {spec.block_nbytes} bytes, not {work.block_bytes}")
    model = aibrix_kvcache.ModelSpec(
        max_model_len=work.count * TOKENS, max_num_batched_tokens=work.count * TOKENS
    )
    return aibrix_kvcache.BaseKVCacheManager(
        aibrix_kvcache.KVCacheConfig(spec, model, multi_threaded=True)
    )


class AibrixWay(Way):
    """What both levels share: a run of blocks is a sequence of tokens."""

    packages = ("aibrix-kvcache",)

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._manager = open_manager(work)
        import aibrix_kvcache

        self._view = aibrix_kvcache.TokenListView
        # Nobody pays for pages that were never used before.
        for slab in self._manager._allocator.slabs:
            slab[::STAMP_BYTES] = 0

    def _tokens(self, keys: Sequence[str]) -> Any:
        words = [np.frombuffer(bytes.fromhex(key), np.int32) for key in keys]
        return self._view(np.concatenate([np.resize(word, TOKENS) for word in words]))

    def _bytes(self, handle: Any) -> list[Bytes]:
        return [
            region.slab[region.addr : region.addr + region.length].numpy()
            for region in handle.memory_regions
        ]

    def close(self) -> None:
        self._manager.close()


class L1Way(AibrixWay):
    """Blocks are copied into its memory and out of it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._came = 0

    def store(self, keys: Sequence[str]) -> None:
        tokens = self._tokens(keys)
        handle = self._manager.allocate_for(None, tokens).get()
        for row, place in enumerate(self._bytes(handle)):
            place[:] = self.source[row]
        stored = self._manager.put(None, tokens, handle).get()
        if stored != len(keys) * TOKENS:
            raise RuntimeError(f"put says {stored} of {len(keys) * TOKENS} tokens")

    def load(self, keys: Sequence[str]) -> None:
        self._came = 0
        status = self._manager.acquire(None, self._tokens(keys))
        if not status.is_ok():
            return
        _, handle = status.get()
        for row, place in enumerate(self._bytes(handle)):
            self.target[row] = place
        self._came = len(handle.memory_regions)
        handle.release()

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if row < self._came else None for row in range(len(keys))]

    def done_with(self, keys: Sequence[str]) -> None:
        self._manager.delete(None, self._tokens(keys))


class L2Way(AibrixWay):
    """`depth` sequences at a time, each from and into memory of its manager."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._threads = ThreadPoolExecutor(work.depth)
        self._handles: list[Any] = []

    def _parts(self, keys: Sequence[str]) -> list[Sequence[str]]:
        size = -(-len(keys) // self.work.depth)
        return [keys[at : at + size] for at in range(0, len(keys), size)]

    def fill(self, keys: Sequence[str], write: Callable[[int, Bytes], None]) -> None:
        self._handles = []
        row = 0
        for part in self._parts(keys):
            handle = self._manager.allocate_for(None, self._tokens(part)).get()
            for place in self._bytes(handle):
                write(row, place)
                row += 1
            self._handles.append(handle)

    def store(self, keys: Sequence[str]) -> None:
        def put(part: Sequence[str], handle: Any) -> int:
            stored: int = self._manager.put(None, self._tokens(part), handle).get()
            return stored

        handles, self._handles = self._handles, []
        stored = sum(self._threads.map(put, self._parts(keys), handles))
        if stored != len(keys) * TOKENS:
            raise RuntimeError(f"put says {stored} of {len(keys) * TOKENS} tokens")

    def settle(self) -> None:
        if self.work.options["kind"] == "rocksdb":
            self._manager._l2_cache._backend.store.flush()

    def load(self, keys: Sequence[str]) -> None:
        def acquire(part: Sequence[str]) -> Any:
            status = self._manager.acquire(None, self._tokens(part))
            return status.get()[1] if status.is_ok() else None

        self._handles = list(self._threads.map(acquire, self._parts(keys)))

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        found: list[Bytes | None] = []
        for part, handle in zip(self._parts(keys), self._handles, strict=True):
            came = [] if handle is None else self._bytes(handle)
            found += [*came, *[None] * (len(part) - len(came))]
        return found

    def done_with(self, keys: Sequence[str]) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.release()
        self._handles = []

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


def make(work: Work) -> Way:
    return L1Way(work) if work.options["kind"] == "l1" else L2Way(work)


if __name__ == "__main__":
    serve(make)
