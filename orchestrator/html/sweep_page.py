"""`sweep.html`: all jobs of a sweep on one page, what failed first."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.html import charts, figures
from orchestrator.html.charts import Dot
from orchestrator.html.markup import Child, Html, tag
from orchestrator.html.page import card, facts, heading, page, table, tiles, verdict
from orchestrator.sweep.compare import OBJECTIVES, Axis, Comparison, JobResult, Objective


def sweep_page(report: Mapping[str, Any], sweep: Comparison, directory: Path) -> bytes:
    """`directory` is where the page will stand: links are relative to it."""
    measured = any(job.values for job in sweep.jobs if job.well)
    return page(
        f"{report['sweep_id']} - kvquay sweep",
        heading(
            "kvquay sweep",
            report["sweep_id"],
            time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(report["started_s"])),
        ),
        _verdict(sweep),
        _failed(sweep, directory),
        _summary(report, sweep),
        [tag("h2", "Best settings"), _best(sweep)] if measured else None,
        [tag("h2", "Trade-offs"), _trade_offs(sweep)] if measured else None,
        [tag("h2", "What each setting did"), _axes(sweep)] if measured and sweep.axes else None,
        tag("h2", "All jobs"),
        card(_jobs(sweep, directory)),
        tag("h2", "The sweep"),
        card(
            facts(
                [
                    ("all jobs", tag("code", " ".join(sweep.common) or "-")),
                    *((axis.key, ", ".join(axis.values)) for axis in sweep.axes),
                    ("directory", tag("span", report["sweep_dir"], class_="mono")),
                    ("run it again", tag("pre", report["reproduce"])),
                ]
            )
        ),
    )


def _verdict(sweep: Comparison) -> Html:
    jobs, failed = len(sweep.jobs), len(sweep.failed)
    many = "job" if jobs == 1 else "jobs"
    if not failed:
        return verdict("good", "✓", f"{jobs} {many}, all ended well")
    words = f"{failed} of {jobs} {many} did not end well"
    return verdict("bad", "✗", words, "They come first below, with the reason and the log.")


def _failed(sweep: Comparison, directory: Path) -> Child:
    return [
        card(
            tag("h3", f"Job {job.number}: {job.status}"),
            tag("p", _settings(job), class_="soft"),
            tag("pre", job.reason or "no reason was told"),
            tag("p", "log: ", tag("span", job.log, class_="mono"), class_="note")
            if job.log and job.log not in job.reason
            else None,
            tag("p", _link(job, directory), class_="note"),
        )
        for job in sweep.failed
    ]


def _settings(job: JobResult) -> Html:
    return tag("code", "  ".join(f"{key}={value}" for key, value in job.settings.items()) or "-")


def _link(job: JobResult, directory: Path, words: str = "report") -> Child:
    there = Path(job.run_dir) / "report.html" if job.run_dir else None
    if there is None or not there.is_file():
        return None
    return tag("a", words, href=Path(os.path.relpath(there, directory)).as_posix())


def _summary(report: Mapping[str, Any], sweep: Comparison) -> Html:
    found = [
        (figures.count(len(sweep.jobs)), "jobs"),
        (figures.count(len(sweep.failed)), "failed or not run"),
        (figures.count(sum(job.resumed for job in sweep.jobs)), "done before"),
        (figures.seconds(report["duration_s"]), "whole sweep"),
    ]
    return tiles(*found)


def _best(sweep: Comparison) -> Html:
    cards = []
    for objective in OBJECTIVES:
        job = sweep.best(objective)
        if job is not None:
            cards.append(
                card(
                    tag("p", f"{'highest' if objective.larger else 'lowest'}: {objective.name}"),
                    tag("h3", objective.form(job.values[objective.key])),
                    tag("p", f"job {job.number}: ", _settings(job), class_="note"),
                )
            )
    return tag("div", cards, class_="grid best")


def _trade_offs(sweep: Comparison) -> Html:
    by_key = {objective.key: objective for objective in OBJECTIVES}
    pairs = [("held_bytes", "hit_share"), ("ttft_s", "load_bytes_per_s")]
    drawn = [_scatter(sweep, by_key[x], by_key[y]) for x, y in pairs]
    words = (
        "Blue jobs, and * below: no other job is better in one of the four figures and as good in "
        "all of them."
    )
    return card(tag("div", drawn, class_="inner"), tag("p", words, class_="note"))


def _scatter(sweep: Comparison, x: Objective, y: Objective) -> Html:
    dots = []
    for job in sorted(sweep.jobs, key=lambda job: job.pareto):
        across, up = job.values.get(x.key), job.values.get(y.key)
        if job.well and across is not None and up is not None:
            words = f"job {job.number}: {' '.join(f'{k}={v}' for k, v in job.settings.items())}"
            colour = "c-best" if job.pareto else "c-plain"
            dots.append(Dot(across, up, colour, words, str(job.number)))
    title = f"{y.name[0].upper()}{y.name[1:]} against {x.name}"
    return charts.scatter(title, dots, x.form, y.form, x_name=x.name, y_name=y.name)


def _axes(sweep: Comparison) -> Html:
    return tag("div", [card(tag("h3", axis.key), _axis(sweep, axis)) for axis in sweep.axes])


def _axis(sweep: Comparison, axis: Axis) -> Html:
    """Means over the jobs with each value, each figure with a bar as long as it is large."""
    means = {objective.key: sweep.means(axis, objective) for objective in OBJECTIVES}
    largest = {
        key: max((v for v in found.values() if v is not None), default=0.0)
        for key, found in means.items()
    }
    rows: list[list[Child]] = []
    for value in axis.values:
        jobs = sum(job.well and job.settings.get(axis.key) == value for job in sweep.jobs)
        cells: list[Child] = [tag("code", value), figures.count(jobs)]
        for objective in OBJECTIVES:
            figure = means[objective.key][value]
            part = 0.0 if not figure else figure / largest[objective.key]
            cells.append(
                tag(
                    "div",
                    tag("span", objective.form(figure)),
                    tag("i", style=f"width:{100 * part:.1f}%"),
                    class_="meter",
                )
            )
        rows.append(cells)
    columns = ("value", "jobs", *(f"{objective.name}, mean" for objective in OBJECTIVES))
    return table(columns, rows, tuple(range(len(columns))))


def _jobs(sweep: Comparison, directory: Path) -> Html:
    axes = [axis.key for axis in sweep.axes]
    rows: list[list[Child]] = []
    for job in sweep.jobs:
        status: Child = f"{job.status} (before)" if job.resumed else job.status
        rows.append(
            [
                f"{job.number}{' *' if job.pareto else ''}",
                *(job.settings.get(axis, figures.NOTHING) for axis in axes),
                status if job.well else tag("span", status, class_="wrong"),
                *(objective.form(job.values.get(objective.key)) for objective in OBJECTIVES),
                figures.count(job.hit_tokens),
                figures.seconds(job.duration_s),
                _link(job, directory) or figures.NOTHING,
            ]
        )
    columns = (
        *("job", *axes, "status"),
        *(objective.short for objective in OBJECTIVES),
        *("hit tokens", "run", "report"),
    )
    return table(columns, rows, tuple(range(len(axes) + 2)))
