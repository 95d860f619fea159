"""A replica's numbers at one moment, as plain frozen data.

Whoever serves the numbers reads a snapshot, never what the leader is changing. `TierSnapshot.below`
and `region` take the very dictionaries that a run's report is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank moved into and out of a tier. `latency` counts loads by the buckets of
    `LatencyHistogram`, `latency_s` is their sum."""

    rank: int
    stored_bytes: int
    loaded_bytes: int
    store_s: float
    load_s: float
    latency: Mapping[int, int]
    latency_s: float


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier. Counts are since the start. None: the tier has no such thing.

    `counts` are by the name of `families.COUNTS`; a tier has those that it can have. Bytes are what
    is in the tier, of all who share it.
    """

    name: str
    counts: Mapping[str, int]
    moved: tuple[Moved, ...]
    used_bytes: int
    blocks: int
    never_read: int
    capacity_bytes: int | None
    pinned_bytes: int | None = None
    oldest_s: float | None = None
    breaker_open: bool | None = None

    @classmethod
    def below(cls, name: str, report: Mapping[str, Any]) -> TierSnapshot:
        """A tier under the region, from its part of `TierStack.report()`. Its leader, rank 0,
        moves all bytes."""
        usage, own = report["usage"], report["own"]
        counts = {
            "lookups": report["lookups"],
            "hits": report["hits"],
            "stores": report["stores"],
            "evictions": report["evictions"],
            "errors": report["errors"],
            "shed": report["shed"],
            "corrupt": report["corrupt"],
            "quarantined": own.get("quarantined", 0),
            "late": report["late"],
            "given_up": report["given_up"],
            "passed_over": report["passed_over"],
            "no_room": report["no_room"],
            "breaker_opened": report["breaker_opened"],
        }
        moved = Moved(
            0,
            report["stored_bytes"],
            report["loaded_bytes"],
            report["store_s"],
            report["load_s"],
            _buckets(report["load_latency"]),
            report["load_job_s"],
        )
        return cls(
            name,
            counts,
            (moved,),
            used_bytes=usage["bytes"],
            blocks=usage["blocks"],
            never_read=report["never_read"],
            capacity_bytes=usage["capacity_bytes"],
            oldest_s=usage["oldest_s"],
            breaker_open=report["breaker"] != "closed",
        )

    @classmethod
    def region(
        cls, name: str, report: Mapping[str, Any], row_bytes: int, moved: tuple[Moved, ...]
    ) -> TierSnapshot:
        """The region, from `TierStack.region_report()`, and what each rank copied."""
        counts = {
            "lookups": report["lookups"],
            "hits": report["hits"],
            "stores": report["stored"],
            "evictions": report["evictions"],
            "errors": report["errors"],
            "shed": report["skipped_stores"],
        }
        return cls(
            name,
            counts,
            moved,
            used_bytes=report["rows_used"] * row_bytes,
            blocks=report["rows_used"],
            never_read=report["never_read"],
            capacity_bytes=report["rows"] * row_bytes,
            pinned_bytes=report["rows_pinned"] * row_bytes,
            oldest_s=report["oldest_s"],
        )


def copied(rank: int, stats: Mapping[str, Any]) -> Moved:
    """What a worker copied, from its counts as the report has them."""
    return Moved(
        rank,
        stats["stored_bytes"],
        stats["loaded_bytes"],
        stats["stored_s"],
        stats["loaded_s"],
        _buckets(stats["load_latency"]),
        stats["loaded_s"],
    )


def _buckets(histogram: Mapping[str, Any]) -> dict[int, int]:
    return {int(bucket): count for bucket, count in histogram["counts"].items()}


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica. `ended`: it serves no more, and these are the last values. `engine` counts by
    the name of `families.ENGINE_COUNTS`, `events` by that of `families.EVENT_COUNTS`; both may be
    empty. `taken_s` is in seconds since the epoch."""

    replica: int
    engine_id: str
    model: str
    taken_s: float
    ended: bool
    tiers: tuple[TierSnapshot, ...]
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
