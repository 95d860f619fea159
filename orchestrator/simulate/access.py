"""Requests as a cache of chunks sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from orchestrator.workload.request import Request
from orchestrator.workload.spec import WorkloadSpec
from orchestrator.workload.trace_line import MOONCAKE_TOKENS_PER_ID


@dataclass(frozen=True, slots=True)
class Access:
    """One request. `keys` are those of its full chunks, the answer's among them where they are
    known; only the first `may_hit` can stand in the prompt before its last token, which an engine
    always computes."""

    arrival_s: float
    prompt_tokens: int
    keys: tuple[bytes, ...]
    may_hit: int


def hash_tokens(spec: WorkloadSpec, tokens_per_chunk: int) -> int:
    """The largest unit of hashing that chunks of this size can be made of: it is the least work."""
    if spec.kind == "trace":
        return gcd(tokens_per_chunk, MOONCAKE_TOKENS_PER_ID)
    return tokens_per_chunk


def accesses(
    requests: Iterable[Request], tokens_per_hash: int, tokens_per_chunk: int
) -> Iterator[Access]:
    """A chunk's key is the hash at its end; a piece that fills no chunk has none."""
    step = tokens_per_chunk // tokens_per_hash
    for request in requests:
        keys = request.hashes if step == 1 else request.hashes[step - 1 :: step]
        may_hit = min(len(keys), (request.prompt_tokens - 1) // tokens_per_chunk)
        yield Access(request.arrival_s, request.prompt_tokens, keys, may_hit)
