"""A run's results: `report.json` for machines, `report.html` for people.

Rates are bytes of all ranks per second.

A replica's rate is its bytes over the copy time of its slowest rank; replicas run beside each
other, so the tier's rate is their sum. Latency is that of one worker's load of one step.
"""

from __future__ import annotations

import signal
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from backends.histogram import LatencyHistogram
from backends.stack.observer import NODE
from orchestrator import __version__
from orchestrator.estimate import load_bytes_per_s, ttft_s
from orchestrator.host import host_facts
from orchestrator.lower_tiers import lower_tiers
from orchestrator.plan import Plan, write_atomic
from orchestrator.problems import Problem
from orchestrator.rundir import RunDir
from orchestrator.supervise import RunState

OK = "ok"
FAILED = "failed"
WRONG = "wrong_bytes"
INTERRUPTED = "interrupted"
INVALID = "invalid_configuration"


def read_results(plan: Plan) -> list[dict[str, Any]]:
    """What the leaders wrote; a replica that did not end well has nothing."""
    run_dir = RunDir(Path(plan.run.run_dir))
    results = []
    for replica in plan.replicas:
        path = run_dir.replica(replica.data_parallel_index).result
        if path.exists():
            results.append(msgspec.json.decode(path.read_bytes()))
    return results


def build_report(
    plan: Plan,
    state: RunState,
    results: list[dict[str, Any]],
    duration_s: float,
    reproduce: str,
) -> dict[str, Any]:
    """The report as plain JSON types; keys are stable, see `docs/report.md`."""
    workers = [worker for result in results for worker in result["workers"]]
    verification = {
        "mode": plan.settings.engine.verify,
        "blocks_checked": sum(worker["stats"]["blocks_checked"] for worker in workers),
        "blocks_wrong": sum(worker["stats"]["blocks_wrong"] for worker in workers),
    }
    compared = [result["vllm"] for result in results if result.get("vllm")]
    if compared and compared[0]["requests_compared"] is not None:
        verification |= {
            key: sum(found[key] for found in compared)
            for key in ("requests_compared", "requests_different")
        }
    failure = state.first_failure
    status = OK
    if state.signal is not None:
        status = INTERRUPTED
    elif failure is not None or len(results) < len(plan.replicas):
        status = FAILED
    elif verification["blocks_wrong"] or verification.get("requests_different"):
        status = WRONG
    return {
        "format": 1,
        "version": __version__,
        "status": status,
        "signal": None if state.signal is None else signal.Signals(state.signal).name,
        "run_id": plan.run.run_id,
        "run_dir": plan.run.run_dir,
        "plan_digest": plan.digest,
        "reproduce": reproduce,
        "started_s": plan.run.created_s,
        "ready_s": state.ready_s,
        "duration_s": duration_s,
        "replicas": [_replica(result) for result in results],
        "tiers": tiers_report(plan, results),
        "ttft": ttft_s(results, plan.settings.workload.tokens_per_s),
        "load_bytes_per_s": load_bytes_per_s(results),
        "verification": verification,
        "machine": host_facts(),
        "failures": [asdict(failure) for failure in sorted(state.failures, key=lambda f: f.t)],
    }


