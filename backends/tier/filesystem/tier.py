"""The tier as its caller sees it. Whatever may wait is done by the threads of its lanes."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

from backends import block
from backends.block import BlockKey
from backends.errors import TierError
from backends.tier.base import (
    Bytes,
    Capabilities,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Tier,
    TierContext,
    Usage,
)
from backends.tier.filesystem import naming
from backends.tier.filesystem.blockfiles import (
    BlockFormat,
    BlockWrong,
    NoRoom,
    Room,
    Unpublished,
)
from backends.tier.filesystem.commits import GroupCommit
from backends.tier.filesystem.counters import Counters
from backends.tier.filesystem.evict import Evictor
from backends.tier.filesystem.index import Index
from backends.tier.filesystem.io import Io, OsIo
from backends.tier.filesystem.jobs import Jobs, Task
from backends.tier.filesystem.keeper import Keeper
from backends.tier.filesystem.lane import Lane
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.pool import Pool
from backends.tier.filesystem.probes import Prober, Probes
from backends.tier.filesystem.scan import Scanner
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.spaces import Namespaces
from backends.tier.filesystem.turns import Turns
from backends.tier.filesystem.volume import Volume
from backends.tier.filesystem.writer import this_writer

# This process's lack of something, not the path's or the block's fault.
_OURS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)
# A lookup is PENDING for so long at most, whatever hangs below.
_PENDING_S: Final = 5.0
_UNUSABLE_MAX: Final = 65536
_SKIPPED: Final = {"dedup_skips": 1}
_CLOSED = "the tier was closed"


class _Elsewhere(Exception):
    """A store is for another path."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.lane = lane


