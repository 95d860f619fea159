"""Plans and reports as a person reads them on a console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.plan import Plan
from orchestrator.units import format_size

ROWS_SHOWN = 64


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def print_plan(console: Console, plan: Plan) -> None:
    """The placement of every worker (the first ROWS_SHOWN), of every region, and the totals."""
    topology, region = plan.topology, plan.region
    console.print(
        f"[bold]plan {plan.digest[:16]}[/]  {topology.data_parallel_size} replicas x "
        f"{topology.world_size} workers (PP {topology.pp_size} x PCP {topology.pcp_size} x "
        f"TP {topology.tp_size}, DCP {topology.dcp_size}) on {topology.nnodes} node(s); "
        f"model {plan.model.name}, {plan.model.dtype}",
        highlight=False,
    )
    workers = _table(
        *("replica", "node", "rank", "PP/PCP/TP", "local_rank", "device", "slot", "B/block")
    )
    total = 0
    for replica in plan.replicas:
        for worker in replica.workers:
            total += 1
            if total > ROWS_SHOWN:
                continue
            workers.add_row(
                str(replica.data_parallel_index),
                str(worker.node_rank),
                str(worker.rank),
                f"{worker.pp_rank}/{worker.pcp_rank}/{worker.tp_rank}",
                str(worker.local_rank),
                f"{worker.device}:{worker.device_index}",
                str(worker.slot),
                str(sum(worker.worker_bytes_per_block)),
            )
    console.print(workers)
    if total > ROWS_SHOWN:
        console.print(f"... {total - ROWS_SHOWN} more workers in plan.json")
    regions = _table("replica", "region", "bytes", "directory", "rendezvous")
    for replica in plan.replicas[:ROWS_SHOWN]:
        regions.add_row(
            str(replica.data_parallel_index),
            replica.region_name,
            format_size(replica.region_bytes),
            replica.directory,
            replica.rdzv_endpoint.replace(":0", ":(free)")
            if replica.rdzv_endpoint.endswith(":0")
            else replica.rdzv_endpoint,
        )
    console.print()
    console.print(regions)
    if len(plan.replicas) > ROWS_SHOWN:
        console.print(f"... {len(plan.replicas) - ROWS_SHOWN} more replicas in plan.json")
    console.print()
    sizes = _table("region", "per rank", "per replica", "per node")
    sizes.add_row(
        f"{region.rows} rows of {region.tokens_per_row} tokens, {format_size(region.row_bytes)}",
        format_size(region.bytes_per_rank),
        format_size(region.bytes_per_replica),
        format_size(region.bytes_per_node),
    )
    console.print(sizes)
    console.print(f"device cache: {plan.device_blocks} blocks a rank", highlight=False)
    console.print("\ncommand of each replica (what the launcher does, by hand):")
    for replica in plan.replicas[:4]:
        console.print(f"  {replica.command}", soft_wrap=True, markup=False, highlight=False)
    if len(plan.replicas) > 4:
        console.print(f"  ... {len(plan.replicas) - 4} more in plan.json")


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Hits by replica, the tiers, the verification, and how to run it again."""
    replicas = _table("replica", "requests", "prompt tokens", "hit device", "hit shm", "hits")
    for replica in report["replicas"]:
        tokens = replica["prompt_tokens"]
        hits = replica["hit_tokens"]
        share = sum(hits.values()) / tokens if tokens else 0.0
        rejected = f" (+{replica['rejected']} rejected)" if replica["rejected"] else ""
        replicas.add_row(
            str(replica["data_parallel_index"]),
            f"{replica['requests']}{rejected}",
            f"{tokens:,}",
            f"{hits['device']:,}",
            f"{hits['shm']:,}",
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
            f"{tier['usage_bytes'] / tier['capacity_bytes']:.0%}",
            str(tier["errors"]),
        )
    console.print()
    console.print(tiers)
    checked = report["verification"]
    ready = "not reached" if report["ready_s"] is None else f"{report['ready_s']:.2f} s"
    console.print()
    console.print(
        f"status: [bold]{report['status']}[/]   blocks checked {checked['blocks_checked']:,}, "
        f"wrong {checked['blocks_wrong']:,}   ready {ready}, whole run {report['duration_s']:.2f} s",
        highlight=False,
    )
    console.print(f"report: {report['run_dir']}/report.json", soft_wrap=True, highlight=False)
    console.print(f"again:  {report['reproduce']}", soft_wrap=True, markup=False, highlight=False)


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def print_sweep(console: Console, jobs: list[dict[str, Any]]) -> None:
    """One line a job, failed ones first."""
    table = _table("job", "overrides", "status", "hits", "store/s", "load/s", "ready", "report")
    for job in sorted(jobs, key=lambda job: (job["status"] == "ok", job["number"])):
        table.add_row(
            str(job["number"]),
            " ".join(job["overrides"]),
            job["status"],
            "-" if job["hit_share"] is None else f"{job['hit_share']:.1%}",
            _rate(job["store_bytes_per_s"]),
            _rate(job["load_bytes_per_s"]),
            "-" if job["ready_s"] is None else f"{job['ready_s']:.2f} s",
            job["run_dir"],
        )
    console.print()
    console.print(table)
    failed = [job for job in jobs if job["status"] != "ok"]
    for job in failed:
        console.print(f"\njob {job['number']} ({job['status']}): {job['reason']}", markup=False)
    console.print(f"\n{len(jobs)} jobs, {len(failed)} failed", highlight=False)
