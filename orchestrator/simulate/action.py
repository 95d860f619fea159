"""`action=simulate`: what a run would come to, and what eviction policies make of its load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.config import CacheConfig
from orchestrator.doctor.result import read_result
from orchestrator.plan import Plan, RunInfo, cache_config, make_plan, write_atomic
from orchestrator.schema import Config
from orchestrator.simulate.access import Access, accesses, hash_tokens
from orchestrator.simulate.check import POLICIES, STACK
from orchestrator.simulate.compare import Run, compare, read_run, remarks
from orchestrator.simulate.run import predict
from orchestrator.simulate.show import show_comparison, show_stack
from orchestrator.simulate.study import Row, replays, study
from orchestrator.simulate.timing import NO_TIME, Timing, read_timing
from orchestrator.validate import Validated
from orchestrator.workload.source import count_requests, open_workload
from orchestrator.workloads import workload_spec

FILE = "simulate.json"
PLAIN_INTERVAL_S = 5.0


def simulate(config: Config, checked: Validated, run: RunInfo, console: Console) -> None:
    """Predict what a run of this configuration comes to, or compare such a prediction with a run;
    and what eviction policies make of the workload. Prints tables and writes `simulate.json`.

    Raises WorkloadError where the workload cannot be read, DoctorError and CompareError where what
    it is to be compared with, or computed from, cannot.
    """
    began_s = time.perf_counter()
    settings = config.simulate
    found: dict[str, Any] = {}
    if settings.compare is not None:
        found |= _comparison(config, read_run(Path(settings.compare)), console)
    else:
        if STACK in settings.parts:
            plan = make_plan(config, checked.topology, checked.model, checked.groups, run)
            found |= {"stack": _stack(config, plan, console)}
        if POLICIES in settings.parts:
            found |= _policies(config, cache_config(config, checked.topology), console)
    found["seconds"] = time.perf_counter() - began_s
    run_dir = Path(run.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / FILE, msgspec.json.format(msgspec.json.encode(found), indent=2))
    console.print(f"\nsimulated: {run_dir / FILE}", soft_wrap=True, highlight=False)


def _stack(config: Config, plan: Plan, console: Console) -> dict[str, Any]:
    """A run of `plan`, predicted and shown."""
    timing = _timing(config, plan)
    spec = workload_spec(plan.settings.workload, plan.cache)
    total = count_requests(spec)
    with _Progress(console, config.view, total) as progress:
        found = predict(plan, timing, lambda done: progress("tiers", done))
    if config.view != "quiet":
        show_stack(console, found, timed=timing.timed)
    return found | {"workload": spec.to_dict(), "doctor": config.simulate.doctor}


def _timing(config: Config, plan: Plan) -> Timing:
    doctor = config.simulate.doctor
    if doctor is None:
        return NO_TIME
    return read_timing(read_result(Path(doctor)), plan.region.row_bytes)


def _comparison(config: Config, run: Run, console: Console) -> dict[str, Any]:
    """Beside a run: what was asked of it stands in its own plan."""
    found = _stack(config, run.plan, console)
    figures = compare(found, run, timed=_timing(config, run.plan).timed)
    notes = remarks(run)
    if config.view != "quiet":
        console.print(f"\nbeside {run.report['run_dir']}:", soft_wrap=True, highlight=False)
        show_comparison(console, figures, notes)
    return {
        "stack": found,
        "compare": {
            "run_dir": run.report["run_dir"],
            "remarks": notes,
            "figures": [figure.to_dict() for figure in figures],
        },
    }


def _policies(config: Config, cache: CacheConfig, console: Console) -> dict[str, Any]:
    """The workload's metadata as one cache of one replica would see it, with many policies."""
    began_s = time.perf_counter()
    settings = config.simulate
    chunk = settings.tokens_per_chunk or chunk_tokens(config, cache)
    spec = workload_spec(config.workload, cache)
    unit = hash_tokens(spec, chunk)
    spec = replace(spec, tokens_per_hash=unit)
    workload = open_workload(spec)
    requests = list(accesses(workload, unit, chunk))
    total = len(requests) * replays(settings.policies, settings.capacities, settings.admission)
    with _Progress(console, config.view, total) as progress:
        rows = list(
            study(
                *(requests, settings.policies, settings.capacities, settings.admission, chunk),
                progress,
            )
        )
    found = summary(requests, chunk, rows) | {
        "workload": spec.to_dict(),
        "skipped_lines": workload.skipped,
        "policies_s": time.perf_counter() - began_s,
    }
    if config.view != "quiet":
        if STACK in settings.parts:
            console.print()
        show(console, found)
    return found


def chunk_tokens(config: Config, cache: CacheConfig) -> int:
    """Tokens of the sequence that a chunk of this configuration holds."""
    parallel = config.parallel
    across = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    return cache.tokens_per_block * across * cache.blocks_per_chunk


def summary(requests: Sequence[Access], chunk: int, rows: Sequence[Row]) -> dict[str, Any]:
    """What was replayed and what came of it, in plain JSON types."""
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "tokens_per_chunk": chunk,
        "chunks": sum(len(request.keys) for request in requests),
        "different_chunks": len({key for request in requests for key in request.keys}),
        "results": [row.to_dict() for row in rows],
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """The table, one line a capacity and policy."""
    console.print(
        f"{found['requests']:,} requests, {found['prompt_tokens']:,} prompt tokens, "
        f"{found['different_chunks']:,} different chunks of {found['tokens_per_chunk']} tokens",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("chunks", justify="right")
    widest = max(len(row["policy"]) for row in found["results"])
    table.add_column("policy", no_wrap=True, min_width=widest)
    most = max(row["hit_tokens"] for row in found["results"])
    table.add_column("hit tokens", justify="right", no_wrap=True, min_width=len(f"{most:,}"))
    for name in ("hits", "first half", "second half", "x LRU", "gap to Belady"):
        table.add_column(name, justify="right")
    table.add_column("evicted", justify="right")
    table.add_column("seconds", justify="right")
    previous = None
    for row in found["results"]:
        if previous not in (None, row["capacity"]):
            table.add_row()
        previous = row["capacity"]
        table.add_row(
            f"{row['capacity']:,}",
            row["policy"],
            f"{row['hit_tokens']:,}",
            f"{row['hit_share']:.1%}",
            f"{row['first_half']['hit_share']:.1%}",
            f"{row['second_half']['hit_share']:.1%}",
            _number(row["times_lru"]),
            _number(row["gap_closed"]),
            f"{row['evicted_chunks']:,}",
            f"{row['seconds']:.2f}",
        )
    console.print(table)
    console.print("gap to Belady: 0 is LRU, 1 is what knowing the future would give")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class _Progress:
    """A bar on a terminal, a line now and then elsewhere, nothing where quiet is asked for."""

    def __init__(self, console: Console, mode: str, total: int) -> None:
        self._console = console
        self._total = total
        self._quiet = mode == "quiet"
        self._said_s = time.monotonic()
        self._bar: Progress | None = None
        if mode == "auto" and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("simulating", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done)
        elif not self._quiet and time.monotonic() - self._said_s >= PLAIN_INTERVAL_S:
            self._said_s = time.monotonic()
            share = done / self._total
            self._console.print(f"{share:.0%} {what}", highlight=False)
