"""Token ids for requests that only say which of their parts are equal.

A unit's tokens are a function of its hash, which stands for all tokens up to its end: requests that
share a prefix get the same tokens there, and others do not.
"""

from __future__ import annotations

import hashlib

import numpy as np

from orchestrator.workload.request import Request

_RESERVED = 32
"""Low token ids are often a tokenizer's own."""


def prompt_tokens(request: Request, tokens_per_hash: int, vocabulary: int, most: int) -> list[int]:
    """At most `most` token ids, each below `vocabulary`."""
    count = min(request.prompt_tokens, most)
    tokens: list[int] = []
    for unit in range(-(-count // tokens_per_hash)):
        if unit < len(request.hashes):
            seed = request.hashes[unit]
        else:
            seed = hashlib.sha256(f"{request.index}/{unit}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:16], "little")))
        low = min(_RESERVED, vocabulary - 1)
        tokens += generator.integers(low, vocabulary, tokens_per_hash).tolist()
    return tokens[:count]
