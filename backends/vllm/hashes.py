"""What vLLM's block hashes are chained from: it decides whether two processes' keys agree."""

from __future__ import annotations

import os
from typing import Final

from backends.errors import ConfigError

AGREEING: Final = ("sha256", "sha256_cbor")


def none_hash(algorithm: str) -> bytes:
    """The hash before a sequence's first block, as vLLM will derive it in this process.

    Raises ConfigError for an algorithm by which another process would have other keys.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    if algorithm not in AGREEING:
        raise ConfigError(
            f"hash is {algorithm!r}, expected {' or '.join(AGREEING)}: with another algorithm vLLM "
            "names equal blocks differently in every process, or may name two blocks alike; set "
            "--prefix-caching-hash-algo sha256"
        )
    if os.environ.get("PYTHONHASHSEED") == "random":
        raise ConfigError(
            "PYTHONHASHSEED is 'random': set one number for all engines, or do not set it"
        )
    function = get_hash_fn_by_name(algorithm)
    return bytes(function(resolve_none_hash_seed(function)))
