"""vLLM's own words for what a plan decided: its arguments, its environment, its command line."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.units import parse_size
from orchestrator.plan import Plan

HASH = "sha256"
SHUTDOWN_S = 15
"""How long a server's engine has after SIGTERM. vLLM's own default is to kill it at once."""
_GIB = 1 << 30
_HERE = Path(__file__).resolve().parents[2]


def plan_path(plan: Plan) -> Path:
    return Path(plan.run.run_dir) / "plan.json"


def kv_transfer_config(plan: Plan, index: int | None) -> dict[str, Any]:
    """For `--kv-transfer-config`. `index` None: vLLM makes the replicas itself, and numbers them.

    vLLM then puts `_dp<index>` behind the engine_id, as the plan does behind the run id.
    """
    path = plan_path(plan)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": plan.run.run_id if index is None else plan.replicas[index].engine_id,
        "kv_connector_extra_config": {
            "spec_name": "KvquayOffloadingSpec",
            "spec_module_path": "backends.vllm.spec",
            "blocks_per_chunk": plan.cache.blocks_per_chunk,
            "offload_prompt_only": False,
            "kvquay": {
                "plan": str(path),
                "plan_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "replica": "auto" if index is None else index,
                "hash": HASH,
            },
        },
    }


def engine_arguments(plan: Plan) -> dict[str, Any]:
    """What every replica's engine is given, by the names of vLLM's engine arguments."""
    engine, sizes = plan.settings.engine, plan.topology
    vllm = engine.vllm
    found: dict[str, Any] = {
        "model": engine.model,
        "dtype": plan.model.dtype,
        "kv_cache_dtype": "auto",
        "load_format": vllm.load_format,
        "block_size": plan.cache.tokens_per_block,
        "num_gpu_blocks_override": plan.device_blocks,
        "prefix_caching_hash_algo": HASH,
        "tensor_parallel_size": sizes.tp_size,
        "pipeline_parallel_size": sizes.pp_size,
        "decode_context_parallel_size": sizes.dcp_size,
        "max_num_seqs": vllm.max_num_seqs,
        "enforce_eager": vllm.enforce_eager,
    }
    # -1: as long as the model and the device cache allow.
    found["max_model_len"] = -1 if vllm.max_model_len is None else vllm.max_model_len
    return found


def environment(plan: Plan, index: int) -> dict[str, str]:
    """What a replica's engine must find in its environment, beside its owner's own."""
    replica = plan.replicas[index]
    if plan.settings.engine.device == "cuda":
        devices = ",".join(str(worker.device_index) for worker in replica.workers)
        return {"CUDA_VISIBLE_DEVICES": devices}
    cache_bytes = parse_size(plan.settings.engine.device_cache_size)
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-cache_bytes // _GIB))),
        # Left to itself every replica binds its threads to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def serve_command(plan: Plan, index: int | None, program: Sequence[str]) -> str:
    """`vllm serve` of one replica, ready for a shell; None: one that makes all replicas itself.

    `program` are the words before the model's name.
    """
    arguments = engine_arguments(plan)
    settings = environment(plan, index or 0)
    port = plan.settings.engine.vllm.port + (index or 0)
    if index is None:
        arguments["data_parallel_size"] = plan.topology.data_parallel_size
        settings.pop("CUDA_VISIBLE_DEVICES", None)
    if (_HERE / "pyproject.toml").is_file():  # kvquay is not installed, but run from its source
        settings["PYTHONPATH"] = str(_HERE)
    words = [*program, str(arguments.pop("model"))]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, str(value)]
    words += ["--port", str(port), "--shutdown-timeout", str(SHUTDOWN_S)]
    words += ["--kv-transfer-config", json.dumps(kv_transfer_config(plan, index))]
    return shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *words])
