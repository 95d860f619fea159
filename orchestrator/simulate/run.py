"""The whole deployment in one process: every request to its replica, through all tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backends.errors import ConfigError
from backends.tier.registry import TierRegistry
from orchestrator.lower_tiers import lower_tiers
from orchestrator.plan import Plan
from orchestrator.report import tiers_report
from orchestrator.simulate.medium import Medium
from orchestrator.simulate.replica import SimReplica
from orchestrator.simulate.timing import Timing
from orchestrator.simulate.ttft import FirstTokens
from orchestrator.workload.source import make_router, open_workload
from orchestrator.workloads import workload_spec

REPORT_EVERY = 64


def predict(
    plan: Plan, timing: Timing, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """What a run of this plan in lockstep comes to, in plain JSON types and named as in a report.

    Requests are read, served and forgotten one by one. A replica is made when its first request
    comes; what it takes is its indices', about as much as in a real leader. `progress` is told
    the number of requests done, now and then. Raises WorkloadError.
    """
    began_s = time.perf_counter()
    # Whatever the configuration runs like: what is under way is not simulated.
    plan = replace(
        plan,
        settings=replace(plan.settings, engine=replace(plan.settings.engine, lockstep=True)),
    )
    spec = workload_spec(plan.settings.workload, plan.cache)
    workload = open_workload(spec)
    router = make_router(spec, plan.topology.data_parallel_size)
    shared = media(plan)
    replicas: dict[int, SimReplica] = {}
    first_tokens = FirstTokens(plan.settings.engine.prefill_tokens_per_s or spec.tokens_per_s)
    for number, request in enumerate(workload):
        if number % REPORT_EVERY == 0:
            progress(number)
        index = router.route(request)
        at = replicas.get(index)
        if at is None:
            at = replicas[index] = SimReplica(plan, index, shared, timing)
        served = at.serve(request)
        if served is not None:
            first_tokens.add(request.prompt_tokens, *served)
    found = _summary(plan, [replicas[index] for index in sorted(replicas)])
    return {
        **found,
        "ttft": first_tokens.to_dict(),
        "skipped_lines": workload.skipped,
        "seconds": time.perf_counter() - began_s,
    }


def media(plan: Plan) -> dict[str, tuple[Medium, bool]]:
    """What stands in each tier under the region, and whether replicas are isolated in it."""
    found = {}
    registry = TierRegistry()
    for name, given in lower_tiers(plan.settings).items():
        settings: Any = registry.find(name).settings(given, f"tiers.stack.{name}")
        found[name] = (
            Medium(_blocks(name, settings, plan.region.row_bytes)),
            settings.placement == "per_replica",
        )
    return found


def _blocks(name: str, settings: Any, row_bytes: int) -> int | None:
    """What fits, below the mark at which a tier begins to evict by itself."""
    if name == "fs":
        part = settings.capacity // len(settings.paths)
        return int(settings.high_watermark * part) // row_bytes * len(settings.paths)
    if name == "object":
        capacity: int | None = settings.capacity_bytes
        if capacity is None:
            return None
        return int(settings.high_watermark * capacity) // row_bytes
    raise ConfigError(f"tier {name!r} cannot be simulated, expected fs or object in tiers.order")


def _summary(plan: Plan, replicas: list[SimReplica]) -> dict[str, Any]:
    results = [each.values() for each in replicas]
    rows = [_replica(values) for values in results]
    total = {
        key: sum(row[key] for row in rows)
        for key in ("requests", "rejected", "prompt_tokens", "output_tokens")
    }
    sources = ("device", *plan.settings.tiers.order)
    return {
        **total,
        "hit_tokens": {name: sum(row["hit_tokens"][name] for row in rows) for name in sources},
        "tiers": tiers_report(plan, results),
        "replicas": rows,
    }


def _replica(values: dict[str, Any]) -> dict[str, Any]:
    stats = values["stats"]
    hits = {"device": stats["hit_tokens_device"], "shm": stats["hit_tokens_shm"]}
    for name in values["lower_tiers"]:
        hits[name] = stats["hit_tokens_below"].get(name, 0)
    return {
        "data_parallel_index": values["data_parallel_index"],
        **{
            key: stats[key]
            for key in ("requests", "rejected", "prompt_tokens", "output_tokens", "steps")
        },
        "hit_tokens": hits,
    }
