"""What the configuration says of the tiers under the region."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from backends.stack.settings import Edge, StackSettings
from orchestrator.schema import Config

PRIMARY = "shm"
DISKS = "fs"


def lower_tiers(config: Config) -> dict[str, dict[str, Any]]:
    """Settings by name, nearest first, as plain data; each tier has a type for its own."""
    stack = config.tiers.stack
    return {
        name: asdict(getattr(stack, name))
        for name in config.tiers.order
        if name != PRIMARY and hasattr(stack, name)
    }


def stack_settings(config: Config, tokens_per_entry: int) -> StackSettings:
    """What the configuration says of the stack itself. Raises ConfigError."""
    tiers = config.tiers
    return StackSettings(
        edges=tuple(Edge.parse(getattr(tiers.edges, name)) for name in lower_tiers(config)),
        load_from=tiers.load_from,
        tokens_per_entry=tokens_per_entry,
        whole_answers=config.engine.lockstep,
        lookup_timeout_s=tiers.lookup_timeout_s,
        load_timeout_s=tiers.load_timeout_s,
        store_timeout_s=tiers.store_timeout_s,
        promotion_share=tiers.promotion_share,
    )


def disks(config: Config) -> tuple[str, ...]:
    """Directories of the filesystem tier; none where there is no such tier."""
    return tuple(config.tiers.stack.fs.paths) if DISKS in config.tiers.order else ()
