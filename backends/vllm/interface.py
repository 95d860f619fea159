"""Which vLLM this adapter fits, found out before anything of it is used.

vLLM calls its offloading interface experimental. What the adapter stands on is named here, name by
name, so that a vLLM in which it has changed is refused at start with the versions, and not in the
middle of a request.
"""

from __future__ import annotations

from typing import Final

from backends.errors import KvquayError
from backends.interface import Needed, mismatches

TESTED: Final = ("0.32.0",)
"""Versions that the tests ran against."""

_BASE: Final = "vllm.v1.kv_offload.base"
_SPEC, _MANAGER, _WORKER = "OffloadingSpec", "OffloadingManager", "OffloadingWorker"
_METHODS: Final[dict[str, tuple[str, ...]]] = {
    f"{_SPEC}.get_manager": (),
    f"{_SPEC}.get_worker": ("kv_caches",),
    f"{_MANAGER}.lookup": ("key", "req_context"),
    f"{_MANAGER}.get_load_source": ("key", "req_context"),
    f"{_MANAGER}.prepare_load": ("keys", "req_context"),
    f"{_MANAGER}.complete_load": ("keys", "req_context"),
    f"{_MANAGER}.prepare_store": ("keys", "req_context"),
    f"{_MANAGER}.complete_store": ("keys", "req_context", "success"),
    f"{_MANAGER}.on_new_request": ("req_context",),
    f"{_MANAGER}.on_schedule_end": ("context",),
    f"{_MANAGER}.has_pending_work": (),
    f"{_MANAGER}.reset_cache": (),
    f"{_MANAGER}.shutdown": (),
    f"{_WORKER}.submit_store": ("job_id", "src_spec", "dst_spec"),
    f"{_WORKER}.submit_load": ("job_id", "src_spec", "dst_spec"),
    f"{_WORKER}.get_finished": (),
    f"{_WORKER}.wait": ("job_ids",),
    "ReqContext.get_offload_key_position": ("key",),
}
_NEEDED: Final[tuple[Needed, ...]] = (
    *((_BASE, name, ("self", *taken)) for name, taken in _METHODS.items()),
    (_BASE, _SPEC, ("config",)),
    (_BASE, "GPULoadStoreSpec", ("block_ids", "group_sizes", "block_indices")),
    (_BASE, "PrepareStoreOutput", ("keys_to_store", "store_spec", "evicted_keys")),
    (_BASE, "TransferResult", ("job_id", "success", "transfer_size", "transfer_time")),
    (_BASE, "make_offload_key", ("block_hash", "group_idx")),
    ("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed", ("hash_fn",)),
    ("vllm.utils.hashing", "get_hash_fn_by_name", ()),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource", ()),
)


class VllmMismatch(KvquayError):
    """This vLLM's offloading interface is not the one that the adapter was written for."""


def check_interface() -> str:
    """The vLLM's version. Raises VllmMismatch with everything that does not match."""
    from vllm.version import __version__ as found

    if wrong := mismatches(_NEEDED):
        raise VllmMismatch(
            f"vLLM {found} has another offloading interface than the one this adapter knows: "
            f"{'; '.join(wrong)}. Found vLLM {found}, expected {' or '.join(TESTED)}; install that "
            "one, or a kvquay that knows yours"
        )
    return str(found)
