"""What vLLM loads: `spec_name=KvquayOffloadingSpec`, `spec_module_path=backends.vllm.spec`.

`kv_connector_extra_config` has, beside those two and `blocks_per_chunk`, a mapping `kvquay`:

    plan       path of plan.json; plan_sha256 (optional) is what that file must be
    options    instead of a path: the same, inline
    replica    data_parallel_index in the plan; "auto": vLLM's own, where it makes the replicas
    hash       vLLM's prefix_caching_hash_algo

Of sizes, ranks and indices the plan is right: vLLM tells its backends of one replica only, where
the model is dense. Where both say something they must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from backends.vllm.interface import check_interface

VLLM_VERSION: Final = check_interface()

import torch  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig  # noqa: E402

from backends.deployment import Deployment, plan_of, read_plan_file  # noqa: E402
from backends.errors import ConfigError  # noqa: E402
from backends.keywise import KeywiseStack  # noqa: E402
from backends.region.share import write_json  # noqa: E402
from backends.vllm.hashes import none_hash  # noqa: E402
from backends.vllm.manager import StackManager  # noqa: E402
from backends.vllm.place import open_as_scheduler, open_as_worker  # noqa: E402
from backends.vllm.worker import RegionWorker  # noqa: E402

COUNTS_FILE: Final = "stack.json"
"""What the stack had counted when the engine ended, in the replica's own directory."""


def layers_of(names: Sequence[str]) -> list[int]:
    """The numbers in names such as model.layers.3.self_attn.attn."""
    return sorted({int(part) for name in names for part in name.split(".") if part.isdigit()})


def find_deployment(config: OffloadingConfig) -> Deployment:
    """The replica of the plan that this engine is. Raises ConfigError where they do not agree."""
    options = config.extra_config.get("kvquay")
    if not isinstance(options, Mapping):
        raise ConfigError(
            "kv_connector_extra_config has no mapping 'kvquay'; make the command with "
            "`python launch.py action=export engine=vllm`"
        )
    if "options" in options:
        plan = plan_of(options["options"])
    else:
        plan = read_plan_file(str(options.get("plan")), options.get("plan_sha256"))
    index = options.get("replica", "auto")
    parallel = config.parallel
    if index == "auto":
        index = parallel.data_parallel_index
    if type(index) is not int or not 0 <= index < len(plan.replicas):
        raise ConfigError(
            f"replica is {index!r}, the plan has 0 to {len(plan.replicas) - 1}; start as many "
            "engines as parallel.data_parallel_size says"
        )
    deployment = Deployment(plan, index)
    wrong = deployment.differences(
        {
            "engine_id": config.engine_id,
            # vLLM waits for so many workers with each store: under external_launcher for those of
            # all its own replicas, and then none is ever complete.
            "workers of a replica": parallel.world_size,
            "tensor_parallel_size": parallel.tp_size,
            "pipeline_parallel_size": parallel.pp_size,
            "prefill_context_parallel_size": parallel.pcp_size,
            "decode_context_parallel_size": parallel.dcp_size,
            "block sizes": [group.tokens_per_block for group in config.groups],
            "tokens per hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "KV dtype": config.model.dtype,
        }
    )
    wrong += deployment.other_layers([layers_of(group.layer_names) for group in config.groups])
    if wrong:
        raise ConfigError(
            f"replica {index}: {'; '.join(wrong)}. Start vLLM with the command that action=export "
            "prints, or plan what vLLM does"
        )
    return deployment


class KvquayOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """One replica's region and tier stack, for vLLM's OffloadingConnector."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.deployment = find_deployment(config)
        self._hash = str(config.extra_config["kvquay"].get("hash", "sha256"))
        self._manager: StackManager | None = None
        self._worker: RegionWorker | None = None

    def facts(self) -> dict[str, Any]:
        """What of vLLM decides the bytes under a key, beside what the plan knows."""
        return {
            "engine": "vllm",
            "kv_cache_layout": self.config.kv_cache_layout,
            "layers": [list(group.layer_names) for group in self.config.groups],
            "none_hash": none_hash(self._hash).hex(),
        }

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            deployment, chunk = self.deployment, self.blocks_per_chunk
            region = open_as_scheduler(deployment)
            try:
                stack = deployment.open_stack(region, engine_facts=self.facts())
            except BaseException:
                region.close()
                raise

            keywise = KeywiseStack(
                stack,
                tokens_per_chunk=[tokens * chunk for tokens in self.tokens_per_block],
                windowed=[g.kind == "sliding_window" for g in deployment.plan.groups],
                steps_in_flight=1 + deployment.plan.topology.pp_size,
            )
            self._manager = StackManager(
                keywise,
                none_hash=none_hash(self._hash),
                tell=partial(write_json, deployment.directory / COUNTS_FILE),
                closed=region.close,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            plan = self.deployment.plan
            region, rank, local_rank = open_as_worker(self.deployment)
            try:
                if plan.settings.region.prefault:
                    region.prefault(local_rank)
                if torch.cpu._is_amx_tile_supported():
                    # Else the process dies of SIGILL when its first attention over bfloat16 comes
                    # before its first large matrix product: vLLM leaves it to oneDNN to ask the
                    # kernel for tile registers.
                    torch.cpu._init_amx()
                on_cuda = any(t.tensor.is_cuda for t in kv_caches.tensors)
                if on_cuda and plan.settings.region.pin == "auto":
                    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    region.pin(
                        lambda address, nbytes: int(runtime.cudaHostRegister(address, nbytes, 0)),
                        lambda address: int(runtime.cudaHostUnregister(address)),
                    )
                config = self.deployment.offload_config(rank)
                self._worker = RegionWorker(
                    kv_caches,
                    region,
                    local_rank,
                    bytes_per_block=config.worker_bytes_per_block,
                    blocks_per_chunk=self.blocks_per_chunk,
                    threads=plan.settings.engine.copy_threads,
                    kernel=plan.settings.engine.copy_kernel,
                )
            except BaseException:
                region.close()
                raise
        return self._worker
