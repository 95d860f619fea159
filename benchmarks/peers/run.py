"""kvquay beside other projects that keep KV blocks: the same work, on this machine, in one run.

    python benchmarks/peers/run.py [--parts filesystem memory object metadata startup]
                                   [--only PEER ...] [--quick] [--write] [--json FILE] ...

Every peer runs in an environment of its own, made here with `python -m venv` from its pinned
requirements, and kept. All ways of a part have the same blocks, counts and depth; rounds are
interleaved in changing order, every step begins after the same pause, and a figure is the median
over the rounds. A ratio is ours to theirs, the median over the rounds' own: above 1 we are faster.
Every process has OMP_NUM_THREADS=1, as engines have it; their own I/O threads are as many as the
depth.

filesystem  new blocks into an empty directory. `store` ends when the peer says so; `store, on the
            disk` when nothing is left to be written (syncfs). `load` is cold: files are flushed and
            dropped from the page cache (POSIX_FADV_DONTNEED), and mincore has to find none of them.
memory      from a caller's memory into the peer's and back, in pages that were used before.
object      new objects on a SeaweedFS of this machine, and back; all clients share its cores.
faults      the ways of `filesystem` and `object` again: blocks after a restart, damaged blocks, and
            what their sources say of publishing and bounds. Nothing is timed.
metadata    benchmarks/stack.py in vLLM's environment, beside vLLM's manager.
startup     benchmarks/startup.py, beside bare torchrun.

Every byte that is loaded is compared, outside of the time. A peer that cannot be installed, or
fails, is a row that says why.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository must be there.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import argparse
import contextlib
import datetime
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from benchmarks._report import Cell, Report, describe_machine, make_parser, publish
from benchmarks.peers import others, page
from benchmarks.peers.catalogue import (
    OURS,
    PARTS,
    PEERS,
    TRANSFER_PARTS,
    WaySpec,
    ways_of,
)
from benchmarks.peers.environments import EnvironmentFailed, ensure
from benchmarks.peers.results import PartResult
from benchmarks.peers.rounds import Part, Plan

REPO: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPO / "docs" / "benchmarks.md"
SIZES: Final = {"2MiB": 2 << 20, "256KiB": 256 << 10}
QUICK: Final = {"rounds": 1, "step_mib": 8}
NEEDED_MIB: Final = 2048


@dataclass(frozen=True, slots=True)
class Interpreters:
    """Where each peer runs. `given` are interpreters that need not be made."""

    root: Path
    given: dict[str, Path]

    def of(self, peer: str) -> Path:
        if peer == OURS:
            return Path(sys.executable)
        if peer in self.given:
            return self.given[peer]
        return ensure(PEERS[peer], self.root, say)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(
        "Measures kvquay beside LMCache, NIXL, vLLM, AIBrix and Mooncake, with the same work, each "
        "in an environment of its own. What it writes goes to a directory of its own, which is "
        "removed at the end, also after Ctrl-C; environments stay."
    )
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        *("--only",),
        nargs="+",
        metavar="PEER",
        choices=[OURS, *PEERS],
        default=[],
        help=f"these peers, of {', '.join(PEERS)}; ours is always measured, {OURS} alone is, too",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--step-mib", type=int, default=64, help="MiB that each step moves")
    parser.add_argument("--depth", type=int, default=8, help="blocks under way at a time")
    parser.add_argument(
        "--quick", action="store_true", help="one small round: whether all of it works"
    )
    parser.add_argument(
        *("--directory", "-d"),
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to be measured",
    )
    parser.add_argument(
        "--envs",
        type=Path,
        default=Path("~/.cache/kvquay-peers").expanduser(),
        help="where the environments are kept",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make the environments and measure nothing"
    )
    parser.add_argument(
        "--python-vllm", type=Path, metavar="PYTHON", help="an interpreter that has vLLM"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put each measured part's section into docs/benchmarks.md",
    )
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds, given.step_mib = QUICK["rounds"], QUICK["step_mib"]
    if given.write and (given.quick or given.only):
        parser.error("--write needs whole parts: leave --quick and --only out")
    if min(given.rounds, given.depth) < 1 or given.step_mib < 2:
        parser.error("--rounds and --depth are at least 1, --step-mib at least 2")
    if not given.directory.is_dir():
        parser.error(f"--directory is {given.directory}, which is no directory; make it first")
    if given.python_vllm and not given.python_vllm.exists():
        parser.error(f"--python-vllm is {given.python_vllm}, which is not there")
    return given


def prepare(given: argparse.Namespace, interpreters: Interpreters) -> int:
    """Make all environments; how many could not be made."""
    failed = 0
    for peer in given.only or PEERS:
        try:
            say(f"{peer}: {interpreters.of(peer)}")
        except EnvironmentFailed as error:
            failed += 1
            say(f"{peer}: {error}")
    return failed


def measure(given: argparse.Namespace, interpreters: Interpreters, root: Path) -> list[PartResult]:
    results = []
    for name in given.parts:
        if name in TRANSFER_PARTS:
            results.append(run_part(name, given, interpreters, root, faults=False))
        elif name == "faults":
            results.append(measure_faults(given, interpreters, root))
        elif name == "metadata":
            if not given.only or "vllm" in given.only:
                say("metadata: benchmarks/stack.py")
                results.append(others.metadata(lambda: interpreters.of("vllm"), given.rounds, root))
        elif not given.only:
            say("startup: benchmarks/startup.py")
            results.append(others.startup(given.rounds, root))
    return results


def measure_faults(given: argparse.Namespace, interpreters: Interpreters, root: Path) -> PartResult:
    """One result of all parts; memory's ways only say what they are."""
    every = [way for part in TRANSFER_PARTS for way in ways_of(part, given.only)]
    faults = PartResult("faults", OURS, [way.name for way in every])
    for name in TRANSFER_PARTS:
        of_part = run_part(name, given, interpreters, root, faults=True)
        faults.traits |= of_part.traits
        faults.failures |= of_part.failures
    return faults


