"""Latencies in a form that can be added up over threads, ranks and replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_BUCKET_S = 1e-6
BUCKET_RATIO = 1.05


@dataclass(slots=True)
class LatencyHistogram:
    """Logarithmic buckets 5 % wide from 1 µs, so that a percentile is within 2.5 %."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        ratio = max(seconds, FIRST_BUCKET_S) / FIRST_BUCKET_S
        bucket = int(math.log(ratio) / math.log(BUCKET_RATIO))
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, other: LatencyHistogram) -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def percentile_s(self, percent: float) -> float | None:
        """The middle of the bucket in which the percentile falls; None when nothing was added."""
        wanted = math.ceil(sum(self.counts.values()) * percent / 100)
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return FIRST_BUCKET_S * float(BUCKET_RATIO ** (bucket + 0.5))
        return None
