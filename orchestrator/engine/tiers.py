"""A replica's tier stack, as the plan has it. The leader's business alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from backends.deployment import Deployment, plan_of
from backends.region.region import Region
from backends.stack.observer import Observer
from backends.stack.settings import StackSettings
from backends.stack.stack import TierStack
from backends.tier.base import Tier, TierContext
from orchestrator.lower_tiers import stack_settings
from orchestrator.node import open_rows
from orchestrator.plan import Plan


def deployment(plan: Plan, index: int) -> Deployment:
    """Replica `index`, as backends read it from plan.json."""
    alone = replace(plan, replicas=(plan.replicas[index],))
    return Deployment(plan_of(msgspec.to_builtins(alone)), index)


def tier_context(plan: Plan, index: int, region: Region) -> TierContext:
    """What every tier of replica `index` is given: namespace, rows, and who it is."""
    return deployment(plan, index).tier_context(region)


def make_stack(
    plan: Plan,
    region: Region | None,
    tiers: Sequence[Tier],
    settings: StackSettings | None = None,
    observers: Sequence[Observer] = (),
    now: Callable[[], float] = time.monotonic,
) -> TierStack:
    """A stack over opened tiers. `settings` None: those of the plan. Without a region there are no
    bytes, and `now` may be another clock."""
    return deployment(plan, 0).make_stack(
        region,
        tiers,
        settings or _settings(plan),
        columns=plan.columns,
        observers=observers,
        now=now,
    )


def open_stack(
    plan: Plan, index: int, region: Region, observers: Sequence[Observer] = ()
) -> TierStack:
    """The replica's stack, its tiers opened. Raises TierError, RegionError."""
    node = open_rows(plan, index, region)
    try:
        return deployment(plan, index).open_stack(
            region, _settings(plan), columns=plan.columns, observers=observers, node=node
        )
    except BaseException:
        if node is not None:
            node.close()
        raise


def _settings(plan: Plan) -> StackSettings:
    return stack_settings(plan.settings, plan.region.tokens_per_row)
