"""Finds a run that was done before: of the same plan, to a good end, with every byte right.

A plan's digest covers everything that was configured and the version of kvquay. It does not cover
what a file holds that is named in it, such as a trace, nor what was in a tier before.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from orchestrator import __version__
from orchestrator.report import OK
from orchestrator.rundir import RunDir


def good_report(run_dir: Path, digest: str) -> dict[str, Any] | None:
    """The report of a run directory, if it is one of this plan and all was well."""
    report = read_report(run_dir, digest.encode())
    if report is None or report.get("plan_digest") != digest:
        return None
    return report if report.get("status") == OK and report.get("version") == __version__ else None


def find_good(sweep_dir: Path, run_dir: Path, digest: str) -> tuple[Path, dict[str, Any]] | None:
    """A good run of this plan: in the job's own directory, else in any of this sweep and of the
    sweeps beside it, the newest one."""
    own = good_report(run_dir, digest)
    if own is not None:
        return run_dir, own
    others = [*sweep_dir.glob("*/report.json"), *sweep_dir.parent.glob("*/*/report.json")]
    for path in sorted(others, key=_age, reverse=True):
        found = good_report(path.parent, digest)
        if found is not None:
            return path.parent.absolute(), found
    return None


def read_report(run_dir: Path, having: bytes = b"") -> dict[str, Any] | None:
    """What stands in a run directory's report.json; None where that is not a report, or has not
    these bytes in it."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        data = RunDir(run_dir).report.read_bytes()
        found = msgspec.json.decode(data) if having in data else None
        if isinstance(found, dict):
            return found
    return None


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
