"""Speed of the filesystem tier against fio on the same disk, with the same sizes and depths.

    python benchmarks/filesystem.py [--directory DIR] [--json FILE] [--rounds N] [--round-mib N]

Every round stores new blocks, loads them, and has fio write and read as much, in alternating order,
a moment after each other; a ratio is the median over the rounds' own ratios. Many short rounds, so
that a disk whose speed drifts, or stops for a moment, does not decide it.

store       the tier is full: every block drives out an old one. fio overwrites a large file that is
            laid out, which is the best that it can do.
first store nothing is there: every block makes its file. fio makes a file for each block, too.
load        with O_DIRECT, or where the disk has none, after the page cache has dropped the files.
            fio reads its file in order, likewise.

Virtual disks often let a burst through after a pause, and hold what follows to a rate. So every
step begins after the same pause: fio needs it to start, and the tier waits as long. They cache,
too, on the far side where nothing can be dropped. So fio goes round as many files as the tier has
blocks for, and whatever is read was written by the same program as long ago, and never read before.

fio runs with io_uring, or with threads where that is not allowed, and as many requests at a time
as the tier has threads that store, or load. All blocks are checked as they are loaded, and some of
them byte for byte. Leader CPU is the thread time of the calls that an engine's step makes.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository must be there.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import contextlib
import dataclasses
import gc
import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

import numpy as np

from backends.block import HEADER_BYTES, BlockKey
from backends.testing import RowBuffer, make_context, make_keys
from backends.tier.base import Job, Lookup, Outcome
from backends.tier.filesystem import FilesystemSettings, naming, snapshot
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.scan import Scanner
from backends.tier.filesystem.tier import FilesystemTier
from backends.tier.index import Columns
from backends.tier.pool import store_threads_of
from benchmarks._blocks import in_turn, make_rows, payload, put_header
from benchmarks._report import Cell, Report, make_parser, publish

BATCH = 16
REST_S = 0.2
SIZES = {"2MiB": 2 << 20, "256KiB": 256 << 10}
NO_FIO = (
    "fio is not installed, so nothing is compared with it: apt-get install fio, dnf install fio, "
    "or see https://github.com/axboe/fio"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """What one direction of one round took."""

    bytes_per_s: float
    leader_us: float


class Driver:
    """A tier and rows full of blocks. Stores and loads as a leader does, in batches."""

    def __init__(self, rows: RowBuffer, settings: FilesystemSettings) -> None:
        self.rows = rows
        self.rest: Callable[[], None] = lambda: time.sleep(REST_S)
        self.tier = FilesystemTier(make_context(rows), settings)
        if not self.tier.wait_until_known(30, scanned=True):
            raise SystemExit(f"the tier does not get ready on {settings.paths[0]}")
        self._jobs = 0
        # Stores may begin when what is there has been counted.
        time.sleep(0.1)

    def close(self) -> None:
        self.tier.close()

    def store(self, keys: Sequence[BlockKey]) -> Timed:
        for row, key in enumerate(keys):
            put_header(self.rows, row, key)
        return self._run(self.tier.submit_store, keys, range(len(keys)))

    def lookup(self, keys: Sequence[BlockKey]) -> float:
        """Microseconds of this thread for each key."""
        cpu_s = time.thread_time()
        answers = self.tier.lookup(keys)
        cpu_s = time.thread_time() - cpu_s
        if any(answer is not Lookup.HIT for answer in answers):
            raise SystemExit("a block that was stored is not a hit")
        return cpu_s / len(keys) * 1e6

    def load(self, keys: Sequence[BlockKey], part: slice, path: Path) -> Timed:
        """Load a part of what `store` was given, each block into the row that it came from."""
        for file in path.rglob("*.kvb"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rows = range(len(keys))[part]
        for row in rows:
            self.rows.row_view(row)[::HEADER_BYTES] = 0xEE
        timed = self._run(self.tier.submit_load, keys[part], rows)
        for row in rows[:: max(1, len(rows) // 8)]:
            if not np.array_equal(self.rows.row_view(row)[HEADER_BYTES:], payload(row, self.rows)):
                raise SystemExit(f"block {row} came back wrong")
        return timed

    def _run(
        self, submit: Callable[[Job], None], keys: Sequence[BlockKey], rows: Sequence[int]
    ) -> Timed:
        self.rest()
        # As engines do before they serve: a full collection, whenever it comes, takes 10 ms.
        gc.collect()
        gc.freeze()
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        for begin in range(0, len(keys), BATCH):
            self._jobs += 1
            batch = slice(begin, begin + BATCH)
            submit(Job(self._jobs, tuple(keys[batch]), tuple(rows[batch])))
        cpu_s = time.thread_time() - cpu_s
        if not self.tier.drain(120):
            raise SystemExit("the tier did not finish in 120 s")
        seconds = time.perf_counter() - start_s
        poll_s = time.thread_time()
        results = self.tier.poll()
        cpu_s += time.thread_time() - poll_s
        bad = [r for result in results for r in result.reasons if r]
        if bad or any(o is not Outcome.DONE for result in results for o in result.outcomes):
            raise SystemExit(f"{len(bad)} of {len(keys)} blocks failed: {bad[:3]}")
        return Timed(len(keys) * self.rows.row_bytes / seconds, cpu_s / len(keys) * 1e6)


class Fio:
    """Runs fio in a directory of its own. `missing` is None, or why it cannot be used."""

    def __init__(self, directory: Path, direct: bool) -> None:
        self.directory = directory
        directory.mkdir()
        self._direct = direct
        self._engine = ["--ioengine=io_uring"]
        self._start_s = 0.0
        self.missing = None if shutil.which("fio") else NO_FIO
        if self.missing is None and self._run("read", 1 << 20, 1 << 20, 1, ["--size=1m"]) is None:
            self._engine = ["--ioengine=psync", "--thread"]

    def rest(self) -> None:
        """Leave the disk alone for as long as fio does before it begins."""
        time.sleep(REST_S + self._start_s)

    @property
    def engine(self) -> str:
        return self._engine[0].partition("=")[2]

    def write(self, name: str, nbytes: int, block_bytes: int, depth: int) -> float | None:
        return self._run("write", nbytes, block_bytes, depth, [f"--filename={name}"])

    def read(
        self, name: str, nbytes: int, block_bytes: int, depth: int, offset: int = 0
    ) -> float | None:
        options = [f"--filename={name}", f"--offset={offset}"]
        return self._run("read", nbytes, block_bytes, depth, options)

    def write_files(self, name: str, count: int, block_bytes: int, depth: int) -> float | None:
        """A new file for each block, as the tier makes them."""
        (self.directory / name).mkdir()
        options = [
            f"--directory={self.directory / name}",
            f"--nrfiles={count}",
            f"--filesize={block_bytes}",
            f"--openfiles={depth}",
            "--file_service_type=sequential",
            "--create_on_open=1",
            "--fallocate=none",
        ]
        return self._run("write", count * block_bytes, block_bytes, depth, options)

    def _run(
        self, how: str, nbytes: int, block_bytes: int, depth: int, options: list[str]
    ) -> float | None:
        if self.missing:
            return None
        # Threads have a file region each; a queue has one file.
        psync = self._engine[0].endswith("psync")
        jobs = depth if psync and "--create_on_open=1" not in options else 1
        size = nbytes // jobs // block_bytes * block_bytes
        command = [
            *("fio", "--name=bench", "--output-format=json", f"--rw={how}", f"--bs={block_bytes}"),
            *(f"--direct={int(self._direct)}", f"--iodepth={depth}", f"--size={size}"),
            *(f"--numjobs={jobs}", f"--offset_increment={size}", "--group_reporting"),
            *("--invalidate=1", "--end_fsync=0", "--iomem=mmapshared", *self._engine, *options),
        ]
        time.sleep(REST_S)
        began_s = time.perf_counter()
        done = subprocess.run(
            command, cwd=self.directory, capture_output=True, text=True, timeout=120, check=False
        )
        try:
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        except (ValueError, KeyError, IndexError):
            return None
        if done.returncode or job["error"]:
            return None
        runtime_s = job[how]["runtime"] / 1000
        # It ends as soon as it has written; nearly all that is left is its start.
        self._start_s = max(0.0, time.perf_counter() - began_s - runtime_s)
        return float(job[how]["io_bytes"] / runtime_s)


@dataclass(frozen=True, slots=True)
class Options:
    directory: Path
    rounds: int
    round_bytes: int
    threads: int
    restart_blocks: int

    @property
    def first_rounds(self) -> int:
        """Rounds until a tier is full."""
        return max(2, self.rounds // 2)


@dataclass(slots=True)
class Result:
    rows: list[list[Cell]]
    ratios: dict[str, float]
    notes: list[str]

    def compare(self, what: str, block: str, ours: list[Timed], fio: list[float | None]) -> None:
        """A row of the table, and a ratio where fio was there."""
        theirs = [speed for speed in fio if speed is not None]
        row: list[Cell] = [what, block, statistics.median(t.bytes_per_s for t in ours) / 1e6]
        if len(theirs) == len(ours):
            ratios = [t.bytes_per_s / f for t, f in zip(ours, theirs, strict=True)]
            row += [statistics.median(theirs) / 1e6, statistics.median(ratios)]
            self.ratios[f"{what}/fio {block}"] = statistics.median(ratios)
        else:
            row += [None, None]
        self.rows.append([*row, statistics.median(t.leader_us for t in ours)])


def measure_size(block: str, size: int, options: Options, out: Result, progress: Progress) -> None:
    with contextlib.ExitStack() as closes:
        _measure_size(block, size, options, out, progress, closes)


def _measure_size(
    block: str,
    size: int,
    options: Options,
    out: Result,
    progress: Progress,
    closes: contextlib.ExitStack,
) -> None:
    count = options.round_bytes // (HEADER_BYTES + size)
    rows = make_rows(size, count)
    path = options.directory / f"tier-{block}"
    settings = FilesystemSettings(
        paths=(str(path),),
        # Full after the first rounds: from then on every block drives out another.
        capacity=options.first_rounds * count * rows.row_bytes,
        high_watermark=1.0,
        low_watermark=1.0,
        threads=options.threads,
        queue_blocks=1 << 20,
        queue_bytes=1 << 40,
    )
    driver = closes.enter_context(contextlib.closing(Driver(rows, settings)))
    unchecked = closes.enter_context(
        contextlib.closing(Driver(rows, dataclasses.replace(settings, verify=False)))
    )
    reason = driver.tier.describe()[0].partition(": ")[2]
    out.notes.append(f"{block}: {reason}")
    fio = Fio(options.directory / f"fio-{block}", reason.startswith("direct"))
    out.notes.append(f"{block}: {fio.missing or f'fio runs with {fio.engine}'}")
    driver.rest = unchecked.rest = fio.rest
    writers, readers = store_threads_of(options.threads), options.threads
    row_bytes = rows.row_bytes
    nbytes = count * row_bytes

    stores: list[Timed] = []
    speeds: list[float | None] = []
    for number in range(options.first_rounds):
        progress.show(f"{block}: first store, round {number + 1} of {options.first_rounds}")
        keys = make_keys(f"{block} fill {number}", count)
        in_turn(
            number,
            lambda: stores.append(driver.store(keys)),  # noqa: B023 - called in this turn
            lambda: speeds.append(fio.write_files(f"new{number}", count, row_bytes, writers)),  # noqa: B023
        )
    out.compare("first store", block, stores, speeds)
    for number in range(options.first_rounds):
        fio.write(f"data{number}", nbytes, row_bytes, writers)
    stores, speeds = [], []
    half = count // 2
    loads: list[Timed] = []
    reads: list[float | None] = []
    plain: list[Timed] = []
    lookups_us = []
    for number in range(options.rounds):
        progress.show(f"{block}: store and load, round {number + 1} of {options.rounds}")
        keys = make_keys(f"{block} round {number}", count)
        data = f"data{number % options.first_rounds}"
        in_turn(
            number,
            lambda: stores.append(driver.store(keys)),  # noqa: B023
            lambda: speeds.append(fio.write(data, nbytes, row_bytes, writers)),  # noqa: B023
        )
        lookups_us.append(driver.lookup(keys))
        halves = (slice(0, half), slice(half, 2 * half))
        ours, bare = halves if number % 2 else halves[::-1]
        in_turn(
            number,
            lambda: plain.append(unchecked.load(keys, bare, path)),  # noqa: B023
            lambda: loads.append(driver.load(keys, ours, path)),  # noqa: B023
            lambda: reads.append(
                fio.read(data, half * row_bytes, row_bytes, readers, ours.start * row_bytes)  # noqa: B023
            ),
        )
    out.compare("store", block, stores, speeds)
    out.compare("load", block, loads, reads)
    out.rows.append(["load, unchecked", block, median_speed(plain) / 1e6, None, None, None])
    out.rows.append(["lookup", block, None, None, None, statistics.median(lookups_us)])
    ratios = [t.bytes_per_s / p.bytes_per_s for t, p in zip(loads, plain, strict=True)]
    out.ratios[f"load/load unchecked {block}"] = statistics.median(ratios)


def median_speed(timed: list[Timed]) -> float:
    return statistics.median(t.bytes_per_s for t in timed)


def measure_durability(options: Options, out: Result, progress: Progress) -> None:
    with contextlib.ExitStack() as closes:
        _measure_durability(options, out, progress, closes)


def _measure_durability(
    options: Options, out: Result, progress: Progress, closes: contextlib.ExitStack
) -> None:
    count = options.round_bytes // 2 // (HEADER_BYTES + SIZES["2MiB"])
    rows = make_rows(SIZES["2MiB"], count)
    drivers = {
        level: Driver(
            rows,
            FilesystemSettings(
                paths=(str(options.directory / f"durability-{level}"),),
                capacity=count * rows.row_bytes,
                high_watermark=1.0,
                low_watermark=1.0,
                durability=level,
                threads=options.threads,
            ),
        )
        for level in ("none", "data", "full")
    }
    for driver in drivers.values():
        closes.enter_context(contextlib.closing(driver))
    stores: dict[str, list[Timed]] = {level: [] for level in drivers}
    for number in range(options.rounds + 1):
        progress.show(f"durability, round {number} of {options.rounds}")
        keys = make_keys(f"durability {number}", count)
        turn = list(drivers)[number % 3 :] + list(drivers)[: number % 3]
        timed = {level: drivers[level].store(keys) for level in turn}
        # The first round makes the files.
        for level in drivers if number else ():
            stores[level].append(timed[level])
    for level in drivers:
        speed = median_speed(stores[level]) / 1e6
        out.rows.append([f"store, durability {level}", "2MiB", speed, None, None, None])
        ratios = [
            t.bytes_per_s / n.bytes_per_s
            for t, n in zip(stores[level], stores["none"], strict=True)
        ]
        if level != "none":
            out.ratios[f"store durability {level}/none 2MiB"] = statistics.median(ratios)


def measure_restart(options: Options, out: Result) -> None:
    """From a snapshot of very many blocks to the first lookup that finds them all."""
    rows = RowBuffer(1, 2 * HEADER_BYTES)
    path = options.directory / "restart"
    settings = FilesystemSettings(paths=(str(path),), capacity=1 << 50, threads=2)
    FilesystemTier(make_context(rows), settings).close()
    name = naming.namespace_name(rows.fingerprint, None)
    space = Namespace(name)
    random = np.random.default_rng(0)
    hashes = random.integers(0, 256, (options.restart_blocks, 32), np.uint8)
    keys = [BlockKey(digest.tobytes(), 0) for digest in hashes]
    ids = np.fromiter((space.block_id(key) for key in keys), np.uint64, len(keys))
    columns = Columns(
        ids,
        hashes,
        np.full(len(keys), 32, np.uint8),
        np.zeros(len(keys), np.uint32),
        np.full(len(keys), time.time_ns(), np.int64),
    )
    (path / name / naming.SNAPSHOT).write_bytes(snapshot.pack(columns))
    asked = keys[:: max(1, len(keys) // 1000)]
    start_s = time.perf_counter()
    tier = FilesystemTier(make_context(rows), settings)
    opened_s = time.perf_counter() - start_s
    slowest_s = 0.0
    while True:
        begin_s = time.perf_counter()
        known = all(answer is Lookup.HIT for answer in tier.lookup(asked))
        slowest_s = max(slowest_s, time.perf_counter() - begin_s)
        if known:
            break
        if time.perf_counter() - start_s > 60:
            raise SystemExit("the blocks are not known again after 60 s")
        time.sleep(0.005)
    known_s = time.perf_counter() - start_s
    tier.close()
    out.notes.append(
        f"restart: {len(keys)} blocks are known again {known_s:.2f} s after the tier was "
        f"begun to be opened ({opened_s:.2f} s until it takes calls). Measured from a snapshot, "
        f"without the blocks' files and the scan that misses them, until a lookup of {len(asked)} "
        f"keys among them finds all; the slowest of those lookups took {slowest_s * 1e3:.0f} ms."
    )
    out.ratios[f"restart of {len(keys)} blocks, seconds"] = known_s


class Progress:
    """Where the run is, on stderr: one line that changes, or lines where it is no terminal."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self._shown = ""

    def show(self, step: str) -> None:
        if sys.stderr.isatty():
            passed_s = time.perf_counter() - self._begin_s
            print(f"\r\033[K{passed_s:4.0f} s  {step}", end="", file=sys.stderr, flush=True)
        elif (what := step.partition(", round")[0]) != self._shown:
            self._shown = what
            print(what, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = make_parser(
        "Measures the filesystem tier against fio on one disk, in many short rounds, in about "
        "90 s: store and load of 2 MiB and 256 KiB blocks, what durability and checksums cost, "
        "the leader's CPU time for each block, and a restart with a million blocks. All that it "
        "writes goes to a directory of its own, which is removed at the end, also after Ctrl-C."
    )
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        *("--directory", "-d"),
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a directory on the disk to be measured",
    )
    parser.add_argument(
        *("--rounds", "-r"), type=int, default=10, help="rounds; more make the ratios steadier"
    )
    parser.add_argument(
        "--round-mib", type=int, default=256, help="MiB that each step of a round moves"
    )
    parser.add_argument("--threads", type=int, default=8, help="the tier's I/O threads")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="block sizes"
    )
    parser.add_argument(
        "--restart-blocks", type=int, default=1_000_000, help="blocks that a restart finds"
    )
    given = parser.parse_args()
    if given.restart_blocks < 1:
        parser.error("--restart-blocks is at least 1")
    if given.rounds < 1 or given.threads < 1 or given.round_mib < 8:
        parser.error("--rounds and --threads are at least 1, --round-mib at least 8")
    if not given.directory.is_dir():
        parser.error(f"--directory is {given.directory}, which is no directory; make it first")
    return given


