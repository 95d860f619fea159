"""What can be known to be wrong with a workload before anything runs, all of it at once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable

from orchestrator.problems import did_you_mean
from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.mooncake import (
    ON_BAD_LINE,
    count_lines,
    file_problem,
    first_line,
    tokens_per_hash_problem,
)
from orchestrator.workload.router import POLICIES
from orchestrator.workload.spec import KINDS, WorkloadSpec
from orchestrator.workload.trace_line import SHORTEST_LINE_BYTES, BadLineError, parse_line

COUNTED_FILE_BYTES = 64 << 20
"""Lines of larger files are not counted: the check must answer at once (64 MiB take 30 ms)."""

Report = Callable[[str, str], None]


def check(spec: WorkloadSpec) -> list[tuple[str, str]]:
    """(field of the spec, what is wrong and what to do) for everything that is wrong.

    Reads the first line of a trace, and counts the lines of one that is not large.
    """
    found: list[tuple[str, str]] = []

    def report(field: str, message: str) -> None:
        found.append((field, message))

    _check_choice(report, "kind", spec.kind, KINDS)
    _check_choice(report, "policy", spec.policy, POLICIES)
    _check_choice(report, "on_bad_line", spec.on_bad_line, ON_BAD_LINE)
    _check_router(report, spec)
    if spec.requests is not None and not 1 <= spec.requests <= 2**53:
        report("requests", f"is {spec.requests}, expected at least 1, or null for all")
    if spec.kind == "trace":
        _check_trace(report, spec)
    elif spec.kind == "multi_turn":
        _check_multi_turn(report, spec)
    return found


def _check_choice(report: Report, field: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        choices = ", ".join(known)
        report(field, f"is {value!r}, expected one of {choices}; {did_you_mean(value, known)}")


def _check_router(report: Report, spec: WorkloadSpec) -> None:
    if not 0 < spec.tokens_per_s < math.inf:
        report("tokens_per_s", f"is {spec.tokens_per_s}, expected more than 0: a replica's speed")
    if not 1 <= spec.max_imbalance < math.inf:
        report("max_imbalance", f"is {spec.max_imbalance}, expected at least 1 (1.5 is usual)")


def _check_trace(report: Report, spec: WorkloadSpec) -> None:
    if problem := tokens_per_hash_problem(spec.tokens_per_hash):
        report("tokens_per_hash", problem)
    if spec.offset < 0:
        report("offset", f"is {spec.offset}, expected at least 0")
    if spec.path is None or not spec.path:
        report("path", "is not set; give the path of a trace file (Mooncake format)")
        return
    if problem := file_problem(spec.path):
        report("path", problem)
        return
    try:
        _check_content(report, spec, spec.path)
    except WorkloadError as error:
        report("path", str(error).removeprefix("path "))


def _check_content(report: Report, spec: WorkloadSpec, path: str) -> None:
    if spec.on_bad_line == "error":
        try:
            parse_line(first_line(path))
        except BadLineError as bad:
            report("path", f"is {path!r}, whose line 1 is bad: {bad}; expected Mooncake format")
    if spec.offset > 0:
        size_bytes = os.stat(path).st_size
        most = -(-size_bytes // SHORTEST_LINE_BYTES)
        if spec.offset < most and size_bytes <= COUNTED_FILE_BYTES:
            most = count_lines(path)
        if spec.offset >= most:
            report("offset", f"is {spec.offset}, but {path!r} holds at most {most} requests")


def _check_multi_turn(report: Report, spec: WorkloadSpec) -> None:
    for field, message in spec.shape().problems():
        report(field, message)
    if spec.tokens_per_hash < 1:
        report("tokens_per_hash", f"is {spec.tokens_per_hash}, expected at least 1")
    if spec.conversations is None and spec.requests is None:
        report("conversations", "is null and so is requests: the stream has no end; set one")
    if spec.path is not None:
        report("path", f"is {spec.path!r}, but only workload=trace reads a file")
    if spec.offset:
        report("offset", f"is {spec.offset}, but only workload=trace has an offset")
