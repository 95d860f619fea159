"""A snapshot in Prometheus' terms: every name, its meaning, its labels.

Names are `kvquay_...`; all of a replica's samples have `replica`, its data-parallel index. Counters
end in `_total`, as Prometheus wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from backends.histogram import BUCKET_RATIO, FIRST_BUCKET_S
from backends.metrics.snapshot import ReplicaSnapshot, TierSnapshot

PREFIX: Final = "kvquay_"

# Counters by tier: name here and in a snapshot, meaning.
COUNTS: Final = {
    "lookups": "Entries that a tier was asked for.",
    "hits": "Entries that a tier had and gave.",
    "stores": "Entries that were stored, those included that were there already.",
    "evictions": "Blocks that went to make room; in the region, entries.",
    "errors": "Blocks that could not be stored or loaded, or were found wrong.",
    "shed": "Stores that were given up for want of room or time; in the region, entries.",
    "corrupt": "Blocks that were found damaged.",
    "quarantined": "Damaged blocks that were put aside.",
    "late": "Deadline misses: blocks that a tier did not look up, store or load in time.",
    "given_up": "Deadline misses: blocks whose load nobody waited for any longer.",
    "passed_over": "Entries that would have been slower to load than to compute.",
    "no_room": "Entries that the promotions' share of the region had no room for in time.",
    "breaker_opened": "How often a tier was taken out because all of its jobs failed.",
}
MOVED: Final = {
    "stored_bytes": "Bytes that a rank moved into a tier.",
    "loaded_bytes": "Bytes that a rank moved out of a tier.",
    "store_seconds": "Time in which a rank was storing.",
    "load_seconds": "Time in which a rank was loading.",
}
GAUGES: Final = {
    "used_bytes": "What a tier holds, of all who share it.",
    "blocks": "Blocks that a tier holds, of all who share it; in the region, rows.",
    "capacity_bytes": "What a tier may hold; missing where there is no limit.",
    "fill_ratio": "Used part of the capacity.",
    "pinned_bytes": "What cannot be evicted now, because a transfer uses it.",
    "pinned_ratio": "Pinned part of the capacity.",
    "oldest_block_seconds": "How long ago the block that would go first was used; in the region, "
    "how long ago the entry that has been there longest came.",
    "never_read_blocks": "Blocks that were written to a tier since the start and that this "
    "replica has not read from it, whether they are still there or not.",
    "breaker_open": "1 while a tier is taken out.",
}
ENGINE_COUNTS: Final = {
    "requests": "Requests that were served.",
    "requests_rejected": "Requests that were longer than the device cache.",
    "prompt_tokens": "Prompt tokens of the requests that were served.",
    "output_tokens": "Output tokens of the requests that were served.",
    "steps": "Steps of the engine.",
}
EVENT_COUNTS: Final = {
    "event_batches": "Batches of KV events that were sent.",
    "event_batches_dropped": "Batches of KV events that found the queue full.",
    "event_blocks_dropped": "Block hashes in the batches that were dropped.",
    "event_batches_replayed": "Batches of KV events that were sent again to who asked.",
}
HIT_TOKENS: Final = "hit_tokens"
LATENCY: Final = "load_latency_seconds"
ENDED: Final = "ended"
TAKEN: Final = "snapshot_timestamp_seconds"
INFO: Final = "replica_info"

LATENCY_BOUNDS_S: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def families(snapshot: ReplicaSnapshot) -> Iterator[Metric]:
    """All metrics of a snapshot."""
    replica = str(snapshot.replica)
    info = GaugeMetricFamily(
        PREFIX + INFO,
        "Which replica this is; always 1.",
        labels=("replica", "engine_id", "model"),
    )
    info.add_metric((replica, snapshot.engine_id, snapshot.model), 1)
    yield info
    for name, value, meaning in (
        (ENDED, float(snapshot.ended), "1 when the replica serves no more: these are the last."),
        (TAKEN, snapshot.taken_s, "When these values were taken, since the epoch."),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=("replica",))
        gauge.add_metric((replica,), value)
        yield gauge
    for meanings, values in (
        (ENGINE_COUNTS, snapshot.engine),
        (EVENT_COUNTS, snapshot.events),
    ):
        for name in meanings:
            if name in values:
                counter = CounterMetricFamily(PREFIX + name, meanings[name], labels=("replica",))
                counter.add_metric((replica,), values[name])
                yield counter
    tokens = CounterMetricFamily(
        PREFIX + HIT_TOKENS,
        "Prompt tokens that were found, by where.",
        labels=("replica", "source"),
    )
    for source, count in snapshot.hit_tokens.items():
        tokens.add_metric((replica, source), count)
    yield tokens
    yield from _by_tier(replica, snapshot.tiers)
    yield from _by_rank(replica, snapshot.tiers)


def _by_tier(replica: str, tiers: tuple[TierSnapshot, ...]) -> Iterator[Metric]:
    labels = ("replica", "tier")
    for name, meaning in COUNTS.items():
        counter = CounterMetricFamily(PREFIX + name, meaning, labels=labels)
        for tier in tiers:
            if name in tier.counts:
                counter.add_metric((replica, tier.name), tier.counts[name])
        yield counter
    for name, meaning in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=labels)
        for tier in tiers:
            value = _gauge(tier, name)
            if value is not None:
                gauge.add_metric((replica, tier.name), value)
        yield gauge


def _gauge(tier: TierSnapshot, name: str) -> float | None:
    if name == "fill_ratio":
        return _part(tier.used_bytes, tier.capacity_bytes)
    if name == "pinned_ratio":
        return _part(tier.pinned_bytes, tier.capacity_bytes)
    if name == "oldest_block_seconds":
        return tier.oldest_s
    if name == "never_read_blocks":
        return tier.never_read
    value: float | None = getattr(tier, name)
    return None if value is None else float(value)


def _part(nbytes: int | None, capacity_bytes: int | None) -> float | None:
    return nbytes / capacity_bytes if nbytes is not None and capacity_bytes else None


def _by_rank(replica: str, tiers: tuple[TierSnapshot, ...]) -> Iterator[Metric]:
    labels = ("replica", "tier", "rank")
    counters = {
        name: CounterMetricFamily(PREFIX + name, meaning, labels=labels)
        for name, meaning in MOVED.items()
    }
    latency = HistogramMetricFamily(
        PREFIX + LATENCY,
        "Time of one load: in the region a rank's copies of one step, below it one batch.",
        labels=labels,
    )
    for tier in tiers:
        for moved in tier.moved:
            of = (replica, tier.name, str(moved.rank))
            counters["stored_bytes"].add_metric(of, moved.stored_bytes)
            counters["loaded_bytes"].add_metric(of, moved.loaded_bytes)
            counters["store_seconds"].add_metric(of, moved.store_s)
            counters["load_seconds"].add_metric(of, moved.load_s)
            latency.add_metric(of, cumulative(moved.latency), moved.latency_s)
    yield from counters.values()
    yield latency


def cumulative(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """Buckets of `LatencyHistogram` as Prometheus has them: how many were at most so long.

    A latency counts by the upper end of its own bucket, which is at most 5 % above it.
    """
    found = []
    left = sorted(counts)
    seen = 0
    for bound_s in LATENCY_BOUNDS_S:
        while left and FIRST_BUCKET_S * BUCKET_RATIO ** (left[0] + 1) <= bound_s:
            seen += counts[left.pop(0)]
        found.append((str(bound_s), float(seen)))
    found.append(("+Inf", float(seen + sum(counts[bucket] for bucket in left))))
    return found


def names() -> set[str]:
    """The name of every series that there can be, as a scrape or a query has it."""
    counters = (*COUNTS, *MOVED, *ENGINE_COUNTS, *EVENT_COUNTS, HIT_TOKENS)
    series = {f"{name}_total" for name in counters}
    series |= {*GAUGES, ENDED, TAKEN, INFO}
    series |= {f"{LATENCY}_{part}" for part in ("bucket", "sum", "count")}
    return {PREFIX + name for name in series}
