"""`action=doctor`: measure, tell, write `doctor.json`. Under a minute, and it leaves nothing.

Each probe has a time of its own; what does not answer in it is a verdict. Measurements are made one
after another, so that none is in another's way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from backends.errors import KvquayError
from backends.tier.registry import TierRegistry
from orchestrator import __version__, object_store
from orchestrator.doctor.bounded import Bounds, Interrupted, NoAnswer, Stop
from orchestrator.doctor.disk import measure_path
from orchestrator.doctor.host import check_host, machine_figures
from orchestrator.doctor.loads import measure_disk_loads
from orchestrator.doctor.notes import Notes, failed
from orchestrator.doctor.objects import measure_store
from orchestrator.doctor.result import (
    FILE,
    FORMAT,
    Check,
    FsFigures,
    MemoryFigures,
    ObjectFigures,
    PathFigures,
    Result,
    TierFigures,
    encode,
)
from orchestrator.doctor.sample import Sample
from orchestrator.doctor.show import DoctorView
from orchestrator.job import EXIT_FAILED, EXIT_OK, Job, Outcome, reproduce
from orchestrator.lower_tiers import DISKS, lower_tiers
from orchestrator.plan import Plan, write_atomic
from orchestrator.problems import ConfigProblems
from orchestrator.validate import validate

LIMIT_S: Final = 55.0
MEMORY_S: Final = 0.8
DISKS_S: Final = 4.0
"""Of all paths together; of one at most a third of it."""
FS_LIMIT_S: Final = 2.0
"""Of a path, beside its share of the time in which it is measured."""
STORE_S: Final = 1.5
LOADS_S: Final = 3.0
"""Of a tier in batches."""
_LEAST_S: Final = 0.2

_DISK_HANGS: Final = (
    "a disk or a network filesystem that hangs: look at its server, its mount options and dmesg, "
    "or leave the path out of tiers.stack.fs.paths"
)

# Checks of ours that say in more detail what a problem with these keys says.
_SAME: Final = (
    ("region.size", ("memory", "shm")),
    ("region.huge_pages", ("huge_pages",)),
    ("engine.device", ("memory",)),
    ("tiers.stack.fs", ("fs",)),
    ("tiers.stack.object", ("object",)),
    ("spawn.rdzv_port", ("ports", "rendezvous")),
    ("metrics.", ("ports",)),
    ("events.", ("ports",)),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to find out, in `limit_s` at most. `group` begins the names of its checks."""

    title: str
    group: str
    limit_s: float
    call: Callable[[Notes, Stop], Any]
    where: str = ""
    hung: str = "look at what this machine is doing (top, dmesg)"


def doctor(plan: Plan, job: Job, console: Console, errors: Console) -> Outcome:
    """Exit status 0 where nothing failed, 1 where something did."""
    began_s, created_s = time.monotonic(), time.time()
    memory: MemoryFigures | None = None
    checks: list[Check] = []
    tiers: list[TierFigures] = []
    try:
        with DoctorView(console, plan) as view:
            host = _host_probes(plan, view)
            bounds = Bounds(LIMIT_S)
            with bounds.signals():
                for probe in host:
                    found = _run(probe, bounds, view, checks)
                    memory = found if isinstance(found, MemoryFigures) else memory
                tiers += _measure_tiers(plan, job, bounds, view, checks)
                _run(_refusals(plan, job, checks), bounds, view, checks)
    except Interrupted as error:
        name = str(error)
        errors.print(f"interrupted by {name}: nothing was written", highlight=False)
        return Outcome(EXIT_FAILED, None, f"interrupted by {name}", error.signum)
    result = Result(
        format=FORMAT,
        version=__version__,
        run_id=job.run_id,
        created_s=created_s,
        seconds=time.monotonic() - began_s,
        plan_digest=plan.digest,
        reproduce=reproduce(job.overrides),
        machine=machine_figures(),
        memory=memory,
        tiers=tuple(tiers),
        checks=tuple(checks),
    )
    path = job.run_dir / FILE
    write_atomic(path, encode(result))
    view.summary(result, path)
    worst = result.verdict
    reason = "; ".join(f"{c.name}: {c.found}" for c in result.checks if c.verdict == "fail")
    status = EXIT_FAILED if worst == "fail" else EXIT_OK
    return Outcome(status, None, reason, log=str(path))


def _host_probes(plan: Plan, view: DoctorView) -> list[Probe]:
    """What is asked of the machine itself."""
    view.step("loading torch")
    # Before signals are caught and clocks run: it takes a while, and Ctrl-C ends it as any program.
    from orchestrator.doctor.memory import measure_memory
    from orchestrator.doctor.network import check_network

    return [
        Probe("machine", "machine", 8.0, lambda notes, stop: check_host(plan, notes)),
        Probe(
            "memory copy",
            "memory",
            12.0,
            lambda notes, stop: measure_memory(plan, notes, stop, MEMORY_S),
        ),
        Probe("network", "network", 10.0, lambda notes, stop: check_network(plan, notes, stop)),
    ]


