"""Our filesystem and object tiers alone, as secondary tiers of vLLM's TieringOffloadingSpec.

    "secondary_tiers": [{"type": "KvquayFilesystemTier", "module_path": "backends.vllm.tiers",
                         "paths": ["/mnt/kv"], "capacity": "100GiB"}]

Settings are those of `tiers.stack.fs` or `.object`, and three more: `revision` of the model, which
vLLM does not tell; `hash`, vLLM's prefix_caching_hash_algo; and `staging_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

import numpy as np

from backends.vllm.interface import check_interface

VLLM_VERSION: Final = check_interface()

from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import (  # noqa: E402
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from backends.config import ParallelConfig  # noqa: E402
from backends.deployment import namespace  # noqa: E402
from backends.tier.base import Bytes, TierContext  # noqa: E402
from backends.tier.registry import TierRegistry  # noqa: E402
from backends.tier.staged import Moved, StagedTier, StagingRows  # noqa: E402
from backends.vllm.hashes import none_hash  # noqa: E402
from backends.vllm.manager import RESULTS, block_key  # noqa: E402

DRAIN_S: Final = 60.0


class KvquayTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier of ours by its name. Called by the scheduler's one thread."""

    tier_name: ClassVar[str]
    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        revision: str = "",
        hash: str = "sha256",
        staging_rows: int = 64,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality[locality]
        config = offloading_spec.config
        parallel = config.parallel
        facts = {
            "engine": "vllm tiering",
            "model": [config.model.name, revision, config.model.dtype],
            "layers": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
            "cache": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
            "chunk_bytes": self.block_size_bytes,
            "sizes": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "layout": [config.kv_cache_layout, config.replicated_layout, config.canonical_layout],
            "none_hash": none_hash(hash).hex(),
        }
        fingerprint = namespace("", facts)
        rows = StagingRows(staging_rows, self.block_size_bytes)
        # For dense models vLLM says that there is one replica, whichever this is.
        replicas = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
        context = TierContext(
            fingerprint=fingerprint,
            manifest={**facts, "fingerprint": fingerprint.hex()},
            rows=rows,
            parallel=ParallelConfig(
                rank=0,
                world_size=parallel.world_size,
                tp_size=parallel.tp_size,
                pp_size=parallel.pp_size,
                pcp_size=parallel.pcp_size,
                dcp_size=parallel.dcp_size,
                data_parallel_index=parallel.data_parallel_index,
                data_parallel_size=replicas,
                data_parallel_rank_local=parallel.data_parallel_rank_local,
                data_parallel_size_local=replicas,
                node_rank=0,
                nnodes=1,
                local_rank=0,
                local_world_size=parallel.world_size,
            ),
            engine_id=config.engine_id,
        )
        entry = TierRegistry().find(self.tier_name)
        told = entry.settings(settings, tier_type)
        self._staged = StagedTier(
            lambda _: entry.open(context, told), rows, self._chunk, fingerprint
        )
        self._jobs: dict[int, list[OffloadKey]] = {}
        self._drained: list[Moved] = []

    def _chunk(self, number: int) -> Bytes:
        # The mapping is vLLM's to close, so no array of ours may live longer than a copy.
        view = np.frombuffer(self._primary_kv_view, np.uint8)
        chunk: Bytes = view.reshape(-1, self.block_size_bytes)[number]
        return chunk

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[self._staged.lookup(block_key(key))]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._staged.tier.touch([block_key(key) for key in keys])

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, job: TransferJob, *, load: bool) -> None:
        self._jobs[job.job_id] = keys = list(job.keys)
        chunks = [int(number) for number in job.chunk_ids]
        self._staged.submit(job.job_id, [block_key(key) for key in keys], chunks, load=load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        moved, self._drained = [*self._drained, *self._staged.poll()], []
        for ended in moved:
            keys = self._jobs.pop(ended.transfer)
            yield JobResult(
                ended.transfer,
                success=len(ended.done) == len(keys),
                successful_keys=[keys[at] for at in ended.done],
                transfer_time=ended.seconds,
                transfer_bytes=ended.bytes_moved,
            )

    def has_pending_work(self) -> bool:
        return self._staged.busy or bool(self._drained)

    def drain_jobs(self) -> None:
        self._drained += self._staged.drain(DRAIN_S)

    def shutdown(self) -> None:
        self._staged.close()


class KvquayFilesystemTier(KvquayTier):
    """Blocks as files, checked on every load; see docs/tiers.md."""

    tier_name = "fs"


class KvquayObjectTier(KvquayTier):
    """Blocks as objects of a bucket or a directory; see docs/tiers.md."""

    tier_name = "object"
