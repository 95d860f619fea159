"""Plans and reports as a person reads them on a console."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.units import format_size
from orchestrator import object_store
from orchestrator.engine_vllm.table import answers_line
from orchestrator.plan import ObjectPlan, Plan, ReplicaPlan
from orchestrator.sweep.compare import OBJECTIVES, Comparison

WORKERS_SHOWN = 64
REPLICAS_SHOWN = 16
COMMANDS_SHOWN = 4


def _table(*columns: str) -> Table:
    """Columns as wide as what stands in them; where the console is narrow, words are folded."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _line(console: Console, *parts: str | tuple[str, str]) -> None:
    """A line that is never cut or broken, so that it can be copied."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def print_plan(console: Console, plan: Plan) -> None:
    """The placement of workers and regions, the totals, and the commands; the first of each."""
    topology = plan.topology
    nodes = "1 node" if topology.nnodes == 1 else f"{topology.nnodes} nodes"
    _line(
        console,
        (f"plan {plan.digest[:16]}", "bold"),
        f"  {topology.data_parallel_size} replicas x {topology.world_size} workers on {nodes}",
    )
    _line(
        console,
        f"PP {topology.pp_size} x PCP {topology.pcp_size} x TP {topology.tp_size}, "
        f"DCP {topology.dcp_size}; model {plan.model.name}, {plan.model.dtype}\n",
    )
    console.print(_workers(plan))
    _more(console, topology.data_parallel_size * topology.world_size - WORKERS_SHOWN, "workers")
    _line(console)
    console.print(_regions(plan))
    _more(console, topology.data_parallel_size - REPLICAS_SHOWN, "replicas")
    _line(console)
    console.print(_sizes(plan))
    asked = plan.settings.region
    numa = sorted({node for node in plan.region.numa_nodes if node is not None})
    _line(
        console,
        f"asked: {asked.backing}, prefault {'on' if asked.prefault else 'off'}, "
        f"huge pages {asked.huge_pages}, page-lock {asked.pin}, "
        f"NUMA {', '.join(map(str, numa)) or 'any'}"
        f"{', name kept' if asked.persist_name else ''}",
    )
    index = plan.node_index(0)
    if index is not None:
        _line(
            console,
            f"regions: read by all {index.replicas} replicas of a node; its index has "
            f"{format_size(plan.region.index_bytes)}: /dev/shm/{index.name}",
        )
    _line(console, f"device cache: {plan.device_blocks} blocks a rank\n")
    if plan.object_store is not None:
        _object_store(console, plan, plan.object_store)
    _line(console, "by hand, each replica on its node:")
    for replica in plan.replicas[:COMMANDS_SHOWN]:
        _line(console, f"  {replica.command}")
    _more(console, topology.data_parallel_size - COMMANDS_SHOWN, "commands")


def _object_store(console: Console, plan: Plan, found: ObjectPlan) -> None:
    """Where objects go, over what, how many, and what bounds them."""
    asked = plan.settings.tiers.stack.object
    many = len(found.namespaces) > 1
    _line(console, ("object store: ", "bold"), asked.url, f", {object_store.way(asked)}")
    _line(
        console,
        f"  placement {asked.placement}: {found.namespaces[0]}{' ... one a replica' * many}",
    )
    _line(
        console,
        f"  an object is a row of {format_size(found.object_bytes)}, {found.upload_requests} "
        f"request{'s' * (found.upload_requests > 1)} to store; a million new tokens: "
        f"{found.million_tokens_objects:,} objects, {format_size(found.million_tokens_bytes)}",
    )
    if found.capacity_bytes is None:
        _line(
            console, "  capacity unbounded: nothing goes without a lifecycle rule, set such as by"
        )
        _line(console, f"    {found.lifecycle}\n")
        return
    assert found.capacity_bytes_per_replica is not None
    assert found.capacity_bytes_per_node is not None
    _line(
        console,
        f"  capacity {format_size(found.capacity_bytes)} for all replicas, "
        f"{found.capacity_objects:,} objects: {format_size(found.capacity_bytes_per_replica)} per "
        f"replica, {format_size(found.capacity_bytes_per_node)} per node\n",
    )


def _more(console: Console, count: int, what: str) -> None:
    if count > 0:
        _line(console, f"... {count} more {what} in plan.json")


def _workers(plan: Plan) -> Table:
    topology = plan.topology
    axes = "PP/PCP/TP/DCP" if topology.dcp_size > 1 else "PP/PCP/TP"
    table = _table("replica", "node", "rank", axes, "local_rank", "device", "slot", "bytes/block")
    shown = -(-WORKERS_SHOWN // topology.world_size)
    workers = [(r, worker) for r in plan.replicas[:shown] for worker in r.workers]
    for replica, worker in workers[:WORKERS_SHOWN]:
        coordinates = f"{worker.pp_rank}/{worker.pcp_rank}/{worker.tp_rank}"
        table.add_row(
            str(replica.data_parallel_index),
            str(worker.node_rank),
            str(worker.rank),
            coordinates + (f"/{worker.dcp_rank}" if topology.dcp_size > 1 else ""),
            str(worker.local_rank),
            f"{worker.device}:{worker.device_index}",
            str(worker.slot),
            f"{sum(worker.worker_bytes_per_block):,}",
        )
    return table


def _regions(plan: Plan) -> Table:
    table = _table("replica", "node", "region", "bytes", "directory", "rendezvous")
    for replica in plan.replicas[:REPLICAS_SHOWN]:
        table.add_row(
            str(replica.data_parallel_index),
            _nodes(replica),
            replica.region_name,
            format_size(replica.region_bytes),
            replica.directory,
            replica.rdzv_endpoint.removesuffix(":0"),
        )
    return table


def _nodes(replica: ReplicaPlan) -> str:
    first, last = replica.node_ranks[0], replica.node_ranks[-1]
    return str(first) if first == last else f"{first}-{last}"


def _sizes(plan: Plan) -> Table:
    region = plan.region
    table = _table("rows", "tokens/row", "bytes/row", "per rank", "per replica", "per node")
    table.add_row(
        f"{region.rows:,}",
        f"{region.tokens_per_row:,}",
        format_size(region.row_bytes),
        format_size(region.bytes_per_rank),
        format_size(region.bytes_per_replica),
        format_size(region.bytes_per_node),
    )
    return table


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Hits by replica, the tiers, the verification, and how to run it again."""
    sources = list(report["replicas"][0]["hit_tokens"]) if report["replicas"] else []
    hit_columns = [f"hit {source}" for source in sources]
    replicas = _table("replica", "requests", "prompt tokens", *hit_columns, "hits")
    for replica in report["replicas"]:
        tokens = replica["prompt_tokens"]
        hits = replica["hit_tokens"]
        share = sum(hits.values()) / tokens if tokens else 0.0
        rejected = f" (+{replica['rejected']} rejected)" if replica["rejected"] else ""
        replicas.add_row(
            str(replica["data_parallel_index"]),
            f"{replica['requests']}{rejected}",
            f"{tokens:,}",
            *(f"{hits[source]:,}" for source in sources),
            f"{share:.1%}",
        )
    console.print(replicas)
    tiers = _table(
        *("tier", "lookups", "hits", "stored", "store/s", "loaded", "load/s", "p50", "p99"),
        *("evictions", "filled", "errors"),
    )
    for name, tier in report["tiers"].items():
        latency = tier["load_latency_s"]
        tiers.add_row(
            name,
            f"{tier['lookups']:,}",
            f"{tier['hits']:,}",
            format_size(tier["stored_bytes"]),
            _rate(tier["store_bytes_per_s"]),
            format_size(tier["loaded_bytes"]),
            _rate(tier["load_bytes_per_s"]),
            _milliseconds(latency["p50"]),
            _milliseconds(latency["p99"]),
            f"{tier['evictions']:,}",
            _filled(tier["usage_bytes"], tier["capacity_bytes"]),
            str(tier["errors"]),
        )
    console.print()
    console.print(tiers)
    for name, tier in report["tiers"].items():
        counted = {k: n for k, n in tier.get("counters", {}).items() if n and k not in _IN_TABLE}
        if counted:
            told = ", ".join(f"{key.replace('_', ' ')} {n:,}" for key, n in counted.items())
            _line(console, f"{name}: {told}")
    checked = report["verification"]
    answers = answers_line(report)
    if answers is not None:
        _line(console, answers)
    ready = "not reached" if report["ready_s"] is None else f"{report['ready_s']:.2f} s"
    console.print()
    _line(
        console,
        "status: ",
        (report["status"], "bold"),
        f"   blocks checked {checked['blocks_checked']:,}, wrong {checked['blocks_wrong']:,}"
        f"   ready {ready}, whole run {report['duration_s']:.2f} s",
    )
    _line(console, f"report: {report['run_dir']}/report.html, and report.json")
    _line(console, f"again:  {report['reproduce']}")


