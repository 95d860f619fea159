"""Opens a replica's tier stack, as the plan has it. The leader's business alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from backends.layout import geometry_facts
from backends.policy.admission import open_admission
from backends.policy.registry import PolicyRegistry
from backends.region.region import Region
from backends.stack.headers import RowHeaders
from backends.stack.observer import Observer
from backends.stack.settings import StackSettings
from backends.stack.stack import TierStack
from backends.tier.base import Tier, TierContext
from backends.tier.registry import TierRegistry
from orchestrator.lower_tiers import lower_tiers, stack_settings
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


def make_stack(
    plan: Plan,
    region: Region,
    tiers: Sequence[Tier],
    settings: StackSettings | None = None,
    observers: Sequence[Observer] = (),
) -> TierStack:
    """A stack over opened tiers. `settings` None: those of the plan."""
    groups, topology = len(plan.groups), plan.topology
    # What each worker of this node keeps of a chunk, by group.
    slot_lengths = [
        [
            worker.worker_bytes_per_block[group] * plan.cache.blocks_per_chunk
            for worker in plan.replicas[0].workers[: topology.local_world_size]
        ]
        for group in range(groups)
    ]
    shm, entries = plan.settings.tiers.stack.shm, plan.region.rows // groups
    return TierStack(
        plan.region.rows,
        PolicyRegistry().open(shm.eviction, entries),
        tiers,
        settings or stack_settings(plan.settings, plan.region.tokens_per_row),
        groups=groups,
        admission=None if shm.admission == "all" else open_admission(shm.admission, entries),
        entry_bytes=plan.region.row_bytes * groups,
        headers=RowHeaders(region.row_headers(), bytes.fromhex(plan.fingerprint), slot_lengths),
        observers=observers,
    )


def open_stack(
    plan: Plan, index: int, region: Region, observers: Sequence[Observer] = ()
) -> TierStack:
    """The replica's stack, its tiers opened. Raises TierError."""
    context = tier_context(plan, index, region)
    registry, tiers = TierRegistry(), list[Tier]()
    try:
        for name, given in lower_tiers(plan.settings).items():
            entry = registry.find(name)
            tiers.append(entry.open(context, entry.settings(given, f"tiers.stack.{name}")))
        return make_stack(plan, region, tiers, observers=observers)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
