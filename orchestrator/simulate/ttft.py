"""Time to the first token, with the tiers and without them.

Without: a prompt's tokens at the replica's speed. With: what its loads take, and the tokens that
were not hit at the same speed. Waiting for other requests is in neither.
"""

from __future__ import annotations

from typing import Any

from backends.histogram import LatencyHistogram


class FirstTokens:
    """Of many requests; holds no request."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._with = LatencyHistogram()
        self._without = LatencyHistogram()
        self._with_s = self._without_s = self._load_s = 0.0
        self._count = self._slower = 0

    def add(self, prompt_tokens: int, hit_tokens: int, load_s: float) -> None:
        """A request whose hits took `load_s` to load."""
        without_s = prompt_tokens / self._tokens_per_s
        with_s = (prompt_tokens - hit_tokens) / self._tokens_per_s + load_s
        self._with.add(with_s)
        self._without.add(without_s)
        self._with_s += with_s
        self._without_s += without_s
        self._load_s += load_s
        self._count += 1
        self._slower += with_s > without_s

    def to_dict(self) -> dict[str, Any]:
        """Seconds; `slower` counts requests for which loading took longer than computing."""
        return {
            "tokens_per_s": self._tokens_per_s,
            "without_s": self._figures(self._without, self._without_s),
            "with_s": self._figures(self._with, self._with_s),
            "load_s": self._load_s,
            "saved_s": self._without_s - self._with_s,
            "saved_share": 1 - self._with_s / self._without_s if self._without_s else 0.0,
            "slower": self._slower,
        }

    def _figures(self, found: LatencyHistogram, total_s: float) -> dict[str, float | None]:
        mean_s = total_s / self._count if self._count else None
        return {"mean": mean_s, **{f"p{p}": found.percentile_s(p) for p in (50, 95, 99)}}
