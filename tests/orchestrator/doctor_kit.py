"""What the doctor's tests share: small plans, filesystems of their own, children with limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import Check
from orchestrator.plan import Plan, RunInfo, make_plan, write_plan
from orchestrator.rundir import new_run_id
from orchestrator.schema import Config
from orchestrator.validate import validate
from tests.kit import REPO, compose_config

SECONDS = 0.05
"""Of each measurement: the figures are none that anybody looks at."""


def small_plan(run_dir: Path, **changes: Any) -> Plan:
    """A plan as `profile=ci` gives it, with some keys set otherwise: `region__backing="shm"`.

    Composed once, since every test here wants one.
    """
    config = _composed()
    for name, value in changes.items():
        config = _set(config, name.split("__"), value)
    plannable = replace(config, spawn=replace(config.spawn, check_machine=False))
    run_dir.mkdir(parents=True, exist_ok=True)
    checked = validate(plannable, run_dir)
    run = RunInfo(new_run_id(), str(run_dir), 0.0)
    plan = make_plan(config, checked.topology, checked.model, checked.groups, run)
    write_plan(plan, run_dir)
    return plan


@cache
def _composed() -> Config:
    return compose_config("action=doctor", "profile=ci")


def _set(node: Any, names: list[str], value: Any) -> Any:
    first, *rest = names
    inner = _set(getattr(node, first), rest, value) if rest else value
    return replace(node, **{first: inner})


def stop(limit_s: float = 30.0) -> Stop:
    return Stop(limit_s)


def of(notes: Notes, name: str) -> Check:
    """The one check of a name."""
    [found] = [check for check in notes.checks if check.name == name]
    return found


def verdicts(notes: Notes) -> dict[str, str]:
    return {check.name: check.verdict for check in notes.checks}


@contextmanager
def mounted(directory: Path, kind: str, options: str) -> Iterator[Path]:
    """A filesystem of its own, for a while; skips where this user may not mount."""
    directory.mkdir()
    command = ["mount", "-t", kind, "-o", options, kind, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


HOST = """
import json, sys
import msgspec
from pathlib import Path
from orchestrator.doctor.host import check_host
from orchestrator.doctor.notes import Notes
from orchestrator.plan import read_plan
notes = Notes()
check_host(read_plan(Path(sys.argv[1])), notes)
print(json.dumps(msgspec.to_builtins(notes.checks)))
"""


def host_checks(
    plan: Plan,
    *through: str,
    before: Callable[[], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """What a child finds of this machine, by name; `before` runs in it first."""
    done = subprocess.run(
        [*through, sys.executable, "-c", HOST, f"{plan.run.run_dir}/plan.json"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=before,
    )
    assert done.returncode == 0, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}
