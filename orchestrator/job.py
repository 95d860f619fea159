"""What goes into a job and what comes out of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.spawn.nursery import Nursery

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What Hydra knows of a job beside its configuration.

    `sweep_dir` is None where it is the only one. `nursery` starts its zygote, where one is kept for
    several jobs.
    """

    run_id: str
    run_dir: Path
    overrides: tuple[str, ...]
    environment: dict[str, str]
    sweep_dir: Path | None = None
    nursery: Nursery | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `signal` is the one that interrupted it, `log` where to read more, and
    `resumed_from` the directory of the run that was as good, so that this one was not made."""

    exit_status: int
    report: dict[str, Any] | None = None
    reason: str = ""
    signal: int | None = None
    log: str = ""
    resumed_from: Path | None = None


def reproduce(overrides: Sequence[str]) -> str:
    """The command that runs the same again."""
    return shlex.join(["python", "launch.py", *overrides])


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
