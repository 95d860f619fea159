"""The peers' sections of docs/benchmarks.md. A section is replaced whole; what stands between
sections is written by hand and left alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.results import (
    LOAD,
    ON_DISK,
    STORE,
    Comparison,
    PartResult,
    median_of,
)

Row = Sequence[str]


def write(path: Path, sections: dict[str, str]) -> None:
    """Put each section between its marks; one whose marks are missing comes at the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    for name, section in sections.items():
        begin, end = f"<!-- peers {name}: begin -->", f"<!-- peers {name}: end -->"
        block = f"{begin}\n{section.strip()}\n{end}"
        marked = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if marked.search(text):
            text = marked.sub(block.replace("\\", r"\\"), text)
        else:
            text = f"{text.rstrip()}\n\n{block}\n"
    path.write_text(text, encoding="utf-8")


def section(result: PartResult, command: str, when: str, machine: str, conditions: str) -> str:
    """Markdown of one part."""
    parts = [f"```console\n$ {command}\n```", f"{when}, {machine}. {conditions}"]
    if result.figures:
        parts.append(_table(*_speeds(result)))
    elif result.given:
        parts.append(_table(*_given(result)))
    parts += [_failures(result), _losses(result)]
    if result.part == "faults":
        parts.append(_table(*_traits(result)))
    if result.versions:
        told = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
        parts.append(f"Versions: {told}.")
    if result.notes:
        parts.append("\n".join(f"- {_plain(note)}" for note in result.notes))
    return "\n\n".join(part for part in parts if part)


def _speeds(result: PartResult) -> tuple[Row, list[Row]]:
    whats = [
        what
        for what in (STORE, ON_DISK, LOAD)
        if any(what in figures.bytes_per_s for figures in result.figures.values())
    ]
    ratios = {(c.peer, c.block, c.what): c.ratio for c in result.comparisons()}
    head = [
        *("block", "way", *(f"{what}, MB/s" for what in whats)),
        *("CPU s/GB, store", "CPU s/GB, load", *(f"kvquay / it: {what}" for what in whats)),
    ]
    rows: list[Row] = []
    for way, block in result.measured():
        figures = result.figures[way, block]
        speeds = (median_of(figures.bytes_per_s, what) for what in whats)
        cpus = (median_of(figures.cpu_s_per_gb, what) for what in (STORE, LOAD))
        rows.append(
            [
                *(block, way, *("" if s is None else f"{s / 1e6:,.0f}" for s in speeds)),
                *("" if cpu is None else f"{cpu:.2f}" for cpu in cpus),
                *(_ratio(ratios.get((way, block, what))) for what in whats),
            ]
        )
    return head, rows


def _given(result: PartResult) -> tuple[Row, list[Row]]:
    head = ["peer", "what", "unit", "kvquay", "peer", "how many times better"]
    rows: list[Row] = [
        [c.peer, c.what, c.unit, f"{c.ours:.3g}", f"{c.theirs:.3g}", _ratio(c.ratio)]
        for c in result.given
    ]
    return head, rows


def _traits(result: PartResult) -> tuple[Row, list[Row]]:
    head = ["way", "damaged bytes", "after a restart", "publishing", "bounds"]
    rows: list[Row] = [
        [way, traits.checksum, traits.restart, traits.publish, traits.bounds]
        for way, traits in result.traits.items()
    ]
    return head, rows


def _failures(result: PartResult) -> str:
    failed = merged_failures(result)
    if not failed:
        return ""
    return _table(["no figures of", "because"], [[name, reason] for name, reason in failed.items()])


def merged_failures(result: PartResult) -> dict[str, str]:
    """Why ways have no figures, by way and the sizes that this is said of."""
    told: dict[tuple[str, str], list[str]] = {}
    for failure in result.failed():
        told.setdefault((failure.peer, failure.reason), []).append(failure.block)
    return {
        f"{peer} {' '.join(filter(None, blocks))}".strip(): reason
        for (peer, reason), blocks in told.items()
    }


def _losses(result: PartResult) -> str:
    lost = sorted((c for c in result.comparisons() if c.ratio < 1), key=lambda c: c.ratio)
    if not lost:
        return "We lose nowhere here." if list(result.comparisons()) else ""
    told = "; ".join(f"{_named(c)} {c.ratio:.2f}" for c in lost)
    return f"**Where we lose:** {told}."


def _named(comparison: Comparison) -> str:
    return " ".join(filter(None, (comparison.peer, comparison.what, comparison.block)))


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
