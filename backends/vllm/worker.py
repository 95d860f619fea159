"""A vLLM worker's half: vLLM's calls, and its types, for `backends.transfers`."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from backends.region.region import Region
from backends.transfers import Blocks, SlotTransfers
from backends.vllm.manager import RowsSpec


class RegionWorker(OffloadingWorker):  # type: ignore[misc]
    """One worker over its replica's region, which `shutdown` closes."""

    def __init__(
        self, caches: CanonicalKVCaches, region: Region, local_rank: int, **settings: Any
    ) -> None:
        """`settings` are those of SlotTransfers, which says what is refused."""
        tensors = [
            [caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs]
            for refs in caches.group_data_refs
        ]
        self._transfers = SlotTransfers(region, local_rank, tensors, **settings)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, load=False)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """`expedited` is vLLM 0.33's; copies of a group run in the order of their submission."""
        return self._submit(job_id, dst_spec, src_spec, load=True)

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, rows: Any, *, load: bool) -> bool:
        # vLLM knows no failed job: what cannot be done is an error here, and ends the engine.
        assert isinstance(rows, RowsSpec)
        told = Blocks(np.asarray(blocks.block_ids), blocks.group_sizes, blocks.block_indices)
        self._transfers.submit(job_id, told, rows.rows, rows.keys, load=load)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                ended.job_id,
                success=True,
                transfer_size=ended.nbytes,
                transfer_time=ended.seconds,
            )
            for ended in self._transfers.poll()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.close()
