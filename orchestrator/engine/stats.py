"""What a worker counts, in a form that can be added up over ranks and replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.histogram import LatencyHistogram


@dataclass(slots=True)
class WorkerStats:
    """One worker's counts. Bytes are this worker's own; seconds are spent in copies alone.

    A checked block is one block of one layer group whose loaded bytes were compared. Tokens that
    were computed are counted by every rank, whatever part of them it holds.
    """

    stored_bytes: int = 0
    stored_s: float = 0.0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    computed_tokens: int = 0
    computed_s: float = 0.0
    blocks_checked: int = 0
    blocks_wrong: int = 0
    refused_rows: int = 0
    load_latency: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(slots=True)
class ReplicaStats:
    """What a leader counts. Tokens are of prompts, of requests that were taken."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens_device: int = 0
    hit_tokens_shm: int = 0
    hit_tokens_below: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    skipped_lines: int = 0

    @property
    def hit_tokens(self) -> int:
        """Of all sources together."""
        below = sum(self.hit_tokens_below.values())
        return self.hit_tokens_device + self.hit_tokens_shm + below
