"""LMCache's adapters of its second level (`fs`, `fs_native`, `s3`), and its first level."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects, wait_eventfd
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from peer_protocol import Bytes, Way, Work, serve

WAIT_S = 120.0
SLACK = 1.1


def key_of(key: str) -> ObjectKey:
    return ObjectKey(chunk_hash=bytes.fromhex(key), model_name="bench", kv_rank=0)


def l2_config(work: Work) -> Any:
    direct = bool(work.options.get("direct"))
    if work.options["kind"] == "fs":
        return FSL2AdapterConfig(work.directory, use_odirect=direct)
    if work.options["kind"] == "fs_native":
        return FSNativeL2AdapterConfig(work.directory, num_workers=work.depth, use_odirect=direct)
    from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2AdapterConfig

    # It knows no path-style requests: the bucket is the first part of the host's name.
    return S3L2AdapterConfig(
        s3_endpoint=work.options["virtual_host"],
        s3_region=work.options["region"],
        s3_prefer_http2=False,
        disable_tls=True,
        aws_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
    )


class L2Way(Way):
    """`depth` tasks are in flight, each with its part of the blocks."""

    packages = ("lmcache",)

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._adapter = create_l2_adapter(l2_config(work))
        self._from, self._into = self._objects(self.source), self._objects(self.target)
        self._came: set[int] = set()

    def _objects(self, memory: Bytes) -> list[Any]:
        whole = torch.from_numpy(memory)
        return make_memory_objects(whole, self.work.count, self.work.block_bytes, 0)

    def _parts(self, count: int) -> list[range]:
        return [range(at, count, self.work.depth) for at in range(min(count, self.work.depth))]

    def store(self, keys: Sequence[str]) -> None:
        named = [key_of(key) for key in keys]
        left = {
            self._adapter.submit_store_task([named[i] for i in part], [self._from[i] for i in part])
            for part in self._parts(len(keys))
        }
        while left:
            self._wait(self._adapter.get_store_event_fd())
            for task, result in self._adapter.pop_completed_store_tasks().items():
                left.discard(task)
                if not result.is_successful():
                    raise RuntimeError("a store task says that it failed")

    def load(self, keys: Sequence[str]) -> None:
        named = [key_of(key) for key in keys]
        self._came = set()
        left = {
            self._adapter.submit_load_task(
                [named[i] for i in part], [self._into[i] for i in part]
            ): part
            for part in self._parts(len(keys))
        }
        while left:
            self._wait(self._adapter.get_load_event_fd())
            for task, part in list(left.items()):
                found = self._adapter.query_load_result(task)
                if found is not None:
                    self._came |= {part[i] for i in found.get_indices_list()}
                    del left[task]

    def _wait(self, descriptor: int) -> None:
        if not wait_eventfd(descriptor, WAIT_S):
            raise RuntimeError(f"nothing ended in {WAIT_S:.0f} s")

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if row in self._came else None for row in range(len(keys))]

    def close(self) -> None:
        self._adapter.close()


class L1Way(Way):
    """Blocks are copied into its memory and out of it, as its engine side does with a device's."""

    packages = ("lmcache",)

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        size = int(work.capacity_blocks * work.block_bytes * SLACK) + (64 << 20)
        self._l1 = L1Manager(
            L1ManagerConfig(
                L1MemoryManagerConfig(
                    size, use_lazy=False, shm_name=f"kvquay_bench_lmcache_{os.getpid()}"
                )
            )
        )
        self._layout = MemoryLayoutDesc([torch.Size([work.block_bytes])], [torch.uint8])
        self._came: list[bool] = []

    def _bytes(self, memory: Any) -> Bytes:
        found: Bytes = memory.raw_data.view(-1)[: self.work.block_bytes].numpy()
        return found

    def store(self, keys: Sequence[str]) -> None:
        named = [key_of(key) for key in keys]
        reserved = self._l1.reserve_write(named, [False] * len(named), self._layout)
        for row, key in enumerate(named):
            error, memory = reserved[key]
            if error != L1Error.SUCCESS:
                raise RuntimeError(f"reserve_write says {error}")
            self._bytes(memory)[:] = self.source[row]
        errors = self._l1.finish_write(named).values()
        if any(error != L1Error.SUCCESS for error in errors):
            raise RuntimeError(f"finish_write says {set(errors)}")

    def load(self, keys: Sequence[str]) -> None:
        named = [key_of(key) for key in keys]
        found = self._l1.reserve_read(named)
        self._came = [found[key][0] == L1Error.SUCCESS for key in named]
        there = [key for key, came in zip(named, self._came, strict=True) if came]
        for row, key in enumerate(named):
            if self._came[row]:
                self.target[row] = self._bytes(found[key][1])
        self._l1.finish_read(there)

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if came else None for row, came in enumerate(self._came)]

    def done_with(self, keys: Sequence[str]) -> None:
        self._l1.delete([key_of(key) for key in keys])

    def close(self) -> None:
        self._l1.close()


def make(work: Work) -> Way:
    kinds: dict[str, Callable[[Work], Way]] = {"l1": L1Way}
    return kinds.get(work.options["kind"], L2Way)(work)


if __name__ == "__main__":
    serve(make)
