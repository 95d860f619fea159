"""How a stack places blocks: edges between its tiers, deadlines, shares of the region."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from backends.errors import ConfigError

WRITE_THROUGH: Final = "write_through"
WRITE_ON_EVICT: Final = "write_on_evict"
WRITE_AFTER_HITS: Final = "write_after_hits"
NONE: Final = "none"
FASTEST: Final = "fastest"
RECOMPUTE_IF_SLOWER: Final = "recompute_if_slower"
LOAD_FROM: Final = (FASTEST, RECOMPUTE_IF_SLOWER)
EDGE_WORDS: Final = (WRITE_THROUGH, WRITE_ON_EVICT, f"{WRITE_AFTER_HITS}:N", NONE)

_AFTER_HITS = re.compile(rf"{WRITE_AFTER_HITS}\s*:\s*([1-9][0-9]{{0,8}})")


@dataclass(frozen=True, slots=True)
class Edge:
    """When a block goes from one tier into the next below.

    write_through: as soon as it is above. write_on_evict: when the tier above gives it up; only
    the region can say when that is. write_after_hits: at its `hits`-th use above. none: never.
    """

    kind: str = WRITE_THROUGH
    hits: int = 0

    @classmethod
    def parse(cls, text: str) -> Edge:
        """`write_through`, `write_on_evict`, `write_after_hits:3`, `none`. Raises ConfigError."""
        if text in (WRITE_THROUGH, WRITE_ON_EVICT, NONE):
            return cls(text)
        counted = _AFTER_HITS.fullmatch(text)
        if counted is None:
            raise ConfigError(f"edge is {text!r}, expected one of {', '.join(EDGE_WORDS)}")
        return cls(WRITE_AFTER_HITS, int(counted[1]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.hits}" if self.kind == WRITE_AFTER_HITS else self.kind


@dataclass(frozen=True, slots=True)
class StackSettings:
    """All that a stack is told beside its tiers.

    edges: one for each tier, nearest first, from the tier above it. Fewer: write_through.
    load_from: `fastest`, the nearest tier that has a block; `recompute_if_slower` passes a tier
        over while loading from it would take longer than to compute the tokens again.
    tokens_per_entry: what a miss of one entry recomputes.
    whole_answers: of a run nothing is loaded before every tier has answered for all of it, so that
        what goes into one batch does not depend on who answers first.
    lookup_timeout_s: how long a tier may leave a lookup PENDING before the next one is asked.
    load_timeout_s, store_timeout_s: deadlines of one batch.
    engine_timeout_s: how long the engine may take to fill what `prepare_store` gave it before
        others stop waiting for it.
    hold_s: how long what was promoted is kept for whoever asked for it.
    promotion_share: the most of the region's rows that promotions, waiting or not yet used, take.
    store_share: the most of the rows that stores into lower tiers hold at once.
    backlog_s: a tier is given no more stores than it writes in this time, as measured.
    batch_blocks: the most blocks of one job.
    evict_ahead: rows kept free ahead of need, as a share, where blocks are written on eviction.
    refuse_s: how long a tier that failed to give a block is not asked for it again.
    breaker_failures, breaker_retry_s, breaker_retry_most_s: after so many jobs in a row of which
        nothing succeeded a tier is left alone, for a time that doubles until it works again.
    """

    edges: tuple[Edge, ...] = ()
    load_from: str = FASTEST
    tokens_per_entry: int = 1
    whole_answers: bool = False
    lookup_timeout_s: float = 0.05
    load_timeout_s: float = 2.0
    store_timeout_s: float = 10.0
    engine_timeout_s: float = 60.0
    hold_s: float = 5.0
    promotion_share: float = 0.5
    store_share: float = 0.75
    backlog_s: float = 5.0
    batch_blocks: int = 256
    evict_ahead: float = 0.05
    refuse_s: float = 1.0
    breaker_failures: int = 5
    breaker_retry_s: float = 1.0
    breaker_retry_most_s: float = 30.0

    def __post_init__(self) -> None:
        if self.load_from not in LOAD_FROM:
            raise ConfigError(f"load_from is {self.load_from!r}, expected {' or '.join(LOAD_FROM)}")
        for name in ("promotion_share", "store_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 < {name} <= 1")
        if not 0 <= self.evict_ahead < 1:
            raise ConfigError(f"evict_ahead is {self.evict_ahead}, expected 0 <= evict_ahead < 1")
        for name in ("tokens_per_entry", "batch_blocks", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_s") and not value >= 0:
                raise ConfigError(f"{name} is {value}, expected at least 0 seconds")
        if any(edge.kind == WRITE_ON_EVICT for edge in self.edges[1:]):
            raise ConfigError(
                "write_on_evict stands between two tiers under the region, expected it only "
                "directly under the region: a tier does not tell what it is about to evict; use "
                f"{WRITE_THROUGH} or {WRITE_AFTER_HITS}:N there"
            )

    def edge(self, tier: int) -> Edge:
        """The edge into tier number `tier`, 0 for the one under the region."""
        return self.edges[tier] if tier < len(self.edges) else Edge()