def check_space(options: Options) -> None:
    """Raises SystemExit if the disk has not enough room."""
    # Of each size a tier, and fio's small and large files; of the restart some 64 MiB.
    needed = 2 * 3 * options.first_rounds * options.round_bytes + (256 << 20)
    free = shutil.disk_usage(options.directory).free
    if free < needed:
        raise SystemExit(
            f"{options.directory} has {free >> 20} MiB free, {needed >> 20} are needed; give "
            "another --directory, or fewer --rounds or --round-mib"
        )


def stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    given = parse()
    # Whoever ends it politely finds nothing left, either.
    signal.signal(signal.SIGTERM, stop)
    out, progress = Result([], {}, []), Progress()
    if shutil.which("fio") is None:
        print(NO_FIO, file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="kvquay-bench-", dir=given.directory) as directory:
            options = Options(
                *(Path(directory), given.rounds, given.round_mib << 20, given.threads),
                given.restart_blocks,
            )
            check_space(options)
            for block in given.sizes:
                measure_size(block, SIZES[block], options, out, progress)
            measure_durability(options, out, progress)
            progress.show(f"restart with {options.restart_blocks} blocks")
            # A scan finds no files, and would forget the blocks, the sooner the fewer they are.
            with mock.patch.object(Scanner, "scan", return_value=False):
                measure_restart(options, out)
    except KeyboardInterrupt:
        progress.end()
        print("interrupted; all that was written is removed", file=sys.stderr)
        raise SystemExit(130) from None
    progress.end()
    publish(
        Report(
            title=(
                f"Filesystem tier: {given.rounds} rounds ({options.first_rounds} of first stores), "
                f"{given.round_mib} MiB in each step, medians, {given.threads} threads"
            ),
            columns=("what", "block", "MB/s", "fio MB/s", "ratio", "leader us/block"),
            rows=out.rows,
            ratios=out.ratios,
            notes=out.notes,
        ),
        given.json,
    )


if __name__ == "__main__":
    main()