def run_part(
    name: str, given: argparse.Namespace, interpreters: Interpreters, root: Path, *, faults: bool
) -> PartResult:
    """Rounds of a part, or its faults."""

    def find(spec: WaySpec) -> Path:
        return interpreters.of(spec.peer)

    ways = ways_of(name, given.only)
    if faults:
        plan = Plan({"256KiB": SIZES["256KiB"]}, 1 << 20, given.depth, 1)
    else:
        sizes = {block: SIZES[block] for block in given.sizes}
        plan = Plan(sizes, given.step_mib << 20, given.depth, given.rounds)
    directory = root / f"{name}-{'faults' if faults else 'rounds'}"
    part = Part(name, ways, plan, directory, find, say)
    if faults and name == "memory":
        return part.result
    directory.mkdir()
    with contextlib.ExitStack() as closing:
        closing.callback(shutil.rmtree, directory, ignore_errors=True)
        if name == "object":
            say("object: starting SeaweedFS")
            try:
                # The server and its client are of the development extra.
                from benchmarks.peers.servers import S3Place

                part.place = S3Place.start()
            except (ImportError, RuntimeError, OSError) as error:
                why = f"no S3 server: {str(error).partition(chr(10))[0]}"
                part.result.failures |= {(way.name, ""): why for way in ways}
                return part.result
            closing.callback(part.place.close)
        return part.try_faults() if faults else part.measure()


def conditions(name: str, given: argparse.Namespace) -> str:
    """What a reader of a part's figures has to know beside the machine."""
    if name == "faults":
        return "Blocks of 256 KiB; nothing is timed."
    if name not in TRANSFER_PARTS:
        return f"{given.rounds} rounds."
    told = (
        f"{given.step_mib} MiB in each step, {given.depth} blocks at a time, medians of "
        f"{given.rounds} rounds."
    )
    if name == "filesystem":
        told += f" Disk: {filesystem_of(given.directory)}."
    return told


def filesystem_of(directory: Path) -> str:
    """Type and device of the mount that a directory is on."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        device, place, kind = line.split()[:3]
        inside = directory.resolve().is_relative_to(place)
        if inside and len(place) >= len(best[0]):
            best = (place, f"{kind} on {device}")
    return best[1]


def report(results: Sequence[PartResult], given: argparse.Namespace) -> Report:
    """All parts in one table, one comparison a row; `ratio` last."""
    rows: list[list[Cell]] = []
    for result in results:
        for c in result.comparisons():
            rows.append([c.part, c.peer, c.what, c.block, c.unit, c.theirs, c.ours, c.ratio])
        for name, reason in page.merged_failures(result).items():
            rows.append([result.part, name, f"no figures: {reason}", *[None] * 5])
    notes = [note for result in results for note in result.notes]
    for result in (result for result in results if result.part == "faults"):
        for way, traits in result.traits.items():
            notes.append(
                f"{way}: damaged bytes: {traits.checksum}; restart: {traits.restart}; "
                f"publishing: {traits.publish}; bounds: {traits.bounds}"
            )
    return Report(
        title=(
            f"kvquay beside its peers: {given.step_mib} MiB a step, {given.depth} at a time, "
            f"{given.rounds} rounds; a ratio above 1 is better for kvquay"
        ),
        columns=("part", "peer", "what", "block", "unit", "peer's", "kvquay", "ratio"),
        rows=rows,
        ratios={c.name: c.ratio for result in results for c in result.comparisons()},
        notes=notes,
    )


def write_page(results: Sequence[PartResult], given: argparse.Namespace) -> None:
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    sections = {}
    for result in results:
        command = f"python benchmarks/peers/run.py --parts {result.part}"
        told = conditions(result.part, given)
        sections[result.part] = page.section(result, command, when, machine, told)
    page.write(PAGE, sections)
    say(f"written to {PAGE}")


def stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    given = parse()
    # Whoever ends it politely finds nothing left, either.
    signal.signal(signal.SIGTERM, stop)
    vllm = {"vllm": given.python_vllm} if given.python_vllm else {}
    interpreters = Interpreters(given.envs, vllm)
    try:
        if given.prepare:
            raise SystemExit(min(1, prepare(given, interpreters)))
        free_mib = shutil.disk_usage(given.directory).free >> 20
        needed_mib = NEEDED_MIB + 12 * (given.rounds + 3) * given.step_mib
        if free_mib < needed_mib:
            raise SystemExit(
                f"{given.directory} has {free_mib} MiB free, {needed_mib} are needed; give another "
                "--directory, or fewer --rounds or --step-mib"
            )
        with tempfile.TemporaryDirectory(
            prefix="kvquay-peers-", dir=given.directory, ignore_cleanup_errors=True
        ) as root:
            results = measure(given, interpreters, Path(root))
    except KeyboardInterrupt:
        print("interrupted; all that was written is removed", file=sys.stderr)
        raise SystemExit(130) from None
    publish(report(results, given), given.json)
    if given.write:
        write_page(results, given)


if __name__ == "__main__":
    main()
