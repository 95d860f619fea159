"""A doctor's findings as a person reads them: as they come, and what to mend at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from orchestrator.doctor.result import Check, Result
from orchestrator.plan import Plan

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NAME_WIDTH: Final = 22
_INDENT: Final = 6 + 2 + _NAME_WIDTH + 2
_NARROWEST: Final = 30


class DoctorView:
    """Use as a context. A spinner with the present step on a terminal, a line a probe elsewhere."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._quiet = plan.settings.view == "quiet"
        self._plan = plan
        self._bar: Progress | None = None
        if plan.settings.view == "auto" and console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        topology = self._plan.topology
        if not self._quiet:
            self._line(
                (f"doctor, plan {self._plan.digest[:16]}", "bold"),
                f"  {topology.data_parallel_size} replicas x {topology.world_size} workers; takes "
                "less than a minute",
            )
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, title: str) -> None:
        if not self._quiet:
            self._line("\n", (title, "bold"))

    def step(self, step: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=step)

    def end(self, checks: Sequence[Check]) -> None:
        if self._quiet or not checks:
            return
        for check in checks:
            width = max(_NARROWEST, self._console.width - _INDENT)
            found = textwrap.wrap(check.found, width, break_on_hyphens=False) or [""]
            self._line(
                (f"{check.verdict:>6}", _STYLES[check.verdict]),
                f"  {check.name:<{_NAME_WIDTH}}  {found[0]}",
            )
            for line in found[1:]:
                self._line(" " * _INDENT, line)

    def summary(self, result: Result, path: Path) -> None:
        """Counts, and everything that is to be mended, the worst first."""
        counts = [
            f"{sum(check.verdict == verdict for check in result.checks)} {verdict}"
            for verdict in ("fail", "warn", "ok")
        ]
        wrong = [check for check in result.checks if check.verdict == "fail"]
        if not self._quiet:
            wrong += [check for check in result.checks if check.verdict == "warn"]
        for number, check in enumerate(wrong, 1):
            where = f" {check.where}" if check.where else ""
            self._line(
                f"\n{number}. " if number > 1 else "\nto mend:\n\n1. ",
                (check.verdict, _STYLES[check.verdict]),
                f"  {check.name}{where}",
            )
            for name, text in (
                ("found", check.found),
                ("expected", check.expected),
                ("fix", check.fix),
            ):
                if text:
                    self._line((f"   {name + ':':<10}", "bold"), text)
        style = _STYLES[result.verdict]
        self._line("\n", (f"{', '.join(counts)}", style), f"  in {result.seconds:.1f} s")
        self._line(f"doctor: {path}")

    def _line(self, *parts: str | tuple[str, str]) -> None:
        self._console.print(Text.assemble(*parts), soft_wrap=True)
