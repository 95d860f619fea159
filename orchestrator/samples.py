"""What of a replica is sampled over time. Names are `what` or `tier.what`, the region's tier `shm`.

Made of the stack's own counters without copying them, so that a sample costs microseconds.
"""

from __future__ import annotations

from typing import Final

from backends.stack.observer import NODE, PRIMARY
from backends.stack.stack import TierStack
from orchestrator.engine.stats import ReplicaStats, WorkerStats

MISFORTUNES: Final = ("errors", "shed", "late", "given_up", "no_room")
"""Of the tiers under the region, one count each; `faults` is their sum."""


def counts_of(stack: TierStack, stats: ReplicaStats, worker: WorkerStats) -> dict[str, float]:
    """What only grows. The region's bytes and seconds are those of `worker` alone, the bytes of
    the tiers under it are all."""
    region = stack.counters
    found: dict[str, float] = {
        "requests": stats.requests,
        "prompt_tokens": stats.prompt_tokens,
        "hit_tokens.device": stats.hit_tokens_device,
        f"hit_tokens.{PRIMARY}": stats.hit_tokens_shm,
        f"{PRIMARY}.stored_bytes": worker.stored_bytes,
        f"{PRIMARY}.loaded_bytes": worker.loaded_bytes,
        f"{PRIMARY}.store_s": worker.stored_s,
        f"{PRIMARY}.load_s": worker.loaded_s,
        f"{PRIMARY}.evictions": region.evictions,
        f"{PRIMARY}.faults": region.errors + region.skipped_stores,
        "blocks_wrong": worker.blocks_wrong,
    }
    evicted = stack.evicted()
    for name, tier in stack.tier_counters.items():
        found |= {
            f"hit_tokens.{name}": stats.hit_tokens_below.get(name, 0),
            f"{name}.stored_bytes": tier.stored_bytes,
            f"{name}.loaded_bytes": tier.loaded_bytes,
            f"{name}.store_s": tier.store_s,
            f"{name}.load_s": tier.load_s,
            f"{name}.evictions": evicted[name],
            f"{name}.faults": sum(getattr(tier, what) for what in MISFORTUNES),
        }
    if stack.shares_rows:
        found[f"hit_tokens.{NODE}"] = stats.hit_tokens_below.get(NODE, 0)
    return found


def levels_of(stack: TierStack) -> dict[str, float]:
    """What goes up and down: rows of the region that are used and pinned, blocks on their way to
    and from each tier under it, and bytes that lie there."""
    index = stack.index
    found: dict[str, float] = {
        f"{PRIMARY}.rows_used": index.rows_used,
        f"{PRIMARY}.rows_pinned": index.rows_pinned,
    }
    used = stack.used_bytes()
    for name, (storing, loading) in stack.under_way().items():
        found |= {
            f"{name}.storing": storing,
            f"{name}.loading": loading,
            f"{name}.used_bytes": used[name],
        }
    return found