class FilesystemTier(Tier):
    """Blocks as files on one or more paths. See `FilesystemSettings`."""

    name = "fs"
    capabilities = Capabilities(persistent=True, shared=True, quota=True, corruption=True)
    settings_type: ClassVar = FilesystemSettings

    def __init__(
        self, context: TierContext, settings: FilesystemSettings, *, io: Io | None = None
    ) -> None:
        """Raises TierError if no path can be used. Blocks of before are known a little later."""
        self._context = context
        self._settings = settings
        self._io = io or OsIo()
        self._row_bytes = context.rows.row_bytes
        self._written = {"stored": 1, "stored_bytes": self._row_bytes, "written_never_read": 1}
        parallel = context.parallel
        isolated = settings.placement == "per_replica"
        replica = parallel.data_parallel_index if isolated else None
        self._namespace = Namespace(naming.namespace_name(context.fingerprint, replica))
        self._replicas = 1 if isolated else parallel.data_parallel_size
        self._private = isolated
        self._counters = Counters()
        self._index = Index()
        self._namespaces = Namespaces(self._namespace)
        self._jobs = Jobs(context.rows)
        self._probes = Probes(settings.probe_interval_s, _PENDING_S)
        self._unusable: dict[int, float] = {}
        self._clock_ns = 0
        self._oldest_ns: tuple[float, int | None] = (0.0, None)
        self._closing = threading.Lock()
        self._closed = False
        self._check_capacity()
        self._seeds = [naming.path_seed(path) for path in settings.paths]
        local = parallel.data_parallel_rank_local
        preferred = None if local is None else settings.affinity.get(local)
        self._preferred = None if preferred is None else settings.paths.index(preferred)
        volumes = self._open_volumes()
        self._lanes = [self._make_lane(volume) for volume in volumes]
        self._probes.probers = [lane.prober for lane in self._lanes]
        for lane in self._lanes:
            lane.keeper.start()

    # What the caller's thread does.

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        if self._closed:
            return [Lookup.MISS] * len(keys)
        usable = [lane.why_not(loads=True) is None for lane in self._lanes]
        used_ns = self._used_ns(len(keys))
        answers = [self._lookup(key, used_ns - i, usable) for i, key in enumerate(keys)]
        self._counters.add_all({"lookups": len(keys), "hits": answers.count(Lookup.HIT)})
        return answers

    def submit_store(self, job: Job) -> None:
        tasks, used = self._submit(job, is_load=False), self._settings.queue_blocks
        room = self._settings.queue_bytes // self._row_bytes
        over = max(0, self._jobs.stores - min(used, room))
        for task in tasks[len(tasks) - over :]:
            self._jobs.end(task, Outcome.SHED, f"{self._jobs.stores} stores wait already")
        self._route(tasks[: len(tasks) - over])

    def submit_load(self, job: Job) -> None:
        tasks = self._submit(job, is_load=True)
        over = max(0, self._jobs.loads - self._settings.queue_blocks)
        for task in tasks[len(tasks) - over :]:
            self._jobs.end(task, Outcome.SHED, f"{self._jobs.loads} loads wait already")
        queues: dict[int, list[Task]] = {}
        for task in tasks[: len(tasks) - over]:
            volume = self._index.use(task.block_id, task.used_ns)
            number = self._order(task.block_id)[0] if volume is None else volume
            queues.setdefault(number, []).append(task)
        for number, queue in queues.items():
            why_not = self._lanes[number].why_not(loads=True)
            if why_not is None:
                self._lanes[number].load(queue)
                continue
            for task in queue:
                self._jobs.end(task, Outcome.FAILED, why_not)

    def poll(self) -> Sequence[JobResult]:
        return self._jobs.poll()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        used_ns = self._used_ns(len(keys))
        for i, key in enumerate(keys):
            self._index.use(self._namespace.block_id(key), used_ns - i)

    def usage(self) -> Usage:
        totals = [lane.volume.ledger.cached for lane in self._lanes if lane.volume.place.is_open]
        blocks = sum(total.blocks for total in totals)
        oldest_ns = self._oldest() if blocks else None
        return Usage(
            bytes=sum(total.bytes for total in totals),
            blocks=blocks,
            capacity_bytes=self._settings.capacity,
            oldest_s=None if oldest_ns is None else max(0.0, (time.time_ns() - oldest_ns) / 1e9),
        )

    def counters(self) -> dict[str, int]:
        outcomes = self._jobs.counts
        return self._counters.read() | {
            "shed": outcomes[Outcome.SHED],
            "corrupt": outcomes[Outcome.CORRUPT],
            "missing": outcomes[Outcome.MISSING],
            "late": outcomes[Outcome.LATE],
            "failed": outcomes[Outcome.FAILED],
        }

    def drain(self, timeout_s: float) -> bool:
        return self._jobs.drain(timeout_s)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.end_unbegun(Outcome.SHED, _CLOSED)
            end_s = time.monotonic() + self._settings.close_timeout_s
            for lane in self._lanes:
                # A path whose call does not come back keeps what that call may be using.
                if lane.stop(end_s):
                    if lane.volume.place.is_open and lane.keeper.restored.is_set():
                        with contextlib.suppress(OSError):
                            lane.keeper.save()
                    lane.volume.close()

    def wait_until_known(self, timeout_s: float, *, scanned: bool = False) -> bool:
        """Wait until the blocks of before are known from the last snapshot, or, with `scanned`,
        until everything that stands on the paths has been found and counted."""
        end_s = time.monotonic() + timeout_s
        events = [lane.keeper.scanned if scanned else lane.keeper.restored for lane in self._lanes]
        return all(event.wait(max(0.0, end_s - time.monotonic())) for event in events)

    def describe(self) -> list[str]:
        """A line for each path: how it is read and written and why, and whether it is used now."""
        return [
            f"{lane.volume.path}: {lane.volume.blocks.direct.reason}"
            + "".join(
                f"; no {what}: {why}"
                for what, loads in (("stores", False), ("loads", True))
                if (why := lane.why_not(loads=loads)) is not None
            )
            for lane in self._lanes
        ]

    def _lookup(self, key: BlockKey, used_ns: int, usable: list[bool]) -> Lookup:
        block_id = self._namespace.block_id(key)
        if self._unusable and self._is_unusable(block_id):
            return Lookup.MISS
        volume = self._index.use(block_id, used_ns)
        if volume is not None:
            return Lookup.HIT if usable[volume] else Lookup.MISS
        since_s = self._jobs.storing_since_s(block_id)
        if since_s is not None:
            return Lookup.PENDING if time.monotonic() - since_s < _PENDING_S else Lookup.MISS
        if self._private and all(lane.keeper.scanned.is_set() for lane in self._lanes):
            return Lookup.MISS
        return self._probes.ask(block_id, key)

    def _submit(self, job: Job, *, is_load: bool) -> list[Task]:
        if self._closed:
            raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
        ids = [self._namespace.block_id(key) for key in job.keys]
        return self._jobs.submit(job, ids, self._used_ns(len(ids)), is_load=is_load).tasks

    def _route(self, tasks: list[Task]) -> None:
        """Send stores to their paths; those for which there is none now are SHED."""
        refusals = [lane.why_not(loads=False) for lane in self._lanes]
        queues: dict[int, list[Task]] = {}
        for task in tasks:
            order = self._order(task.block_id)
            number = next((n for n in order if refusals[n] is None), None)
            if number is None:
                self._jobs.end(task, Outcome.SHED, refusals[order[0]] or "")
            else:
                queues.setdefault(number, []).append(task)
        for number, queue in queues.items():
            self._lanes[number].store(queue)

    def _order(self, block_id: int) -> list[int]:
        """Paths for a block: first where it is, then where this replica prefers, then its order."""
        if len(self._seeds) == 1:
            return [0]
        order = naming.path_order(block_id, self._seeds)
        for first in (self._preferred, self._index.volume_of(block_id)):
            if first is not None:
                order = [first, *(number for number in order if number != first)]
        return order

    def _used_ns(self, count: int) -> int:
        """A time that is later than any given before, with room for `count` keys before it."""
        self._clock_ns = max(time.time_ns(), self._clock_ns + count + 1)
        return self._clock_ns

    def _oldest(self) -> int | None:
        seen_s, oldest_ns = self._oldest_ns
        now_s = time.monotonic()
        if oldest_ns is None or now_s - seen_s > 1.0:
            oldest_ns = self._index.oldest_ns()
            self._oldest_ns = (now_s, oldest_ns)
        return oldest_ns

    def _is_unusable(self, block_id: int) -> bool:
        until_s = self._unusable.get(block_id)
        if until_s is None:
            return False
        if time.monotonic() < until_s:
            return True
        self._unusable.pop(block_id, None)
        return False

    # What the lanes' threads do.

    def _run(self, lane: Lane, task: Task) -> None:
        if not self._jobs.begin(task):
            if not task.state.is_load:
                self._go_on(lane, task, Outcome.LATE)
            return
        if task.state.is_load:
            self._load(lane, task)
        else:
            self._store(lane, task)

    def _store(self, lane: Lane, task: Task) -> None:
        """Write a block to a file. It gets its name together with others, in `_publish`."""
        try:
            row = self._jobs.row(task)
            wrong = block.check_row(row, task.key, self._context.fingerprint)
            if wrong:
                self._end_store(lane, task, Outcome.FAILED, f"its row {wrong}")
                return
            file = self._write(lane, task, row)
        except _Elsewhere as elsewhere:
            self._send_on(lane, task, elsewhere.lane)
        except Exception as error:
            self._store_failed(lane, task, error)
        else:
            if file is None:
                self._stored(lane, task, 0)
            else:
                lane.commits.add((task, file))

    def _write(self, lane: Lane, task: Task, row: Bytes) -> Unpublished | None:
        """A file that has no name yet; None where the block is there already."""
        volume = lane.volume

        def make_room(short_bytes: int) -> Room:
            if len(self._lanes) > 1 and not task.moved:
                self._look_elsewhere(lane, task)
            return lane.evictor.make_room(short_bytes, task.used_ns, spare=True)

        def write() -> Unpublished | None:
            # Others are not looked for: what is there already cannot be given the same name.
            likely = task.seen_elsewhere or task.block_id in self._index
            if likely and volume.blocks.settle(task.key, task.block_id):
                return None
            return volume.blocks.write(task.key, task.block_id, row, task.used_ns, make_room)

        try:
            return write()
        except FileNotFoundError:
            if not volume.place.needs_opening():
                raise
            volume.open(make=False)
            return write()

    def _publish(self, lane: Lane, batch: list[tuple[Task, Unpublished]]) -> None:
        try:
            results = lane.volume.blocks.publish([file for _, file in batch])
        # One batch's trouble, of whatever kind, is its outcome and never ends the thread.
        except Exception as error:
            for task, _ in batch:
                self._store_failed(lane, task, error)
            return
        for (task, _), wrong in zip(batch, results, strict=True):
            if wrong is None:
                self._stored(lane, task, self._row_bytes)
            elif isinstance(wrong, FileExistsError):
                self._lost_race(lane, task)
            else:
                self._store_failed(lane, task, wrong)

    def _lost_race(self, lane: Lane, task: Task) -> None:
        """Another writer was first; if what it wrote is wrong, it is out of the way now."""
        try:
            there = lane.volume.blocks.settle(task.key, task.block_id)
        except OSError as error:
            self._store_failed(lane, task, error)
            return
        if there:
            self._stored(lane, task, 0)
        else:
            self._jobs.put_back(task)
            lane.pool.add([task], loads=False)

    def _stored(self, lane: Lane, task: Task, moved_bytes: int) -> None:
        lane.volume.stores.succeeded(task.began_s)
        self._counters.add_all(self._written if moved_bytes else _SKIPPED)
        self._index.add(
            *(task.block_id, task.key, 0, lane.volume.number, task.used_ns),
            written=moved_bytes > 0,
            shown=moved_bytes > 0,
        )
        self._probes.present(task.block_id)
        self._unusable.pop(task.block_id, None)
        self._end_store(lane, task, Outcome.DONE, "", moved_bytes)
        if lane.volume.ledger.cached.bytes > lane.high_bytes:
            lane.keeper.kick()

    def _store_failed(self, lane: Lane, task: Task, error: Exception) -> None:
        """One key's trouble is its outcome; a path's trouble is the path's too."""
        volume = lane.volume
        if isinstance(error, NoRoom):
            self._end_store(lane, task, Outcome.SHED, str(error))
            return
        if not isinstance(error, OSError):
            self._end_store(lane, task, Outcome.FAILED, f"{type(error).__name__}: {error}")
            return
        volume.stores.failed(task.began_s, _words(error))
        task.tried = (*task.tried, volume.number)
        other = next((n for n in self._order(task.block_id) if self._may_take(n, task)), None)
        if other is not None:
            self._send_on(lane, task, self._lanes[other])
        else:
            self._end_store(lane, task, Outcome.SHED, f"{volume.path}: {_words(error)}")

    def _end_store(
        self, lane: Lane, task: Task, outcome: Outcome, reason: str, moved_bytes: int = 0
    ) -> None:
        self._go_on(lane, task, outcome)
        self._jobs.end(task, outcome, reason, moved_bytes)

    def _look_elsewhere(self, lane: Lane, task: Task) -> None:
        """A path is full. Raises _Elsewhere if another has room, or has the oldest block of all.

        So the parts of the capacity are one capacity: all of it is used, and what goes is what was
        used least recently wherever it stands.
        """
        oldest_ns, oldest = lane.evictor.oldest_ns() or task.used_ns, lane
        for number in self._order(task.block_id):
            other = self._lanes[number]
            if other is lane or not self._may_take(number, task):
                continue
            if other.volume.has_room(self._row_bytes):
                raise _Elsewhere(other)
            other_ns = other.evictor.oldest_ns()
            if other_ns is not None and other_ns < oldest_ns:
                oldest_ns, oldest = other_ns, other
        if oldest is not lane:
            raise _Elsewhere(oldest)

    def _may_take(self, number: int, task: Task) -> bool:
        return number not in task.tried and self._lanes[number].why_not(loads=False) is None

    def _send_on(self, lane: Lane, task: Task, other: Lane) -> None:
        task.moved = True
        self._jobs.put_back(task)
        other.store([task, *lane.turns.ended(task)])

    def _go_on(self, lane: Lane, task: Task, outcome: Outcome) -> None:
        """Stores of the same key have waited for this one."""
        followers = lane.turns.ended(task)
        if outcome is not Outcome.DONE:
            lane.store(followers)
            return
        for follower in followers:
            if not self._jobs.begin(follower):
                continue
            wrong = block.check_row(
                self._jobs.row(follower), follower.key, self._context.fingerprint
            )
            if wrong:
                self._jobs.end(follower, Outcome.FAILED, f"its row {wrong}")
            else:
                self._counters.add("dedup_skips")
                self._jobs.end(follower, Outcome.DONE)

    def _load(self, lane: Lane, task: Task) -> None:
        try:
            outcome, reason = self._read(lane, task)
        # One key's trouble, of whatever kind, is its outcome and never ends the thread.
        except Exception as error:
            outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
        moved_bytes = self._row_bytes if outcome is Outcome.DONE else 0
        if moved_bytes and not task.is_late():
            self._counters.add_all({"loaded": 1, "loaded_bytes": moved_bytes})
        self._jobs.end(task, outcome, reason, moved_bytes)

    def _read(self, lane: Lane, task: Task) -> tuple[Outcome, str]:
        """Read a block where it should be, else wherever it may be."""
        others = [n for n in self._order(task.block_id) if n != lane.volume.number]
        lanes = [lane, *(self._lanes[n] for n in others)]
        row = self._jobs.row(task)
        for at in lanes:
            volume = at.volume
            if at is not lane and at.why_not(loads=True) is not None:
                continue
            began_s = time.monotonic()
            before_ns = task.used_ns - int(self._settings.touch_interval_s * 1e9)
            try:
                shown_ns = volume.blocks.load(task.key, task.block_id, row, task.used_ns, before_ns)
            except BlockWrong as error:
                self._forget(task, volume)
                self._refuse(task.block_id, self._settings.probe_interval_s)
                self._counters.add("quarantined")
                return Outcome.CORRUPT, f"{volume.path}: what stood there {error}"
            except OSError as error:
                if error.errno in _ABSENT:
                    self._index.remove(task.block_id, volume.number)
                    continue
                if error.errno not in _OURS:
                    volume.loads.failed(began_s, _words(error))
                    self._refuse(task.block_id, self._settings.retry_most_s)
                return Outcome.FAILED, f"{volume.path}: {_words(error)}"
            volume.loads.succeeded(began_s)
            self._note_loaded(task, volume, shown_ns)
            return Outcome.DONE, ""
        self._probes.absent(task.block_id)
        return Outcome.MISSING, "it is not there, or not any more"

    def _note_loaded(self, task: Task, volume: Volume, shown_ns: int) -> None:
        if task.block_id not in self._index:
            self._index.add(task.block_id, task.key, 0, volume.number, task.used_ns)
        if self._index.loaded(task.block_id, shown_ns):
            self._counters.add("written_never_read", -1)
        if self._unusable:
            self._unusable.pop(task.block_id, None)

    def _forget(self, task: Task, volume: Volume) -> None:
        self._index.remove(task.block_id, volume.number)
        self._probes.absent(task.block_id)

    def _refuse(self, block_id: int, for_s: float) -> None:
        """Lookups of this block MISS for a while, whatever probes say."""
        if len(self._unusable) >= _UNUSABLE_MAX:
            self._unusable.clear()
        self._unusable[block_id] = time.monotonic() + for_s

    def _probed(self, number: int, block_id: int, key: BlockKey, there: bool) -> None:
        self._counters.add("probes")
        if there:
            self._index.add(block_id, key, 0, number, time.time_ns())
        self._probes.answered(block_id, there)

    # Making it.

    def _check_capacity(self) -> None:
        settings = self._settings
        part = settings.capacity // len(settings.paths)
        if part < self._row_bytes:
            raise TierError(
                f"capacity is {settings.capacity} bytes, {part} for each of {len(settings.paths)} "
                f"paths, expected at least {self._row_bytes}, one block; make capacity larger"
            )

    def _open_volumes(self) -> list[Volume]:
        settings, context = self._settings, self._context
        form = BlockFormat(
            *(self._namespace, context.fingerprint, self._row_bytes),
            *(settings.verify, settings.durability),
        )
        writer = this_writer()
        volumes, problems = [], []
        for number, path in enumerate(self._settings.paths):
            volume = Volume(number, path, settings, form, context.manifest, writer, self._io)
            volumes.append(volume)
            began_s = time.monotonic()
            try:
                volume.open(make=True)
            except OSError as error:
                problems.append(f"{path}: {_words(error)}")
                volume.stores.failed(began_s, _words(error))
            except TierError:
                for opened in volumes:
                    opened.close()
                raise
        if len(problems) == len(volumes):
            for opened in volumes:
                opened.close()
            raise TierError(f"no path can be used: {'; '.join(problems)}; mend or change paths")
        return volumes

    def _make_lane(self, volume: Volume) -> Lane:
        settings, number = self._settings, volume.number
        evictor = Evictor(
            volume,
            self._index,
            self._namespaces,
            self._jobs.is_loading,
            self._counters,
            self._row_bytes,
        )
        scanner = Scanner(
            *(volume, self._index, self._namespaces, self._row_bytes),
            stopped=lambda: lane.keeper.stopped(),
        )
        pool = Pool(f"kvquay-fs-{number}", settings.threads, lambda task: self._run(lane, task))
        lane = Lane(
            volume=volume,
            evictor=evictor,
            pool=pool,
            turns=Turns(
                volume,
                replica=self._context.parallel.data_parallel_index,
                replicas=self._replicas,
                stagger_s=settings.stagger_s,
                # Where it cannot be counted they begin too, and are told so.
                ready=lambda: volume.is_counted() or not volume.stores.closed(),
                go=lambda tasks: pool.add(tasks, loads=False),
            ),
            prober=Prober(
                volume,
                found=partial(self._probed, number),
                useful=lambda: lane.why_not(loads=True) is None,
            ),
            keeper=Keeper(
                *(
                    volume,
                    self._namespace.name,
                    self._index,
                    scanner,
                    evictor,
                    settings,
                    self._counters,
                ),
                counted=lambda: lane.turns.wake(),
            ),
            commits=GroupCommit(lambda batch: self._publish(lane, batch)),
            high_bytes=int(settings.high_watermark * volume.quota_bytes),
            stuck_s=settings.stuck_s,
        )
        return lane


def _words(error: OSError) -> str:
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"
