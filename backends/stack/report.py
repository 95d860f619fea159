"""What a stack has counted, in plain JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from backends.stack.lane import Lane
from backends.stack.primary import PrimaryIndex

if TYPE_CHECKING:
    from backends.stack.node import NodeRows


def region_report(index: PrimaryIndex, node: NodeRows | None) -> dict[str, Any]:
    """Counts in entries, and what the region holds in rows."""
    return asdict(index.counters) | {
        "never_read": index.unread.count,
        "rows": index.rows_total,
        "rows_used": index.rows_used,
        "rows_pinned": index.rows_pinned,
        "node": None if node is None else node.report(),
    }


def tier_reports(lanes: Sequence[Lane]) -> dict[str, dict[str, Any]]:
    """Each tier's counts and what it holds, by name."""
    found = {}
    for lane in lanes:
        own = lane.tier.counters()
        found[lane.name] = asdict(lane.counters) | {
            "usage": asdict(lane.tier.usage()),
            "never_read": lane.unread.count,
            "evictions": own.get("evicted", 0),
            "corrupt": own.get("corrupt", 0),
            "edge": str(lane.edge),
            "breaker": lane.breaker.state,
            "breaker_opened": lane.breaker.opened,
            "own": dict(own),
        }
    return found
