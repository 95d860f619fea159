"""Prefault of a region: each worker its own slots, in parallel, against one process for all.

    python benchmarks/prefault.py
    python benchmarks/prefault.py --size-mib 2048 --workers 8 --slot-kib 512

Every measurement has a region of its own, reserved and not yet touched, because only the first
touch of a page pays for zeroing it. Both sides map the same bytes. Real processes, released
together by a barrier; the time is from the first start to the last end. `cpu s` is the processor
time of the slowest process: on a machine whose cores are busy with other work, it tells what the
wall clock cannot. The best of `--rounds` rounds counts, both sides taking turns.
"""

from __future__ import annotations

import sys

# Beside this file stands a `copy.py`, which must not be taken for the standard library's.
sys.path.pop(0)
sys.path.insert(0, __file__.rpartition("/benchmarks/")[0] or "..")

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from backends.region.memory import MADV_POPULATE_WRITE, madvise
from backends.region.region import Region
from backends.region.spec import RegionSpec, rows_for_size
from benchmarks._report import Report, make_parser, publish

FORK = multiprocessing.get_context("fork")
DEFAULT_SLOTS_KIB = (4, 64, 2048)


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds: from first start to last end, and processor time of the slowest process."""

    wall_s: float
    cpu_s: float


def measure_one(spec: RegionSpec) -> Took:
    """MADV_POPULATE_WRITE over the whole region by one process, in a single call."""
    with Region.create(spec) as region:
        address = region.row_view(0).ctypes.data - spec.row_offset(0)
        return in_processes(1, lambda _: madvise(address, spec.nbytes, MADV_POPULATE_WRITE))


def measure_parallel(spec: RegionSpec) -> Took:
    """What a replica does: every worker its own slots, at once."""
    with Region.create(spec) as region:
        return in_processes(spec.local_world_size, region.prefault)


def in_processes(count: int, work: Callable[[int], object]) -> Took:
    """Do `work(index)` in `count` forked processes that begin together."""
    barrier = FORK.Barrier(count)
    results = FORK.SimpleQueue()

    def run(index: int) -> None:
        barrier.wait()
        cpu, start = time.process_time(), time.monotonic()
        work(index)
        results.put((start, time.monotonic(), time.process_time() - cpu))

    processes = [FORK.Process(target=run, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    starts, ends, cpus = zip(*[results.get() for _ in processes], strict=True)
    for process in processes:
        process.join()
    return Took(max(ends) - min(starts), max(cpus))


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="bytes to map, in MiB")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))))
    parser.add_argument("--slot-kib", type=int, nargs="*", default=list(DEFAULT_SLOTS_KIB))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, ratios = [], {}
    for slot_kib in options.slot_kib:
        spec = spec_of(options.size_mib << 20, slot_kib << 10, options.workers)
        one, parallel = [], []
        for _ in range(options.rounds):
            one.append(measure_one(spec))
            parallel.append(measure_parallel(spec))
        best_one, best_parallel = _best(one), _best(parallel)
        for side, took in (("one process", best_one), ("each its slots", best_parallel)):
            rate = spec.nbytes / took.wall_s / 1e9
            rows.append((f"{slot_kib} KiB", side, took.wall_s, took.cpu_s, rate))
        name = f"prefault parallel/one process, slots of {slot_kib} KiB"
        ratios[name] = best_one.wall_s / best_parallel.wall_s
        ratios[f"{name}, by cpu time"] = best_one.cpu_s / best_parallel.cpu_s
    publish(
        Report(
            title=f"Prefault of {options.size_mib} MiB by {options.workers} workers",
            columns=("slot", "who", "wall s", "cpu s", "GB/s"),
            rows=rows,
            ratios=ratios,
            notes=(
                "A ratio above 1 means that parallel prefault is faster; with as many free cores "
                "as workers it can reach the number of workers.",
            ),
        ),
        options.json,
    )


def spec_of(size_bytes: int, slot_bytes: int, workers: int) -> RegionSpec:
    return RegionSpec(
        engine_id=f"bench_prefault_{os.getpid()}",
        run_id=f"bench_{os.getpid()}",
        backing="memfd",
        rows=rows_for_size(size_bytes, slot_bytes, workers),
        slot_bytes=slot_bytes,
        local_world_size=workers,
        geometry_digest="0" * 16,
    )


def _best(measured: list[Took]) -> Took:
    """The least of each: noise only ever adds."""
    return Took(min(took.wall_s for took in measured), min(took.cpu_s for took in measured))


if __name__ == "__main__":
    main()
