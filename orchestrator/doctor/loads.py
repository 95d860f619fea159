"""How long a tier takes to load some blocks, as a run sees it: through the tier itself, its threads
and queues, from submit to the end of the batch, with something else in between.

The tier stands in a place of its own below the configured one, `doctor/<writer>/`, so that neither
what is stored in the configured tier nor its capacity has anything to do with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from backends import machine
from backends.block import BlockKey
from backends.errors import KvquayError
from backends.tier.base import Bytes, Job, JobResult, Lookup, Outcome, Tier, TierContext
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.tier import FilesystemTier
from backends.tier.filesystem.writer import Writer, parse_writer, this_writer
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.curve import make_curve, numbers_of_blocks
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.places import Directory
from orchestrator.doctor.result import Curve
from orchestrator.doctor.sample import Sample
from orchestrator.engine.tiers import deployment

PLACE: Final = "doctor"
_MOST_BLOCKS: Final = 128
_MOST_BYTES: Final = 128 << 20
_ROOM_SHARE: Final = 16
_STORED_AT_A_TIME: Final = 4
_LOOK_S: Final = 0.05
_PAUSE_S: Final = 0.01
"""As long as a short step of an engine."""
_FIX: Final = "see what else is said of this tier; without this figure latency is only estimated"


OpenTier = Callable[[TierContext], Tier]


class _NotMeasured(Exception):
    """The tier did not do what it was asked, in these words."""


def measure_disk_loads(
    settings: FilesystemSettings,
    paths: Sequence[str],
    sample: Sample,
    notes: Notes,
    stop: Stop,
    seconds: float,
) -> Curve | None:
    """Of the filesystem tier with the usable ones of its paths. None where it is not measured;
    `notes` has the check `fs.loads`."""
    bench = LoadBench(sample, notes, stop, seconds)
    try:
        with contextlib.ExitStack() as stack:
            own = [stack.enter_context(_own_directory(os.path.realpath(path))) for path in paths]
            room = 4 * len(own) * bench.stored_bytes
            inside = replace(
                settings, paths=tuple(own), capacity=room, affinity={}, placement="per_replica"
            )
            return bench.measure("fs", lambda context: FilesystemTier(context, inside))
    except OSError as error:
        notes.warn("fs.loads", f"not measured: {error.strerror}", "loads through the tier", _FIX)
        return None


@contextlib.contextmanager
def _own_directory(path: str) -> Iterator[str]:
    """A directory for a tier of ours, and of what killed doctors left there nothing."""
    with Directory(path), Directory(os.path.join(path, PLACE)) as place:
        own = this_writer()
        sweep_directories(place.path, own)
        mine = os.path.join(place.path, own.name)
        os.mkdir(mine, 0o700)
        try:
            yield mine
        finally:
            shutil.rmtree(mine, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(place.path)  # also where a doctor that was killed had made it


def sweep_directories(place: str, own: Writer) -> int:
    """Remove what dead doctors of this machine left in a place; how many there were."""
    writers = [parse_writer(name) for name in os.listdir(place)]
    dead = [w for w in writers if w is not None and w.alive(own.host) is False]
    for writer in dead:
        shutil.rmtree(os.path.join(place, writer.name), ignore_errors=True)
    return len(dead)


class _Rows:
    """Memory of huge pages where the kernel has them for who asks.

    A disk takes up to twice as long to read into single pages as into those that lie side by side.
    A run's region is made when its worker starts, of pages side by side; this process would get
    those that it has given back a moment ago, one by one and in reverse order.
    """

    def __init__(self, count: int, row_bytes: int) -> None:
        self.count = count
        self.row_bytes = row_bytes
        memory = mmap.mmap(-1, count * row_bytes)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._rows = np.frombuffer(memory, np.uint8).reshape(count, row_bytes)

    def row_view(self, row: int) -> Bytes:
        view: Bytes = self._rows[row]
        return view


class LoadBench:
    """Blocks of a plan, stored once into a tier and then loaded by some, again and again."""

    def __init__(self, sample: Sample, notes: Notes, stop: Stop, seconds: float) -> None:
        self._sample = sample
        self._notes = notes
        self._stop = stop
        self._seconds = seconds
        room = min(_MOST_BYTES, machine.memory_available_bytes() // _ROOM_SHARE)
        self._count = max(1, min(_MOST_BLOCKS, room // sample.block_bytes))
        self._rows = _Rows(max(1, self._count // 2), sample.block_bytes)
        self._next = 0

    @property
    def stored_bytes(self) -> int:
        return self._count * self._sample.block_bytes

    def measure(self, name: str, open_tier: OpenTier) -> Curve | None:
        """Store, then load. The tier that `open_tier` gives is closed before this returns. None
        where it did not work, which the check `<name>.loads` says."""
        notes = self._notes
        try:
            notes.doing("opening the tier")
            context = deployment(self._sample.plan, 0).tier_context(self._rows)
            with contextlib.closing(open_tier(context)) as tier:
                keys = self._store(tier)
                curve = self._load(tier, keys)
        except (_NotMeasured, KvquayError) as error:
            if not self._stop.asked():
                notes.warn(
                    f"{name}.loads", f"not measured: {error}", "loads through the tier", _FIX
                )
            return None
        if curve is not None:
            notes.ok(f"{name}.loads", words(curve))
        return curve

    def _store(self, tier: Tier) -> list[BlockKey]:
        """As many as there is time for."""
        self._notes.doing("storing through the tier")
        until_s = time.monotonic() + self._seconds
        keys: list[BlockKey] = []
        while len(keys) < self._count and not self._stop.asked():
            if keys and time.monotonic() > until_s:
                break
            numbers = range(len(keys), min(len(keys) + _STORED_AT_A_TIME, self._count))
            rows = [number % self._rows.count for number in numbers]
            for number, row in zip(numbers, rows, strict=True):
                self._sample.fill(self._rows.row_view(row), number)
            new = [self._sample.key(number) for number in numbers]
            self._run(tier, new, rows, is_load=False)
            keys += new
        return keys

    def _load(self, tier: Tier, keys: Sequence[BlockKey]) -> Curve | None:
        """Batches of each size by turns; blocks of a batch were stored one after another, as those
        of a prompt are. Before a load an engine looks its blocks up, and in lockstep the tiers
        settle."""
        self._notes.doing("loading through the tier")
        sizes = numbers_of_blocks(min(len(keys), self._rows.count))
        choose, records = random.Random(0), list[tuple[int, float]]()
        began_s, rounds = time.monotonic(), 0
        while not self._stop.asked():
            if rounds > 1 and time.monotonic() - began_s > self._seconds:
                break
            for size in choose.sample(sizes, len(sizes)):
                if self._stop.asked():
                    break
                first = choose.randrange(len(keys) - size + 1)
                row = choose.randrange(self._rows.count - size + 1)
                batch = keys[first : first + size]
                time.sleep(_PAUSE_S)
                tier.settle(self._stop.remaining_s())
                if any(answer is not Lookup.HIT for answer in tier.lookup(batch)):
                    raise _NotMeasured("the tier does not know what it stored")
                result = self._run(tier, batch, range(row, row + size), is_load=True)
                records.append((size, result.seconds))
            rounds += 1
        return make_curve(records)

    def _run(
        self, tier: Tier, keys: Sequence[BlockKey], rows: Sequence[int], *, is_load: bool
    ) -> JobResult:
        deadline_s = time.monotonic() + self._stop.remaining_s()
        job = Job(self._next, tuple(keys), tuple(rows), deadline_s)
        self._next += 1
        (tier.submit_load if is_load else tier.submit_store)(job)
        while not (results := tier.poll()):
            tier.drain(_LOOK_S)
        for outcome, reason in zip(results[0].outcomes, results[0].reasons, strict=True):
            if outcome is not Outcome.DONE:
                what = "load" if is_load else "store"
                raise _NotMeasured(f"a {what} was {outcome.value}: {reason}")
        return results[0]


def words(curve: Curve) -> str:
    """For people."""
    told = ", ".join(f"{p.blocks}: {p.mean * 1e3:.2f} ms" for p in curve.points)
    return f"blocks in a batch, after a pause: {told}"
