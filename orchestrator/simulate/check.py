"""What can be wrong with what a simulation is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backends.errors import ConfigError
from backends.policy.registry import PolicyRegistry
from orchestrator.doctor.result import DoctorError, read_result
from orchestrator.problems import Problem, did_you_mean
from orchestrator.rundir import RunDir
from orchestrator.schema import SimulateConf
from orchestrator.simulate.study import BELADY

MOST_CHUNKS = 2**40
STACK, POLICIES = "stack", "policies"
PARTS = (STACK, POLICIES)


def check_simulation(settings: SimulateConf) -> Iterator[Problem]:
    """Every problem with the `simulate` group that `orchestrator.values` cannot know."""
    yield from _check_parts(settings)
    registry = PolicyRegistry()
    known = {*registry.names(), BELADY}
    for name in settings.policies:
        if name not in known:
            hint = did_you_mean(name, known)
            yield Problem("simulate.policies", name, "is not an eviction policy", hint)
            continue
        try:
            if name != BELADY:
                registry.open(name, 1)
        except ConfigError as error:
            yield Problem("simulate.policies", name, str(error), "leave it out")
    if len(set(settings.policies)) != len(settings.policies):
        yield Problem(
            "simulate.policies", list(settings.policies), "names one twice", "name each once"
        )
    if not settings.capacities:
        fix = "set simulate.capacities=[10000]"
        yield Problem("simulate.capacities", [], "must name a capacity", fix)
    for capacity in settings.capacities:
        if not 1 <= capacity <= MOST_CHUNKS:
            limit = f"must be 1 to {MOST_CHUNKS} chunks"
            yield Problem("simulate.capacities", capacity, limit, "choose another")
    if len(set(settings.capacities)) != len(settings.capacities):
        yield Problem(
            "simulate.capacities", list(settings.capacities), "names one twice", "name each once"
        )


def _check_parts(settings: SimulateConf) -> Iterator[Problem]:
    for name in settings.parts:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS)
            yield Problem("simulate.parts", name, f"must be one of {', '.join(PARTS)}", hint)
    if not settings.parts:
        fix = "set simulate.parts=[stack]"
        yield Problem("simulate.parts", [], "must name something to simulate", fix)
    if settings.doctor is not None:
        try:
            read_result(Path(settings.doctor))
        except DoctorError as error:
            fix = "give the directory of an action=doctor, or its doctor.json"
            yield Problem("simulate.doctor", settings.doctor, str(error), fix)
    if settings.compare is not None and not RunDir(Path(settings.compare)).plan.is_file():
        limit = "is not the directory of a run: there is no plan.json in it"
        fix = "give the run directory that launch.py told at the end"
        yield Problem("simulate.compare", settings.compare, limit, fix)
