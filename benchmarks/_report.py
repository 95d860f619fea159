"""What every benchmark shares: its `--json` option, its table, and the `ratio` lines at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's result. `ratios` are printed last, in order; None cells are left empty."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    ratios: Mapping[str, float]
    notes: Sequence[str] = field(default_factory=tuple)


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser that has `--json FILE`; add the benchmark's own options to it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser


def publish(report: Report, json_path: Path | None) -> None:
    """Prints machine, table, notes and then `ratio <what>: <number>` lines; writes the JSON."""
    machine = describe_machine()
    if json_path is not None:
        document = {
            "title": report.title,
            "machine": machine,
            "rows": [dict(zip(report.columns, row, strict=True)) for row in report.rows],
            "notes": list(report.notes),
            "ratios": dict(report.ratios),
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(report.title)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print()
    for line in _table(report.columns, report.rows):
        print(line)
    print()
    for note in report.notes:
        print(note)
    for name, ratio in report.ratios.items():
        print(f"ratio {name}: {ratio:.3f}")


def describe_machine() -> dict[str, str]:
    """What a reader needs to compare figures: processor, cores, load, and versions."""
    described = {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in ("torch", "numpy"):
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            described[package] = "none"
    return described


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    cells = [list(columns), *[[_text(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
