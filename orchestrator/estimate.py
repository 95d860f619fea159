"""What a user of the engine would have waited for the first token, as far as a run tells.

The reference engine computes nothing, so a run has no time to the first token of its own. Its
estimate is what a request had to compute, at `workload.tokens_per_s`, and what it waited for loads:

    ttft = (prompt tokens - hit tokens) / requests / tokens_per_s  +  load seconds / requests

Load seconds are, for each replica, those in which its slowest rank copied out of the region and
those in which the leader had a load from a lower tier under way. Queueing is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any


def ttft_s(results: Sequence[Mapping[str, Any]], tokens_per_s: float) -> dict[str, Any] | None:
    """Mean seconds to the first token over all requests, and its two parts; None without requests.
    Where an engine measured it (vLLM), `measured_s` is the mean of that."""
    requests = sum(result["stats"]["requests"] for result in results)
    if not requests:
        return None
    uncached = sum(_uncached(result["stats"]) for result in results)
    loading_s = sum(_loading_s(result) for result in results)
    measured = [s for result in results for s in (result.get("vllm") or {}).get("ttft_s", ())]
    compute_s = uncached / requests / tokens_per_s
    return {
        "mean_s": compute_s + loading_s / requests,
        "compute_s": compute_s,
        "load_s": loading_s / requests,
        "without_cache_s": _prompt(results) / requests / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "measured_s": mean(measured) if measured else None,
    }


def _prompt(results: Sequence[Mapping[str, Any]]) -> int:
    return sum(result["stats"]["prompt_tokens"] for result in results)


def _uncached(stats: Mapping[str, Any]) -> int:
    hits = stats["hit_tokens_device"] + stats["hit_tokens_shm"]
    return max(0, int(stats["prompt_tokens"] - hits - sum(stats["hit_tokens_below"].values())))


def _loading_s(result: Mapping[str, Any]) -> float:
    slowest_s = max((float(w["stats"]["loaded_s"]) for w in result["workers"]), default=0.0)
    return slowest_s + sum(float(tier["load_s"]) for tier in result["lower_tiers"].values())


def load_bytes_per_s(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Bytes that came into the devices over the time that was waited for them, summed over the
    replicas, which wait beside each other; None where nothing was loaded."""
    rates = []
    for result in results:
        loaded = sum(worker["stats"]["loaded_bytes"] for worker in result["workers"])
        waited_s = _loading_s(result)
        if loaded and waited_s > 0:
            rates.append(loaded / waited_s)
    return sum(rates) if rates else None
