"""The jobs of a sweep side by side: what was swept, what each job came to, which settings are best.

A job is compared by four figures: the share of prompt tokens that were found, bytes a second into
the devices, the estimated time to the first token, and the bytes that its tiers held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

from orchestrator.html import figures
from orchestrator.report import OK
from orchestrator.sweep.record import NOT_RUN, RESUMED, RUNNING, JobRecord
from orchestrator.sweep.resume import read_report

DIED: Final = "died"


@dataclass(frozen=True, slots=True)
class Objective:
    """A figure to compare jobs by. `larger` ones are better, or smaller ones."""

    key: str
    name: str
    short: str
    larger: bool
    form: Callable[[float | None], str]


OBJECTIVES: Final = (
    Objective("hit_share", "prompt tokens found", "found", True, figures.share),
    Objective("load_bytes_per_s", "load rate", "load/s", True, figures.rate),
    Objective("ttft_s", "time to first token", "TTFT", False, figures.seconds),
    Objective("held_bytes", "bytes held", "held", False, figures.size),
)


@dataclass(slots=True)
class JobResult:
    """One job as the page and the table have it. `settings` are the swept keys alone."""

    number: int
    status: str
    settings: dict[str, str]
    reason: str = ""
    log: str = ""
    run_dir: str = ""
    seconds: float | None = None
    ready_s: float | None = None
    duration_s: float | None = None
    plan_digest: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    hit_tokens: int | None = None
    store_bytes_per_s: float | None = None
    resumed: bool = False
    pareto: bool = False

    @property
    def well(self) -> bool:
        return self.status == OK


@dataclass(frozen=True, slots=True)
class Axis:
    """A key that differs between jobs, and its values in their order."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole sweep. `common` are the overrides that all jobs have; failed jobs come first."""

    axes: tuple[Axis, ...]
    common: tuple[str, ...]
    jobs: tuple[JobResult, ...]

    @property
    def failed(self) -> tuple[JobResult, ...]:
        return tuple(job for job in self.jobs if not job.well)

    def best(self, objective: Objective) -> JobResult | None:
        """The first of the best; None where no job has the figure."""
        there = [job for job in self.jobs if job.well and job.values.get(objective.key) is not None]
        if not there:
            return None
        return (max if objective.larger else min)(there, key=lambda job: _value(job, objective))

    def means(self, axis: Axis, objective: Objective) -> dict[str, float | None]:
        """For each value of an axis, the mean over the jobs that have it and ended well."""
        found: dict[str, float | None] = {}
        for value in axis.values:
            told = [
                _value(job, objective)
                for job in self.jobs
                if job.well
                and job.settings.get(axis.key) == value
                and job.values.get(objective.key) is not None
            ]
            found[value] = mean(told) if told else None
        return found


def compare(records: Sequence[JobRecord], planned: Sequence[Sequence[str]]) -> Comparison:
    """`planned` are the overrides of all jobs that were to run, as far as that is known."""
    overrides = {number: tuple(given) for number, given in enumerate(planned)}
    overrides |= {record.number: record.overrides for record in records}
    axes = _axes([overrides[number] for number in sorted(overrides)])
    swept = {axis.key for axis in axes}
    jobs = {record.number: _result(record, swept) for record in records}
    for number, given in overrides.items():
        if number not in jobs:
            settings = {key: v for key, v in map(split, given) if key in swept}
            jobs[number] = JobResult(number, NOT_RUN, settings, "the sweep ended before it")
    ordered = sorted(jobs.values(), key=lambda job: (job.well, job.status == NOT_RUN, job.number))
    mark_pareto(ordered)
    first = next(iter(overrides.values()), ())
    common = tuple(text for text in first if split(text)[0] not in swept)
    return Comparison(axes, common, tuple(ordered))


def split(override: str) -> tuple[str, str]:
    """Key and value of an override."""
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value


def _axes(overrides: Sequence[Sequence[str]]) -> tuple[Axis, ...]:
    values: dict[str, dict[str, None]] = {}
    for given in overrides:
        for key, value in map(split, given):
            values.setdefault(key, {})[value] = None
    return tuple(Axis(key, tuple(found)) for key, found in values.items() if len(found) > 1)


def _result(record: JobRecord, swept: set[str]) -> JobResult:
    settings = {key: value for key, value in map(split, record.overrides) if key in swept}
    report = (read_report(Path(record.result_dir)) if record.result_dir else None) or {}
    status = {RUNNING: DIED, NOT_RUN: NOT_RUN}.get(record.state, "")
    if not status:
        status = report.get("status") or (OK if record.well else "failed")
        status = "failed" if status == OK and not record.well else status
    replicas = report.get("replicas", ())
    shm = report.get("tiers", {}).get("shm", {})
    return JobResult(
        record.number,
        status,
        settings,
        record.reason,
        record.log,
        record.result_dir or record.run_dir,
        seconds=None if record.ended_s is None else record.ended_s - record.began_s,
        ready_s=report.get("ready_s"),
        duration_s=report.get("duration_s"),
        plan_digest=report.get("plan_digest"),
        values=_values(report) if replicas else {},
        hit_tokens=sum(sum(r["hit_tokens"].values()) for r in replicas) if replicas else None,
        store_bytes_per_s=shm.get("store_bytes_per_s"),
        resumed=record.state == RESUMED,
    )


def _values(report: Mapping[str, Any]) -> dict[str, float | None]:
    replicas, tiers = report["replicas"], report["tiers"]
    prompt = sum(replica["prompt_tokens"] for replica in replicas)
    hits = sum(sum(replica["hit_tokens"].values()) for replica in replicas)
    ttft = report.get("ttft") or {}
    held = sum(
        tier["capacity_bytes"] if name == "shm" else tier["usage_bytes"]
        for name, tier in tiers.items()
    )
    return {
        "hit_share": hits / prompt if prompt else None,
        "load_bytes_per_s": report.get("load_bytes_per_s"),
        "ttft_s": ttft.get("measured_s") or ttft.get("mean_s"),
        "held_bytes": float(held),
    }


def _value(job: JobResult, objective: Objective) -> float:
    value = job.values[objective.key]
    assert value is not None
    return value


def mark_pareto(jobs: Sequence[JobResult]) -> None:
    """Those than which no other job is better in one figure and as good in all of them."""
    well = [job for job in jobs if job.well and job.values]
    known = [o for o in OBJECTIVES if all(job.values.get(o.key) is not None for job in well)]
    if not known:
        return
    points = {
        job.number: [_value(job, o) if o.larger else -_value(job, o) for o in known] for job in well
    }
    for job in well:
        mine = points[job.number]
        job.pareto = not any(
            other != mine and all(b >= a for a, b in zip(mine, other, strict=True))
            for other in points.values()
        )
