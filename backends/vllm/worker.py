"""A vLLM worker's half: copies blocks between its KV tensors and its slot of the region's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from backends.block import BlockKey, holds
from backends.copy import CopyHandle, GroupCopier
from backends.copy.chunks import whole_chunks
from backends.errors import ConfigError, RegionError
from backends.region.region import Region
from backends.tier.base import Bytes

Int64Array = npt.NDArray[np.int64]


@dataclass
class RowsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Rows of the region, and the keys that they are meant for: group by group, in order."""

    rows: list[int]
    keys: list[BlockKey]


class RegionWorker(OffloadingWorker):  # type: ignore[misc]
    """One worker. The stream that copies run on, and whether they overlap, is the copier's."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        region: Region,
        local_rank: int,
        *,
        bytes_per_block: Sequence[int],
        blocks_per_chunk: int,
        threads: int,
        kernel: str,
    ) -> None:
        """`bytes_per_block` are what the plan says this worker keeps, by group.

        Raises ConfigError where vLLM keeps something else.
        """
        self._region = region
        self._creator = local_rank == 0
        self._headers: Bytes | None = region.row_headers()
        self._blocks = blocks_per_chunk
        self._jobs: dict[int, list[CopyHandle]] = {}
        self._copiers: list[GroupCopier] = []
        slot = region.slot_view(local_rank)
        tensors = [
            [caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs]
            for refs in caches.group_data_refs
        ]
        found = [sum(t.shape[1] * t.element_size() for t in group) for group in tensors]
        if found != list(bytes_per_block):
            raise ConfigError(
                f"a block has {found} bytes on this worker, by KV-cache group, the plan says "
                f"{list(bytes_per_block)}; plan with this model's config.json (model=hf), vLLM's "
                "block size (engine.tokens_per_block) and KV dtype (model.dtype)"
            )
        for group in tensors:
            self._copiers.append(
                GroupCopier(
                    group,
                    block_dim=0,
                    slot=slot,
                    blocks_per_chunk=blocks_per_chunk,
                    threads=threads,
                    kernel=kernel,
                )
            )

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._submit(job_id, src_spec, dst_spec, GroupCopier.submit_store)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """`expedited` is vLLM 0.33's; copies of a group run in the order of their submission."""
        self._submit(job_id, dst_spec, src_spec, GroupCopier.submit_load)
        return True

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, rows: Any, submit: Any) -> None:
        assert isinstance(rows, RowsSpec)
        assert self._headers is not None
        for row, key in zip(rows.rows, rows.keys, strict=True):
            if not holds(self._headers[row], key):
                # Rows stay pinned until a job ends, so this is a fault of ours or of the memory;
                # vLLM knows no failed job, and a wrong block must not be served.
                raise RegionError(
                    f"row {row} of the region is not meant for block {key.hash.hex()[:16]} of "
                    f"group {key.group} any more; report it, with this replica's log"
                )
        if self._creator:
            # A name is needed until every process has mapped the region, and if there is work they
            # have.
            self._region.unlink()
        self._jobs[job_id] = [
            submit(copier, ids, np.array(at, dtype=np.int64))
            for copier, ids, at in self._batches(blocks, rows.rows)
        ]

    def _batches(
        self, spec: GPULoadStoreSpec, rows: list[int]
    ) -> Iterator[tuple[GroupCopier, Int64Array, list[int]]]:
        """By group, block ids [chunks, blocks_per_chunk] with -1 where a chunk begins before the
        blocks that are meant, or ends behind them, and the chunks' rows."""
        block, row = 0, 0
        for copier, count, first in zip(
            self._copiers, spec.group_sizes, spec.block_indices, strict=True
        ):
            ids = whole_chunks(spec.block_ids[block : block + count], first, self._blocks)
            if len(ids):
                yield copier, ids, rows[row : row + len(ids)]
            block, row = block + count, row + len(ids)
        if (block, row) != (len(spec.block_ids), len(rows)):
            raise RegionError(
                f"vLLM gave {len(spec.block_ids)} blocks for {len(rows)} rows, {block} for {row} "
                "fit each other"
            )

    def get_finished(self) -> list[TransferResult]:
        ended = [job for job, copies in self._jobs.items() if all(c.done() for c in copies)]
        results = []
        for job in ended:
            stats = [copy.wait() for copy in self._jobs.pop(job)]
            results.append(
                TransferResult(
                    job,
                    success=True,
                    transfer_size=sum(s.bytes for s in stats),
                    transfer_time=sum(s.seconds for s in stats),
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids:
            for copy in self._jobs.get(job, ()):
                copy.wait()

    def shutdown(self) -> None:
        for copier in self._copiers:
            copier.close()
        self._copiers = []
        self._headers = None
        self._region.close()