# The tier's own counts of what the table tells already.
_IN_TABLE = {
    *("stored", "loaded", "stored_bytes", "loaded_bytes", "evicted", "lookups", "hits"),
}


def _filled(usage_bytes: int, capacity_bytes: int | None) -> str:
    """A share of the capacity; the bytes where there is no limit."""
    if capacity_bytes is None:
        return format_size(usage_bytes)
    return f"{usage_bytes / (capacity_bytes or 1):.0%}"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def print_sweep(console: Console, sweep: Comparison) -> None:
    """One line a job, failed ones first; what failed and why; the best settings."""
    axes = [axis.key for axis in sweep.axes]
    table = _table(
        *("job", *axes, "status", *(o.short for o in OBJECTIVES), "ready", "best", "report")
    )
    for job in sweep.jobs:
        table.add_row(
            str(job.number),
            *(job.settings.get(axis, "-") for axis in axes),
            f"{job.status} (before)" if job.resumed else job.status,
            *(_value(job.values.get(o.key), o.form) for o in OBJECTIVES),
            "-" if job.ready_s is None else f"{job.ready_s:.2f} s",
            "*" if job.pareto else "",
            _near(job.run_dir) if job.run_dir else "-",
        )
    console.print()
    if sweep.common:
        _line(console, f"all jobs: {' '.join(sweep.common)}\n")
    console.print(table)
    for job in sweep.failed:
        _line(console, f"\njob {job.number} ({job.status}): {job.reason}")
        if job.log and job.log not in job.reason:
            _line(console, f"  see {job.log}")
    _line(console)
    for objective in OBJECTIVES:
        best = sweep.best(objective)
        if best is not None and len(sweep.jobs) > 1:
            told = ", ".join(f"{key}={value}" for key, value in best.settings.items())
            value = objective.form(best.values[objective.key])
            _line(console, f"best {objective.name}: {value}, job {best.number} ({told})")
    count = len(sweep.jobs)
    if count > 1 and any(job.pareto for job in sweep.jobs):
        _line(console, "* no other job is better in one of these and as good in all of them")
    resumed = sum(job.resumed for job in sweep.jobs)
    _line(
        console,
        f"{count} job{'s' * (count != 1)}, {len(sweep.failed)} failed"
        + (f", {resumed} done before" if resumed else ""),
    )


def _near(path: str) -> str:
    """Relative to where we are, if it is below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _value(value: float | None, form: Callable[[float | None], str]) -> str:
    return "-" if value is None else form(value)
