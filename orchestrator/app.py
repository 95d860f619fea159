"""What one job does, from a composed configuration to an exit status."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from backends.errors import KvquayError
from backends.region.reap import find_stale, reap
from orchestrator import report as reports
from orchestrator.clean import clean, remove_named_regions
from orchestrator.compose import to_config
from orchestrator.model import expand_model
from orchestrator.plan import Plan, RunInfo, make_plan, write_plan
from orchestrator.problems import ConfigProblems
from orchestrator.render import print_plan, print_report
from orchestrator.schema import Config
from orchestrator.spawn.torchrun import TorchrunSpawner
from orchestrator.supervise import RunState, Spawner, supervise
from orchestrator.units import format_size
from orchestrator.validate import validate
from orchestrator.view import RunView
from orchestrator.workload.source import count_requests
from orchestrator.workloads import workload_spec

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What Hydra knows of a job beside its configuration."""

    run_id: str
    run_dir: Path
    overrides: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `signal` is the one that interrupted it."""

    exit_status: int
    report: dict[str, Any] | None = None
    reason: str = ""
    signal: int | None = None


def run(cfg: DictConfig, job: Job, console: Console, errors: Console) -> Outcome:
    """Do what `action` says. Every expected failure becomes an Outcome, told on `errors`."""
    try:
        config = _absolute(to_config(cfg))
        if config.action == "run" and config.region.backing == "shm":
            _reap(console)
        checked = validate(config, job.run_dir)
        # What a config.json said stands in the plan itself, so that the file may go.
        config = replace(config, model=expand_model(config.model))
        if config.action == "clean":
            clean(console, apply=config.clean.apply)
            return Outcome(EXIT_OK)
        info = RunInfo(job.run_id, str(job.run_dir), time.time())
        plan = make_plan(config, checked.topology, checked.model, checked.groups, info)
        write_plan(plan, job.run_dir)
        if config.action == "plan":
            print_plan(console, plan)
            console.print(f"\nplan:   {job.run_dir}/plan.json", soft_wrap=True, highlight=False)
            return Outcome(EXIT_OK)
        return _launch(plan, job, console, errors)
    except ConfigProblems as error:
        _say(errors, str(error))
        found = reports.invalid_report(job.run_id, error.problems, reproduce(job.overrides))
        reports.write_report(found, job.run_dir)
        return Outcome(EXIT_CONFIG, found, str(error))
    except (KvquayError, OSError) as error:
        _say(errors, f"{type(error).__name__}: {error}")
        return Outcome(EXIT_FAILED, None, str(error))


def _reap(console: Console) -> None:
    """What dead runs left would be missing from the room that this one is about to ask for."""
    gone = [result for result in reap(find_stale(), apply=True) if result.removed]
    if gone:
        total = format_size(sum(result.size_bytes for result in gone))
        _say(console, f"removed {len(gone)} region file(s) of dead runs, {total}")


def reproduce(overrides: Sequence[str]) -> str:
    """The command that runs the same again."""
    return shlex.join(["python", "launch.py", *overrides])


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _absolute(config: Config) -> Config:
    """Workers may stand in another directory than the one in which a path was typed."""
    if not config.workload.path:
        return config
    path = os.path.abspath(os.path.expanduser(config.workload.path))
    return replace(config, workload=replace(config.workload, path=path))


def _launch(plan: Plan, job: Job, console: Console, errors: Console) -> Outcome:
    config = plan.settings
    spec = workload_spec(config.workload, plan.cache)
    started_s = time.monotonic()
    _say(
        console,
        f"run {plan.run.run_id}: {plan.topology.data_parallel_size} replicas x "
        f"{plan.topology.world_size} workers, plan {plan.digest[:16]}",
    )
    view = RunView(console, plan, count_requests(spec), config.view)
    try:
        with view:
            state = supervise(plan, _spawner(plan, job.environment), view)
    finally:
        remove_named_regions(plan.run.run_id)
    duration_s = time.monotonic() - started_s
    found = reports.build_report(plan, state, duration_s, reproduce(job.overrides))
    reports.write_report(found, job.run_dir)
    if found["replicas"] and config.view != "quiet":
        print_report(console, found)
    return _outcome(found, state, errors)


def _spawner(plan: Plan, environment: dict[str, str]) -> Spawner:
    if plan.settings.spawn.kind == "inline":
        from orchestrator.spawn.inline import InlineSpawner  # imports torch

        return InlineSpawner(plan)
    return TorchrunSpawner(plan, environment)


def _outcome(found: dict[str, Any], state: RunState, errors: Console) -> Outcome:
    if found["status"] == reports.OK:
        return Outcome(EXIT_OK, found)
    failure = state.first_failure
    if state.signal is not None:
        reason = f"interrupted by {found['signal']}"
    elif failure is not None:
        reason = str(failure)
    elif found["status"] == reports.WRONG:
        wrong = found["verification"]["blocks_wrong"]
        reason = f"{wrong} blocks held wrong bytes when they were loaded; none was served"
    else:
        reason = "a replica ended without a result"
    _say(errors, f"run {found['status']}: {reason}")
    return Outcome(EXIT_FAILED, found, reason, state.signal)
