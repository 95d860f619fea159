"""Opens the tiers under a replica's region, as the plan has them. The leader's business alone."""

from __future__ import annotations

from dataclasses import asdict

from backends.layout import geometry_facts
from backends.region.region import Region
from backends.stack import StackSettings, TierStack
from backends.tier.base import Tier, TierContext
from backends.tier.registry import TierRegistry
from orchestrator.lower_tiers import lower_tiers
from orchestrator.plan import Plan


def tier_context(plan: Plan, index: int, region: Region) -> TierContext:
    """What every tier of replica `index` is given: namespace, rows, and who it is."""
    config = plan.offload_config(index, 0)
    manifest: dict[str, object] = {
        "model": asdict(plan.model),
        "geometry": geometry_facts(
            plan.groups, plan.model, plan.cache, plan.topology, config.layout
        ),
        "rope": plan.settings.model.rope,
        "fingerprint": plan.fingerprint,
    }
    return TierContext(
        fingerprint=bytes.fromhex(plan.fingerprint),
        manifest=manifest,
        rows=region,
        parallel=config.parallel,
        engine_id=config.engine_id,
    )


def open_stack(plan: Plan, index: int, region: Region) -> TierStack | None:
    """The tiers under the region, opened; None if there are none. Raises TierError."""
    context = tier_context(plan, index, region)
    registry, tiers = TierRegistry(), list[Tier]()
    try:
        for name, given in lower_tiers(plan.settings).items():
            entry = registry.find(name)
            tiers.append(entry.open(context, entry.settings(given, f"tiers.stack.{name}")))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    if not tiers:
        return None
    return TierStack(tiers, len(plan.groups), StackSettings())