def tiers_report(plan: Plan, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Each tier's figures, from what `orchestrator.telemetry.replica_values` gives."""
    lower = {name: _lower(name, results) for name in lower_tiers(plan.settings)}
    return {"shm": _shm(plan, results), **lower}


def _replica(result: dict[str, Any]) -> dict[str, Any]:
    stats = result["stats"]
    hits = {"device": stats["hit_tokens_device"], "shm": stats["hit_tokens_shm"]}
    for name in result["lower_tiers"]:
        hits[name] = stats["hit_tokens_below"].get(name, 0)
    if result["primary"].get("node") is not None:
        hits[NODE] = stats["hit_tokens_below"].get(NODE, 0)
    return {
        "data_parallel_index": result["data_parallel_index"],
        "engine_id": result["engine_id"],
        "requests": stats["requests"],
        "rejected": stats["rejected"],
        "skipped_lines": stats["skipped_lines"],
        "prompt_tokens": stats["prompt_tokens"],
        "output_tokens": stats["output_tokens"],
        "hit_tokens": hits,
        "steps": stats["steps"],
        "vllm": result.get("vllm"),
        "events": result["events"],
        "duration_s": max(worker["duration_s"] for worker in result["workers"]),
        "workers": result["workers"],
    }


def _shm(plan: Plan, results: list[dict[str, Any]]) -> dict[str, Any]:
    latency = LatencyHistogram()
    for result in results:
        for worker in result["workers"]:
            counts = worker["stats"]["load_latency"]["counts"]
            latency.merge(LatencyHistogram({int(bucket): n for bucket, n in counts.items()}))

    def primary(name: str) -> int:
        return sum(result["primary"][name] for result in results)

    def copied(name: str) -> Any:
        return sum(w["stats"][name] for result in results for w in result["workers"])

    return {
        "lookups": primary("lookups"),
        "hits": primary("hits"),
        "stores": primary("stored"),
        "stored_bytes": copied("stored_bytes"),
        "loaded_bytes": copied("loaded_bytes"),
        "store_bytes_per_s": _rate(results, "stored"),
        "load_bytes_per_s": _rate(results, "loaded"),
        "load_latency_s": _latency(latency, copied("loaded_s")),
        "evictions": primary("evictions"),
        "skipped_stores": primary("skipped_stores"),
        "never_read": primary("never_read"),
        "usage_bytes": sum(result["rows_used"] for result in results) * plan.region.row_bytes,
        "pinned_bytes": primary("rows_pinned") * plan.region.row_bytes,
        "capacity_bytes": plan.region.rows * plan.region.row_bytes * len(plan.replicas),
        "errors": primary("errors"),
        "counters": _shared(results),
    }


def _shared(results: list[dict[str, Any]]) -> dict[str, int]:
    """What replicas had of each other's rows; nothing with `region.scope: replica`."""
    found = [result["primary"].get("node") or {} for result in results]
    return {name: sum(one.get(name, 0) for one in found) for name in {}.fromkeys(chain(*found))}


def _latency(found: LatencyHistogram, total_s: float) -> dict[str, float | None]:
    count = sum(found.counts.values())
    return {
        "mean": total_s / count if count else None,
        **{f"p{p}": found.percentile_s(p) for p in (50, 95, 99)},
    }


MISFORTUNES = ("errors", "shed", "late", "corrupt", "given_up", "passed_over", "no_room")
_ALSO_COUNTED = ("never_read", "breaker_opened")
BYTES = {"store": "stored_bytes", "load": "loaded_bytes"}


def _lower(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """A tier under the region. What it holds is that of all replicas together, if they share it."""
    found = [result["lower_tiers"][name] for result in results]
    latency = LatencyHistogram()
    for tier in found:
        counts = tier["load_latency"]["counts"]
        latency.merge(LatencyHistogram({int(bucket): n for bucket, n in counts.items()}))
    rates = {
        what: [t[BYTES[what]] / t[f"{what}_s"] for t in found if t[f"{what}_s"] > 0]
        for what in ("store", "load")
    }
    capacities = [tier["usage"]["capacity_bytes"] for tier in found]
    ages = [tier["usage"]["oldest_s"] for tier in found]
    summed = ("lookups", "hits", "stores", "stored_bytes", "loaded_bytes", "evictions")
    return {
        **{key: sum(tier[key] for tier in found) for key in summed},
        "store_bytes_per_s": sum(rates["store"]) or None,
        "load_bytes_per_s": sum(rates["load"]) or None,
        "load_latency_s": _latency(latency, sum(tier["load_job_s"] for tier in found)),
        "usage_bytes": max((tier["usage"]["bytes"] for tier in found), default=0),
        "capacity_bytes": None if None in capacities else max(capacities, default=0),
        "oldest_s": max(filter(None, ages), default=None),
        "counters": _own_counters(found),
        **{key: sum(tier[key] for tier in found) for key in (*MISFORTUNES, *_ALSO_COUNTED)},
        "replicas": [tier["own"] for tier in found],
    }


def _own_counters(found: list[dict[str, Any]]) -> dict[str, int]:
    """What the tier itself counted, of all replicas together."""
    total: dict[str, int] = {}
    for tier in found:
        for name, count in tier["own"].items():
            total[name] = total.get(name, 0) + count
    return total


def _rate(results: list[dict[str, Any]], what: str) -> float | None:
    rates = []
    for result in results:
        stats = [worker["stats"] for worker in result["workers"]]
        slowest_s = max(s[f"{what}_s"] for s in stats)
        if slowest_s > 0:
            rates.append(sum(s[f"{what}_bytes"] for s in stats) / slowest_s)
    return sum(rates) if rates else None


def invalid_report(run_id: str, problems: tuple[Problem, ...], reproduce: str) -> dict[str, Any]:
    """What stands in `report.json` when nothing was started."""
    return {
        "format": 1,
        "version": __version__,
        "status": INVALID,
        "run_id": run_id,
        "reproduce": reproduce,
        "problems": [
            {"key": p.key, "value": str(p.value), "limit": p.limit, "fix": p.fix} for p in problems
        ],
    }


def write_report(report: dict[str, Any], run_dir: Path) -> None:
    write_atomic(RunDir(run_dir).report, msgspec.json.format(msgspec.json.encode(report), indent=2))


def write_page(page: bytes, run_dir: Path) -> None:
    write_atomic(RunDir(run_dir).page, page)