def _run(probe: Probe, bounds: Bounds, view: DoctorView, checks: list[Check]) -> Any:
    """What a probe found, None where it did not answer; its checks are shown and kept."""
    view.begin(probe.title)
    notes = Notes(probe.where, view.step)
    found = None
    try:
        found = bounds.run(lambda stop: probe.call(notes, stop), probe.limit_s)
    except NoAnswer:
        notes.fail(
            f"{probe.group}.answer",
            f"no answer while {notes.step}; not waited for any longer",
            "an answer within some seconds",
            probe.hung,
        )
    except (KvquayError, OSError) as error:
        limit, _, fix = str(error).partition("; ")
        notes.fail(f"{probe.group}.error", f"{limit}, while {notes.step}", "", fix or probe.hung)
    finally:
        view.end(notes.checks)
    checks += notes.checks
    return found


def _measure_tiers(
    plan: Plan, job: Job, bounds: Bounds, view: DoctorView, checks: list[Check]
) -> Iterator[TierFigures]:
    sample = Sample(plan)
    for name, given in lower_tiers(plan.settings).items():
        settings = TierRegistry().find(name).settings(given)
        if name == DISKS:
            paths = tuple(_measure_disks(settings, sample, bounds, view, checks))
            usable = [path.path for path in paths if path.load_bytes_per_s]
            curve = None
            if usable:
                probe = _disk_loads_probe(settings, usable, sample)
                curve = _run(probe, bounds, view, checks)
            yield FsFigures(block_bytes=sample.block_bytes, paths=paths, load_curve=curve)
        elif name == object_store.NAME:
            found = _run(_store_probe(plan, job, settings, sample), bounds, view, checks)
            yield found or ObjectFigures(url=settings.url, block_bytes=sample.block_bytes)


def _measure_disks(
    settings: Any, sample: Sample, bounds: Bounds, view: DoctorView, checks: list[Check]
) -> Iterator[PathFigures]:
    share_s = DISKS_S / max(3, len(settings.paths))
    for path in settings.paths:
        seconds = max(_LEAST_S, share_s)

        def call(notes: Notes, stop: Stop, path: str = path, seconds: float = seconds) -> Any:
            return measure_path(path, settings, sample, notes, stop, seconds)

        probe = Probe(
            f"fs {path}",
            "fs",
            FS_LIMIT_S + 6 * seconds,
            call,
            path,
            _DISK_HANGS,
        )
        found = _run(probe, bounds, view, checks)
        yield found or PathFigures(path=path, o_direct=False)


def _disk_loads_probe(settings: Any, paths: Sequence[str], sample: Sample) -> Probe:
    def call(notes: Notes, stop: Stop) -> Any:
        return measure_disk_loads(settings, paths, sample, notes, stop, LOADS_S)

    return Probe("fs loads", "fs", FS_LIMIT_S + 3 * LOADS_S, call, hung=_DISK_HANGS)


def _store_probe(plan: Plan, job: Job, settings: Any, sample: Sample) -> Probe:
    way = object_store.way(plan.settings.tiers.stack.object)

    def call(notes: Notes, stop: Stop) -> ObjectFigures:
        return measure_store(settings, way, job.environment, sample, notes, stop, STORE_S, LOADS_S)

    return Probe(
        f"object {settings.url}",
        "object",
        20.0,
        call,
        settings.url,
        "a server that hangs: look at its log, or correct tiers.stack.object.endpoint",
    )


def _refusals(plan: Plan, job: Job, checks: Sequence[Check]) -> Probe:
    """What a run of this configuration would be refused for and no probe has told."""

    def call(notes: Notes, stop: Stop) -> None:
        notes.doing("checking the configuration against this machine")
        config = plan.settings
        config = replace(config, action="run", spawn=replace(config.spawn, check_machine=True))
        try:
            validate(config, Path(plan.run.run_dir), job.environment)
        except ConfigProblems as error:
            for problem in error.problems:
                told = (groups for prefix, groups in _SAME if problem.key.startswith(prefix))
                if not failed(checks, *next(told, ())):
                    value = "" if problem.value is None else f"is {problem.value!r}: "
                    notes.fail(problem.key, f"{value}{problem.limit}", "", problem.fix)
        if not notes.checks:
            notes.ok("configuration", "nothing else would keep a run from starting")

    return Probe("configuration", "configuration", 8.0, call)
