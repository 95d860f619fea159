"""The tier as its caller sees it. Whatever may wait is done by the threads of its lanes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

from backends.block import BlockKey
from backends.errors import TierError
from backends.tier.base import (
    Capabilities,
    Evicted,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Tier,
    TierContext,
    Usage,
)
from backends.tier.counters import Counters
from backends.tier.filesystem import naming
from backends.tier.filesystem.claims import Claims
from backends.tier.filesystem.commits import GroupCommit
from backends.tier.filesystem.evict import Evictor
from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import Io, words
from backends.tier.filesystem.keeper import Keeper
from backends.tier.filesystem.lane import Lane
from backends.tier.filesystem.loading import Loading
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.native import make_io
from backends.tier.filesystem.prober import Prober
from backends.tier.filesystem.refusals import Refusals
from backends.tier.filesystem.scan import Scanner
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.storing import Storing
from backends.tier.filesystem.volume import Volume
from backends.tier.filesystem.writer import this_writer
from backends.tier.gone import Gone
from backends.tier.index import Index
from backends.tier.jobs import Jobs, Task
from backends.tier.pool import Pool
from backends.tier.probes import Probes
from backends.tier.spaces import Namespaces
from backends.tier.turns import Turns

# A lookup is PENDING for so long at most, whatever hangs below.
_PENDING_S: Final = 5.0
# A thread moves so many small blocks at a time: one by one, more goes into taking turns.
_BATCH: Final = 16
_BATCH_BYTES: Final = 4 << 20
# So many blocks of each thread get their names together where more are to come: every time costs
# the ledger's locks, and with each call for them the interpreter.
_NAMED_TOGETHER: Final = 4
COUNTS: Final = (
    "stored_bytes",
    "loaded_bytes",
    "loaded",
    "stored",
    "evicted",
    "evicted_bytes",
    "evicted_never_read",
    "dedup_skips",
    "probes",
    "swept",
    "lookups",
    "hits",
    "written_never_read",
)
_CLOSED = "the tier was closed"


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
        self._io = io or make_io()
        self._row_bytes = context.rows.row_bytes
        parallel = context.parallel
        isolated = settings.placement == "per_replica"
        replica = parallel.data_parallel_index if isolated else None
        self._namespace = Namespace(naming.namespace_name(context.fingerprint, replica))
        self._replicas = 1 if isolated else parallel.data_parallel_size
        self._private = isolated
        self._counters = Counters(COUNTS)
        self._index = Index()
        self._gone = Gone()
        self._namespaces = Namespaces(self._namespace)
        self._jobs = Jobs(context.rows)
        self._probes = Probes(settings.probe_interval_s, _PENDING_S)
        self._refusals = Refusals()
        self._clock_ns = 0
        self._oldest_ns: tuple[float, int | None] = (0.0, None)
        self._closing = threading.Lock()
        self._closed = False
        self._check_capacity()
        self._seeds = [naming.path_seed(path) for path in settings.paths]
        local = parallel.data_parallel_rank_local
        preferred = None if local is None else settings.affinity.get(local)
        self._preferred = None if preferred is None else settings.paths.index(preferred)
        parts = (self._row_bytes, self._jobs, self._index, self._probes, self._refusals)
        self._storing = Storing(context.fingerprint, *parts, self._counters, self._order)
        self._loading = Loading(settings, *parts, self._counters, self._order)
        volumes = self._open_volumes()
        for volume in volumes:
            volume.others = [other for other in volumes if other is not volume]
        claims = Claims([volume.ledger for volume in volumes], self._home)
        self._lanes = [self._make_lane(volume, claims) for volume in volumes]
        self._storing.begin(self._lanes)
        self._loading.begin(self._lanes)
        self._probes.probers = [lane.prober for lane in self._lanes]
        paths = [(lane.volume, lane.evictor) for lane in self._lanes]
        for lane in self._lanes:
            lane.keeper.start([path for path in paths if path[0] is not lane.volume])

    # What the caller's thread does.

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        if self._closed:
            return [Lookup.MISS] * len(keys)
        answers = self._lookup(keys)
        self._counters.add_all({"lookups": len(keys), "hits": answers.count(Lookup.HIT)})
        return answers

    def submit_store(self, job: Job) -> None:
        tasks, used = self._submit(job, is_load=False), self._settings.queue_blocks
        room = self._settings.queue_bytes // self._row_bytes
        if tasks:
            # Those that are there already must not go to make room for the others.
            self._index.use_all([task.block_id for task in tasks], tasks[0].used_ns)
        over = max(0, self._jobs.stores - min(used, room))
        for task in tasks[len(tasks) - over :]:
            self._jobs.end(task, Outcome.SHED, f"{self._jobs.stores} stores wait already")
        self._route(tasks[: len(tasks) - over])

    def submit_load(self, job: Job) -> None:
        tasks = self._submit(job, is_load=True)
        over = max(0, self._jobs.loads - self._settings.queue_blocks)
        for task in tasks[len(tasks) - over :]:
            self._jobs.end(task, Outcome.SHED, f"{self._jobs.loads} loads wait already")
        tasks = tasks[: len(tasks) - over]
        if not tasks:
            return
        volumes = self._index.use_all([task.block_id for task in tasks], tasks[0].used_ns)
        queues: dict[int, list[Task]] = {}
        if len(self._lanes) == 1:
            queues[0] = tasks
        else:
            for task, volume in zip(tasks, volumes, strict=True):
                number = self._order(task.block_id)[0] if volume is None else volume
                queues.setdefault(number, []).append(task)
        for number, queue in queues.items():
            why_not = self._lanes[number].why_not(loads=True)
            if why_not is None:
                self._lanes[number].load(queue)
                continue
            for task in queue:
                self._jobs.end(task, Outcome.SHED, why_not)

    def poll(self) -> Sequence[JobResult]:
        return self._jobs.poll()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._index.use_all(self._namespace.block_ids(keys), self._used_ns(len(keys)))

    def usage(self) -> Usage:
        totals = [lane.volume.ledger.cached for lane in self._lanes if lane.volume.is_open]
        blocks = sum(total.blocks for total in totals)
        oldest_ns = self._oldest() if blocks else None
        return Usage(
            bytes=sum(total.bytes for total in totals),
            blocks=blocks,
            capacity_bytes=self._settings.capacity,
            oldest_s=None if oldest_ns is None else max(0.0, (time.time_ns() - oldest_ns) / 1e9),
        )

    def evicted(self) -> Evicted:
        return self._gone.take()

    def counters(self) -> dict[str, int]:
        outcomes = self._jobs.counts
        return self._counters.read() | {
            "shed": outcomes[Outcome.SHED],
            "corrupt": outcomes[Outcome.CORRUPT],
            "missing": outcomes[Outcome.MISSING],
            "late": outcomes[Outcome.LATE],
            "failed": outcomes[Outcome.FAILED],
            "quarantined": sum(lane.volume.quarantine.moved for lane in self._lanes),
        }

    def drain(self, timeout_s: float) -> bool:
        if not self._jobs.drain(timeout_s):
            return False
        # What other processes have stored meanwhile belongs to the usage that is asked for next.
        for lane in self._lanes:
            if lane.why_not(loads=False) is None:
                with contextlib.suppress(OSError):
                    lane.volume.ledger.totals()
        return True

    def settle(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        self._probes.forget_absent()
        return self.drain(timeout_s) and all(
            lane.keeper.settle(max(0.0, end_s - time.monotonic())) for lane in self._lanes
        )

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
                    if lane.volume.is_open and lane.keeper.restored.is_set():
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
            f"{lane.volume.path}: {lane.volume.blocks.direct.reason}{lane.volume.bounce.describe()}"
            + "".join(
                f"; no {what}: {why}"
                for what, loads in (("stores", False), ("loads", True))
                if (why := lane.why_not(loads=loads)) is not None
            )
            for lane in self._lanes
        ]

    def _lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        ids = self._namespace.block_ids(keys)
        volumes = self._index.use_all(ids, self._used_ns(len(ids)))
        answers: list[Lookup] = []
        here = [Lookup.MISS if lane.why_not(loads=True) else Lookup.HIT for lane in self._lanes]
        for i, volume in enumerate(volumes):
            if self._refusals and ids[i] in self._refusals:
                answers.append(Lookup.MISS)
            elif volume is not None:
                answers.append(here[volume])
            else:
                answers.append(self._look_for(ids[i], keys[i]))
        return answers

    def _look_for(self, block_id: int, key: BlockKey) -> Lookup:
        """What is known of a key that is not in the index."""
        since_s = self._jobs.storing_since_s(block_id)
        if since_s is not None:
            return Lookup.PENDING if time.monotonic() - since_s < _PENDING_S else Lookup.MISS
        if self._private and all(lane.keeper.scanned.is_set() for lane in self._lanes):
            return Lookup.MISS
        return self._probes.ask(block_id, key)

    def _submit(self, job: Job, *, is_load: bool) -> list[Task]:
        if self._closed:
            raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
        ids = self._namespace.block_ids(job.keys)
        return self._jobs.submit(job, ids, self._used_ns(len(ids)), is_load=is_load).tasks

    def _route(self, tasks: list[Task]) -> None:
        """Send stores to their paths; those for which there is none now are SHED."""
        refusals = [lane.why_not(loads=False) for lane in self._lanes]
        if len(self._lanes) == 1 and refusals[0] is None:
            self._lanes[0].store(tasks)
            return
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

    def _home(self, block_id: int) -> int:
        """The path that is a block's first one for every replica."""
        return naming.path_order(block_id, self._seeds)[0] if len(self._seeds) > 1 else 0

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

    # What the lanes' threads do.

    def _run(self, lane: Lane, tasks: list[Task]) -> None:
        """All of these are loads, or all are stores."""
        took_room = False
        begun, ended = self._jobs.begin_all(tasks)
        try:
            if tasks[0].state.is_load:
                self._loading.load(lane, begun)
                return
            for task in ended:
                self._storing.go_on(lane, task, Outcome.LATE)
            took_room = self._storing.store(lane, begun)
        finally:
            lane.commits.settle()
        if took_room:
            self._storing.evict_ahead(lane, begun[0].used_ns)

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
                problems.append(f"{path}: {words(error)}")
                volume.stores.failed(began_s, words(error))
            except TierError:
                for opened in volumes:
                    opened.close()
                raise
        # One that can be read but not written to, for now, is opened by its keeper when it can.
        if not any(volume.place.is_readable for volume in volumes):
            for opened in volumes:
                opened.close()
            raise TierError(f"no path can be used: {'; '.join(problems)}; mend or change paths")
        return volumes

    def _make_lane(self, volume: Volume, claims: Claims) -> Lane:
        settings, number = self._settings, volume.number
        evictor = Evictor(
            volume,
            self._index,
            self._namespaces,
            self._jobs.is_loading,
            self._counters,
            self._gone,
            self._row_bytes,
        )
        scanner = Scanner(
            *(volume, self._index, self._namespaces, self._row_bytes),
            stopped=lambda: lane.keeper.stopped(),
        )
        pool = Pool(
            f"kvquay-fs-{number}",
            settings.threads,
            lambda tasks: self._run(lane, tasks),
            batch=max(1, min(_BATCH, _BATCH_BYTES // self._row_bytes)),
        )
        lane = Lane(
            volume=volume,
            evictor=evictor,
            pool=pool,
            turns=Turns(
                *(f"kvquay-fs-turns-{number}", claims),
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
            commits=GroupCommit(
                lambda batch: self._storing.publish(lane, batch),
                # A finished file takes room that nobody can evict until it has its name.
                few=max(1, min(_NAMED_TOGETHER * pool.store_threads, volume.space.spares.most)),
                more=pool.stores_wait,
            ),
            high_bytes=int(settings.high_watermark * volume.quota_bytes),
            stuck_s=settings.stuck_s,
        )
        return lane
