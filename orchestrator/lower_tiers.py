"""What the configuration says of the tiers under the region."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.schema import Config

PRIMARY = "shm"


def lower_tiers(config: Config) -> dict[str, dict[str, Any]]:
    """Settings by name, nearest first, as plain data; each tier has a type for its own."""
    stack = config.tiers.stack
    return {
        name: asdict(getattr(stack, name))
        for name in config.tiers.order
        if name != PRIMARY and hasattr(stack, name)
    }
