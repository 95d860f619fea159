"""Where vLLM's own counters put what was loaded from each of our tiers.

Needs no vLLM: whoever reads vllm:prompt_tokens_cached_by_source asks here too.
"""

from __future__ import annotations

from typing import Final

REGION: Final = "host"
TIERS: Final = {"fs": "disk"}
OTHER: Final = "external_unspecified"


def source_of(tier: str) -> str:
    """vLLM's word for a tier under the region."""
    return TIERS.get(tier, OTHER)
