"""What one job does, from a composed configuration to an exit status."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace

from omegaconf import DictConfig
from rich.console import Console

from backends.errors import KvquayError
from backends.region.reap import find_stale, reap
from backends.units import format_size
from orchestrator import report as reports
from orchestrator.compose import to_config
from orchestrator.engine_vllm.settings import complete
from orchestrator.html.report_page import invalid_page
from orchestrator.job import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, Job, Outcome, reproduce, say
from orchestrator.model import expand_model
from orchestrator.object_store import FROM_THE_ENVIRONMENT, absolute_url
from orchestrator.plan import Plan, RunInfo, make_plan, write_plan
from orchestrator.problems import ConfigProblems
from orchestrator.render import print_plan
from orchestrator.schema import Config
from orchestrator.sweep.resume import find_good
from orchestrator.validate import validate


def run(cfg: DictConfig, job: Job, console: Console, errors: Console) -> Outcome:
    """Do what `action` says. Every expected failure becomes an Outcome, told on `errors`."""
    try:
        config = complete(_absolute(to_config(cfg)))
        if config.action == "run" and config.region.backing == "shm":
            _reap(console)
        checked = validate(config, job.run_dir, job.environment)
        # What a config.json said stands in the plan itself, so that the file may go.
        config = replace(config, model=expand_model(config.model))
        if config.action == "clean":
            from orchestrator.clean import clean

            clean(console, apply=config.clean.apply)
            return Outcome(EXIT_OK)
        info = RunInfo(job.run_id, str(job.run_dir), time.time())
        if config.action == "simulate":
            from orchestrator.simulate.action import simulate

            simulate(config, checked, info, console)
            return Outcome(EXIT_OK)
        plan = make_plan(config, checked.topology, checked.model, checked.groups, info)
        done = _done_before(config, job, plan, console)
        if done is not None:
            return done
        write_plan(plan, job.run_dir)
        if config.action == "plan":
            print_plan(console, plan)
            console.print(f"\nplan:   {job.run_dir}/plan.json", soft_wrap=True, highlight=False)
            return Outcome(EXIT_OK)
        if config.action == "export":
            from orchestrator.engine_vllm.export import print_commands

            print_commands(console, plan, job.environment)
            return Outcome(EXIT_OK)
        if config.action == "doctor":
            from orchestrator.doctor.action import doctor

            return doctor(plan, job, console, errors)
        from orchestrator.execute import run_plan  # planning alone answers sooner without it

        return run_plan(plan, job, console, errors)
    except ConfigProblems as error:
        if any(problem.fix == FROM_THE_ENVIRONMENT for problem in error.problems):
            # A secret that stands in a file was copied by Hydra before anybody could look.
            shutil.rmtree(job.run_dir / ".hydra", ignore_errors=True)
        say(errors, str(error))
        found = reports.invalid_report(job.run_id, error.problems, reproduce(job.overrides))
        reports.write_report(found, job.run_dir)
        reports.write_page(invalid_page(found), job.run_dir)
        return Outcome(EXIT_CONFIG, found, str(error), log=str(job.run_dir / "report.json"))
    except (KvquayError, OSError) as error:
        say(errors, f"{type(error).__name__}: {error}")
        return Outcome(EXIT_FAILED, None, str(error), log=str(job.run_dir))


def _done_before(config: Config, job: Job, plan: Plan, console: Console) -> Outcome | None:
    """A job of a sweep that need not be done again, where `sweep.resume` is set."""
    if job.sweep_dir is None or not config.sweep.resume or config.action != "run":
        return None
    found = find_good(job.sweep_dir, job.run_dir, plan.digest)
    if found is None:
        return None
    where, report = found
    say(console, f"plan {plan.digest[:16]} was run before, and well: {where}/report.json")
    return Outcome(EXIT_OK, report, resumed_from=where)


def _reap(console: Console) -> None:
    """What dead runs left would be missing from the room that this one is about to ask for."""
    gone = [result for result in reap(find_stale(), apply=True) if result.removed]
    if gone:
        total = format_size(sum(result.size_bytes for result in gone))
        say(console, f"removed {len(gone)} region file(s) of dead runs, {total}")


def _absolute(config: Config) -> Config:
    """Workers may stand in another directory than the one in which a path was typed."""

    def absolute(path: str) -> str:
        return os.path.abspath(os.path.expanduser(path))

    workload, stack = config.workload, config.tiers.stack
    if workload.path:
        workload = replace(workload, path=absolute(workload.path))
    fs = replace(
        stack.fs,
        paths=[absolute(path) for path in stack.fs.paths],
        affinity={rank: absolute(path) for rank, path in stack.fs.affinity.items()},
    )
    bundle = stack.object.ca_bundle
    objects = replace(
        stack.object,
        url=absolute_url(stack.object.url),
        ca_bundle=absolute(bundle) if bundle else bundle,
    )
    tiers = replace(config.tiers, stack=replace(stack, fs=fs, object=objects))
    model = config.engine.model
    engine = replace(config.engine, model=absolute(model)) if model else config.engine
    return replace(config, workload=workload, tiers=tiers, engine=engine)
