"""Several policies at several capacities over the same requests, each beside LRU and Belady."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backends.policy.admission import open_admission
from backends.policy.registry import PolicyRegistry
from orchestrator.simulate.access import Access
from orchestrator.simulate.belady import Belady, Future
from orchestrator.simulate.replay import Replay, Tally, replay

LRU = "lru"
BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity, in chunks, and the two that it is measured by."""

    capacity: int
    policy: str
    result: Replay
    lru: Replay
    belady: Replay

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. `gap_closed` is None where LRU already does what Belady does."""
        total = self.result.total
        parts = {
            "first_half": (self.result.first_half, self.lru.first_half, self.belady.first_half),
            "second_half": (
                *(self.result.second_half, self.lru.second_half),
                self.belady.second_half,
            ),
        }
        return {
            "capacity": self.capacity,
            "policy": self.policy,
            **_part(total, self.lru.total, self.belady.total),
            "times_lru": total.hit_tokens / self.lru.total.hit_tokens
            if self.lru.total.hit_tokens
            else None,
            **{name: _part(*tallies) for name, tallies in parts.items()},
            "stored_chunks": self.result.stored,
            "evicted_chunks": self.result.evicted,
            "refused_chunks": self.result.refused,
            "seconds": self.result.seconds,
        }


def _part(tally: Tally, lru: Tally, belady: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "prompt_tokens": tally.prompt_tokens,
        "hit_tokens": tally.hit_tokens,
        "hit_share": tally.share,
        "gap_closed": gap_closed(tally, lru, belady),
    }


def gap_closed(tally: Tally, lru: Tally, belady: Tally) -> float | None:
    """How much of the way from LRU to Belady: 0 is LRU, 1 is Belady, below 0 is worse than LRU."""
    gap = belady.hit_tokens - lru.hit_tokens
    return (tally.hit_tokens - lru.hit_tokens) / gap if gap > 0 else None


def study(
    requests: Sequence[Access],
    policies: Sequence[str],
    capacities: Sequence[int],
    admission: str,
    tokens_per_chunk: int,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> Iterator[Row]:
    """Capacity by capacity: LRU, the others as they are named, Belady.

    LRU and Belady admit everything: they are what others are measured by. Belady is free to let a
    chunk go as soon as it is stored, so that admission would gain it nothing. `progress` is told
    what is replayed and how many requests are done, counted over all replays.
    """
    registry = PolicyRegistry()
    future = Future(requests)
    done = 0

    def run(name: str, capacity: int, admitted: str) -> Replay:
        nonlocal done
        policy = Belady(capacity, future) if name == BELADY else registry.open(name, capacity)
        before = done

        def tell(number: int) -> None:
            progress(f"{name}, {capacity:,} chunks", before + number)

        result = replay(
            requests, policy, open_admission(admitted, capacity), tokens_per_chunk, tell
        )
        done += len(requests)
        return result

    for capacity in capacities:
        lru, belady = run(LRU, capacity, "all"), run(BELADY, capacity, "all")
        yield Row(capacity, LRU, lru, lru, belady)
        for name in policies:
            if name == LRU and admission == "all":
                continue
            if name != BELADY:
                shown = name if admission == "all" else f"{name}+{admission}"
                yield Row(capacity, shown, run(name, capacity, admission), lru, belady)
        yield Row(capacity, BELADY, belady, lru, belady)


def replays(policies: Sequence[str], capacities: Sequence[int], admission: str) -> int:
    """How many replays a study takes."""
    others = [
        name for name in policies if name != BELADY and not (name == LRU and admission == "all")
    ]
    return len(capacities) * (len(others) + 2)
