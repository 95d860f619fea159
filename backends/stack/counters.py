"""What the stack counts of one tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.histogram import LatencyHistogram
from backends.tier.base import JobResult, Outcome


@dataclass(slots=True)
class TierCounters:
    """Lookups, hits and stores in entries; misfortunes, and what was shed, in blocks.

    `store_s` is the time in which at least one store was under way, `load_s` that in which at
    least one load was, `load_job_s` the sum over loads of what each took. `given_up` counts blocks
    whose load did not end in time, whatever the tier says of it later, `passed_over` entries that
    would have been slower to load than to compute, `no_room` those that the promotions' share of
    the region had no room for in time.
    """

    lookups: int = 0
    hits: int = 0
    stores: int = 0
    shed: int = 0
    late: int = 0
    errors: int = 0
    given_up: int = 0
    passed_over: int = 0
    no_room: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    load_job_s: float = 0.0
    load_latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def misfortunes(self, result: JobResult) -> None:
        for outcome in result.outcomes:
            self.late += outcome is Outcome.LATE
            self.shed += outcome is Outcome.SHED
            self.errors += outcome in (Outcome.CORRUPT, Outcome.FAILED)
