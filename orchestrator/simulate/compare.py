"""A prediction beside the run that it was made for: figure by figure, with the error."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from backends.errors import KvquayError
from orchestrator.plan import Plan, read_plan
from orchestrator.rundir import RunDir

BYTES_GOAL: Final = 0.02
LATENCY_GOAL: Final = 0.2


class CompareError(KvquayError):
    """A run directory has nothing that a prediction could be compared with."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`error` is predicted over measured less 1, None where nothing was measured. `goal` is the
    most that it may be, 0.0 for what is to be exact."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    goal: float

    @property
    def error(self) -> float | None:
        if self.predicted is None or self.measured is None:
            return None
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def met(self) -> bool:
        """Whether the goal is; nothing predicted and nothing measured is right."""
        if self.predicted == self.measured:
            return True
        return self.error is not None and abs(self.error) <= self.goal

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "met": self.met}


@dataclass(frozen=True, slots=True)
class Run:
    """What a finished run left."""

    plan: Plan
    report: dict[str, Any]


def read_run(run_dir: Path) -> Run:
    """Raises CompareError and PlanError."""
    directory = RunDir(run_dir)
    plan = read_plan(directory.plan)
    try:
        report = msgspec.json.decode(directory.report.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise CompareError(
            f"{directory.report}: cannot be read as a report: {error}; give the directory of a run "
            "that has ended"
        ) from error
    if not report.get("replicas") or "tiers" not in report:
        raise CompareError(
            f"{directory.report}: the run was {report.get('status')} and has no results; compare "
            "with one that ended well"
        )
    return Run(plan, report)


def remarks(run: Run) -> list[str]:
    """Why the run may differ from what is predicted, for people."""
    found = []
    if run.report["status"] != "ok":
        found.append(f"the run was {run.report['status']}")
    if not run.plan.settings.engine.lockstep:
        found.append(
            "the run was not in lockstep: what was under way when the next request came, and which "
            "replica was faster, is not predicted (run with experiment=reproducible)"
        )
    if run.plan.settings.region.scope == "node":
        found.append("rows that replicas read in each other's regions are not predicted")
    if run.plan.settings.engine.kind != "reference":
        found.append(
            "the run's engine makes decisions of its own; the reference engine's are shown"
        )
    return found


def compare(prediction: dict[str, Any], run: Run, *, timed: Collection[str]) -> list[Figure]:
    """Every figure that both have. `timed`: tiers whose latencies were predicted too."""
    return list(_figures(prediction, run.report, timed))


def _figures(
    prediction: dict[str, Any], report: dict[str, Any], timed: Collection[str]
) -> Iterator[Figure]:
    of_replicas = list(zip(prediction["replicas"], report["replicas"], strict=True))
    for source in prediction["hit_tokens"]:
        predicted = prediction["hit_tokens"][source]
        measured = sum(replica["hit_tokens"][source] for replica in report["replicas"])
        yield Figure(f"hit tokens {source}", "tokens", predicted, measured, 0.0)
        for mine, theirs in of_replicas:
            pair = mine["hit_tokens"][source], theirs["hit_tokens"][source]
            if pair[0] != pair[1]:
                index = theirs["data_parallel_index"]
                yield Figure(f"hit tokens {source}, replica {index}", "tokens", *pair, 0.0)
    for name, tier in prediction["tiers"].items():
        real = report["tiers"][name]
        for key in ("stored_bytes", "loaded_bytes"):
            what = f"{name} {key.removesuffix('_bytes')}"
            yield Figure(what, "bytes", tier[key], real[key], BYTES_GOAL)
        yield Figure(f"{name} evictions", "blocks", tier["evictions"], real["evictions"], 0.02)
        if name in timed:
            pair = tier["load_latency_s"]["mean"], real["load_latency_s"].get("mean")
            if tier["loaded_bytes"] or real["loaded_bytes"]:
                yield Figure(f"{name} mean load latency", "s", *pair, LATENCY_GOAL)
