"""Runs a plan to its end and reports on it."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from orchestrator import report as reports
from orchestrator.clean import remove_named_regions
from orchestrator.engine_vllm.settings import is_vllm
from orchestrator.engine_vllm.spawner import VllmSpawner
from orchestrator.html.report_page import report_page
from orchestrator.job import EXIT_FAILED, EXIT_OK, Job, Outcome, reproduce, say
from orchestrator.plan import Plan
from orchestrator.render import print_report
from orchestrator.spawn.torchrun import TorchrunSpawner
from orchestrator.supervise import RunState, Spawner, supervise
from orchestrator.view import RunView
from orchestrator.workload.source import count_requests
from orchestrator.workloads import workload_spec


def run_plan(plan: Plan, job: Job, console: Console, errors: Console) -> Outcome:
    """Launch, watch, report. Leaves no process, whatever happens."""
    config = plan.settings
    spec = workload_spec(config.workload, plan.cache)
    started_s = time.monotonic()
    say(
        console,
        f"run {plan.run.run_id}: {plan.topology.data_parallel_size} replicas x "
        f"{plan.topology.world_size} workers, plan {plan.digest[:16]}",
    )
    in_ci = job.environment.get("CI", "").lower() not in ("", "0", "false")
    view = RunView(console, plan, count_requests(spec), config.view, in_ci=in_ci)
    try:
        with view:
            state = supervise(plan, _spawner(plan, job), view)
    finally:
        remove_named_regions(plan.run.run_id)
    duration_s = time.monotonic() - started_s
    results = reports.read_results(plan)
    again = reproduce(job.overrides)
    found = reports.build_report(plan, state, results, duration_s, again)
    reports.write_report(found, job.run_dir)
    reports.write_page(report_page(plan, found, results), job.run_dir)
    if found["replicas"] and config.view != "quiet":
        print_report(console, found)
    return _outcome(found, state, errors)


def _spawner(plan: Plan, job: Job) -> Spawner:
    if is_vllm(plan.settings):
        return VllmSpawner(plan, job.environment)
    if plan.settings.spawn.kind == "inline":
        from orchestrator.spawn.inline import InlineSpawner  # imports torch

        return InlineSpawner(plan)
    return TorchrunSpawner(plan, job.environment, job.nursery)


def _outcome(found: dict[str, Any], state: RunState, errors: Console) -> Outcome:
    if found["status"] == reports.OK:
        return Outcome(EXIT_OK, found)
    failure, log = state.first_failure, ""
    if state.signal is not None:
        reason = f"interrupted by {found['signal']}"
    elif failure is not None:
        reason, log = str(failure), failure.log
    elif found["status"] == reports.WRONG:
        wrong = found["verification"]["blocks_wrong"]
        reason = f"{wrong} blocks held wrong bytes when they were loaded; none was served"
    else:
        reason = "a replica ended without a result"
    say(errors, f"run {found['status']}: {reason}")
    return Outcome(EXIT_FAILED, found, reason, state.signal, log or found["run_dir"])
