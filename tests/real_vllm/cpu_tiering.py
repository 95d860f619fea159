"""vLLM's own TieringOffloadingSpec on the CPU, where vLLM brings no worker for it.

All but the copies between KV tensors and chunks is vLLM's: scheduler, primary tier, its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from backends.copy import CopyStats, GroupCopier
from backends.copy.chunks import whole_chunks


class CpuWorker(OffloadingWorker):
    """Of one KV-cache group. Copies at once."""

    def __init__(
        self, caches: CanonicalKVCaches, region: SharedOffloadRegion, chunk_blocks: int
    ) -> None:
        self._region = region
        self._blocks = chunk_blocks
        self._ended: list[TransferResult] = []
        [refs] = caches.group_data_refs
        self._copier = GroupCopier(
            [caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs],
            block_dim=0,
            slot=np.frombuffer(region.mmap_obj, np.uint8).reshape(region.num_chunks, -1),
            blocks_per_chunk=chunk_blocks,
        )

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        ids, chunks = self._batch(src_spec, dst_spec)
        return self._end(job_id, self._copier.store(ids, chunks))

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        ids, chunks = self._batch(dst_spec, src_spec)
        return self._end(job_id, self._copier.load(ids, chunks))

    def _batch(self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec) -> tuple[Any, Any]:
        [first] = blocks.block_indices
        ids = whole_chunks(np.asarray(blocks.block_ids), first, self._blocks)
        return ids, np.asarray(chunks.chunk_ids, dtype=np.int64)

    def _end(self, job_id: int, stats: CopyStats) -> bool:
        self._ended.append(
            TransferResult(
                job_id, success=True, transfer_size=stats.bytes, transfer_time=stats.seconds
            )
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._copier.close()
        del self._copier
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
