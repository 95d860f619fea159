"""The tier as its caller sees it. Whatever may wait is done by its own threads."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, Final

from backends import block
from backends.block import BlockKey
from backends.errors import TierError
from backends.tier import naming
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
from backends.tier.gone import Gone
from backends.tier.health import Breaker
from backends.tier.index import Index
from backends.tier.jobs import Jobs, Task, TaskRow
from backends.tier.manifest import pack_manifest
from backends.tier.naming import Namespace
from backends.tier.object import requests
from backends.tier.object.bank import Bank, NoSpace
from backends.tier.object.blocks import BlockFormat, BlockWrong, ObjectBlocks
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Absent, NoRoom, StoreFault
from backends.tier.object.keeper import Keeper
from backends.tier.object.listing import Listing
from backends.tier.object.opening import Opening
from backends.tier.object.prober import ObjectProber
from backends.tier.object.quarantine import Quarantine
from backends.tier.object.requests import Requests
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.sharing import Sharing
from backends.tier.pool import Pool, threads_of
from backends.tier.probes import Probes
from backends.tier.spaces import Namespaces
from backends.tier.turns import Turns

# A lookup is PENDING for so long at most, whatever hangs below.
_PENDING_S: Final = 5.0
_UNUSABLE_MAX: Final = 65536
_CLOSED: Final = "the tier was closed"
COUNTS: Final = (
    *requests.COUNTS,
    *("stored_bytes", "loaded_bytes", "loaded", "stored", "evicted", "evicted_bytes"),
    *(
        "dedup_skips",
        "conflicts",
        "multipart",
        "probes",
        "listings",
        "quarantined",
        "swept",
        "lookups",
        "hits",
        "ledger_conflicts",
    ),
)


class ObjectTier(Tier):
    """Blocks as objects of one store. See `ObjectSettings`."""

    name = "object"
    capabilities = Capabilities(persistent=True, shared=True, quota=True, corruption=True)
    settings_type: ClassVar = ObjectSettings

    def __init__(
        self,
        context: TierContext,
        settings: ObjectSettings,
        *,
        client: ObjectClient | None = None,
    ) -> None:
        """Raises TierError if the store refuses what the tier needs. A store that does not answer
        is waited for in the background; until then every key is a MISS."""
        self._context = context
        self._settings = settings
        self._row_bytes = context.rows.row_bytes
        self._check_sizes()
        embedded = settings.scheme == "memory"
        self.capabilities = dataclasses.replace(
            ObjectTier.capabilities,
            persistent=not embedded,
            shared=not embedded,
            quota=settings.capacity_bytes is not None,
        )
        parallel = context.parallel
        self._private = settings.placement == "per_replica"
        replica = parallel.data_parallel_index if self._private else None
        self._namespace = Namespace(naming.namespace_name(context.fingerprint, replica))
        self._replicas = 1 if self._private else parallel.data_parallel_size
        self._clock_ns = 0
        self._oldest_ns: tuple[float, int | None] = (0.0, None)
        self._unusable: dict[int, float] = {}
        self._closing = threading.Lock()
        self._closed = False
        self._counters = Counters(COUNTS)
        self._index = Index()
        self._gone = Gone()
        self._jobs = Jobs(context.rows)
        self._probes = Probes(settings.absent_ttl_s, _PENDING_S)
        tolerance = settings.breaker_failures
        self._reads = Breaker(settings.breaker_s, settings.breaker_most_s, tolerance)
        self._writes = Breaker(settings.breaker_s, settings.breaker_most_s, tolerance)
        self._requests = Requests(settings, self._counters)
        self._client = client or ObjectClient(settings)
        quarantine = Quarantine(self._client, settings.quarantine_limit_bytes, self._counters)
        form = BlockFormat(
            *(self._namespace, context.fingerprint, self._row_bytes, settings.verify),
            *(settings.multipart_threshold, settings.multipart_part),
        )
        self._blocks = ObjectBlocks(
            self._client, self._requests, quarantine, form, self._reads, self._writes
        )
        self._listing = Listing(
            self._client,
            self._requests,
            self._reads,
            self._index,
            Namespaces(self._namespace),
            self._row_bytes,
            everything=settings.capacity_bytes is not None,
        )
        self._opening = Opening(self._client, self._requests, settings, self._writes)
        self._bank = self._make_bank()
        self._keeper = Keeper(
            settings,
            self._client,
            self._listing,
            self._bank,
            self._make_sharing(),
            self._writes,
            self._counters,
            open_store=self._open_store,
            ready=lambda: self._turns.wake(),
        )
        self._keeper.open_first()
        stores = settings.in_flight_blocks(self._row_bytes)
        self._pool = Pool("kvquay-object", threads_of(stores), self._run_all, stores)
        self._turns = Turns(
            *("kvquay-object-turns", None),
            replica=parallel.data_parallel_index,
            replicas=self._replicas,
            stagger_s=settings.stagger_s,
            ready=lambda: self._keeper.may_store() or not self._writes.closed(),
            go=lambda tasks: self._pool.add(tasks, loads=False),
        )
        self._prober = ObjectProber(
            gather_s=settings.probe_interval_s,
            known=lambda: len(self._index),
            useful=lambda: self._why_not(loads=True) is None,
            holds=lambda block_id, key: self._blocks.holds(key, block_id),
            list_all=self._list_all,
            found=self._probed,
        )
        self._probes.probers = [self._prober]
        self._keeper.start()

    # What the caller's thread does.

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        if self._closed:
            return [Lookup.MISS] * len(keys)
        usable = self._why_not(loads=True) is None
        used_ns = self._used_ns(len(keys))
        answers = [self._lookup(key, used_ns - i, usable) for i, key in enumerate(keys)]
        self._counters.add_all({"lookups": len(keys), "hits": answers.count(Lookup.HIT)})
        return answers

    def submit_store(self, job: Job) -> None:
        tasks, settings = self._submit(job, is_load=False), self._settings
        room = min(settings.queue_blocks, settings.queue_bytes // self._row_bytes)
        why_not = self._why_not(loads=False)
        over = len(tasks) if why_not else max(0, self._jobs.stores - room)
        kept = max(0, len(tasks) - over)
        for task in tasks[kept:]:
            reason = why_not or f"{self._jobs.stores} stores wait already"
            self._jobs.end(task, Outcome.SHED, reason)
        self._turns.add(tasks[:kept])

    def submit_load(self, job: Job) -> None:
        tasks = self._submit(job, is_load=True)
        over = max(0, self._jobs.loads - self._settings.queue_blocks)
        kept = max(0, len(tasks) - over)
        for task in tasks[kept:]:
            self._jobs.end(task, Outcome.SHED, f"{self._jobs.loads} loads wait already")
        why_not = self._why_not(loads=True)
        if why_not is None:
            for task in tasks[:kept]:
                self._index.use(task.block_id, task.used_ns)
            self._pool.add(tasks[:kept], loads=True)
            return
        for task in tasks[:kept]:
            self._jobs.end(task, Outcome.FAILED, why_not)

    def poll(self) -> Sequence[JobResult]:
        return self._jobs.poll()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        used_ns = self._used_ns(len(keys))
        for i, key in enumerate(keys):
            self._index.use(self._namespace.block_id(key), used_ns - i)

    def usage(self) -> Usage:
        blocks = len(self._index)
        nbytes = blocks * self._row_bytes
        if self._bank is not None:
            nbytes = self._bank.used_bytes()
        oldest_ns = self._oldest() if blocks else None
        return Usage(
            bytes=nbytes,
            blocks=blocks,
            capacity_bytes=self._settings.capacity_bytes,
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
        }

    def drain(self, timeout_s: float) -> bool:
        return self._jobs.drain(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        self._probes.forget_absent()
        return self.drain(timeout_s)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.end_unbegun(Outcome.SHED, _CLOSED)
            self._requests.stop()
            end_s = time.monotonic() + self._settings.close_timeout_s
            parts = (self._turns, self._prober, self._keeper, self._pool)
            for part in parts:
                part.stop()
            ended = [part.join(end_s) for part in parts]
            if not all(ended):
                # No row may be written to any more: it is the caller's again.
                self._client.interrupt()
                ended = [part.join(time.monotonic() + 1.0) for part in parts]
            if all(ended):
                self._keeper.leave()
                self._client.close()

    def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until what was there before has been listed."""
        return self._keeper.listed.wait(timeout_s)

    def describe(self) -> list[str]:
        """Lines for people: what the store can, and whether it is used now."""
        settings = self._settings
        if not self._keeper.opened.is_set():
            how = "not reached yet"
        elif settings.conditional == "off":
            how = "puts overwrite, as conditional is off"
        elif self._blocks.conditional:
            how = "puts create only"
        else:
            how = (
                "the store has no conditional writes, so puts overwrite equal bytes with equal "
                "bytes, and replicas may upload a block more than once"
            )
        whys = [
            f"; no {what}: {why}"
            for what, loads in (("stores", False), ("loads", True))
            if (why := self._why_not(loads=loads)) is not None
        ]
        if settings.scheme == "s3" and settings.direct_reads and not self._client.reads_directly:
            whys.append("; loads pass through the client, as nothing else gets an answer")
        return [f"{settings.url}: {how}{''.join(whys)}"]

    def _why_not(self, *, loads: bool) -> str | None:
        """Why nothing can be stored, or loaded, now. Waits for nothing."""
        breaker = self._reads if loads else self._writes
        if not breaker.closed():
            return (
                f"{self._settings.url}: {breaker.reason}; tried again in "
                f"{breaker.remaining_s():.1f} s"
            )
        if not self._keeper.opened.is_set():
            return f"{self._settings.url}: not reached yet: {self._writes.reason}"
        return None

    def _lookup(self, key: BlockKey, used_ns: int, usable: bool) -> Lookup:
        if not usable:
            return Lookup.MISS
        block_id = self._namespace.block_id(key)
        if self._unusable and self._is_unusable(block_id):
            return Lookup.MISS
        if self._index.use(block_id, used_ns) is not None:
            return Lookup.HIT
        since_s = self._jobs.storing_since_s(block_id)
        if since_s is not None:
            return Lookup.PENDING if time.monotonic() - since_s < _PENDING_S else Lookup.MISS
        if self._private and self._keeper.listed.is_set():
            return Lookup.MISS
        return self._probes.ask(block_id, key)

    def _submit(self, job: Job, *, is_load: bool) -> list[Task]:
        if self._closed:
            raise TierError(f"tier {self.name} is closed and takes no job {job.job_id}")
        ids = [self._namespace.block_id(key) for key in job.keys]
        # A job's own list is emptied when its last key ends.
        return list(self._jobs.submit(job, ids, self._used_ns(len(ids)), is_load=is_load).tasks)

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

    # What the tier's threads do.

    def _run_all(self, tasks: list[Task]) -> None:
        for task in tasks:
            self._run(task)

    def _run(self, task: Task) -> None:
        try:
            if task.state.is_load:
                self._load(task)
            else:
                self._store(task)
        # One key's trouble, of whatever kind, is its outcome and never ends the thread.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if task.state.is_load:
                self._jobs.end(task, Outcome.FAILED, reason)
            else:
                self._end_store(task, Outcome.FAILED, reason)

    def _load(self, task: Task) -> None:
        # The row is the caller's until the bytes are here: a late answer then touches nothing.
        if task.ended or (task.is_late() and not self._jobs.begin(task)):
            return
        try:
            target = TaskRow(self._jobs, task)
            row = self._blocks.fetch(task.key, task.block_id, target, task.deadline_s)
            if row is None:
                return
            self._blocks.check(row, task.key)
        except BlockWrong as wrong:
            self._found_wrong(task, wrong)
        except Absent:
            self._forget(task)
            self._end_load(task, Outcome.MISSING, "it is not there, or not any more")
        except StoreFault as fault:
            self._end_load(task, Outcome.FAILED, f"{self._settings.url}: {fault}")
        else:
            if task.block_id not in self._index:
                self._index.add(task.block_id, task.key, 0, 0, task.used_ns)
            self._unusable.pop(task.block_id, None)
            if not task.is_late():
                self._counters.add_all({"loaded": 1, "loaded_bytes": self._row_bytes})
            self._jobs.end(task, Outcome.DONE, "", self._row_bytes)

    def _end_load(self, task: Task, outcome: Outcome, reason: str) -> None:
        if task.begun or self._jobs.begin(task):
            self._jobs.end(task, outcome, reason)

    def _found_wrong(self, task: Task, wrong: BlockWrong) -> None:
        self._forget(task)
        refused_s = self._settings.absent_ttl_s
        try:
            self._blocks.put_away(task.key, task.block_id)
        except StoreFault:
            # What could not be taken away is wrong until the next store.
            refused_s = math.inf
        if len(self._unusable) >= _UNUSABLE_MAX:
            self._unusable.clear()
        self._unusable[task.block_id] = time.monotonic() + refused_s
        reason = f"{self._settings.url}: what stood there {wrong}"
        self._end_load(task, Outcome.CORRUPT, reason)

    def _forget(self, task: Task) -> None:
        self._index.remove(task.block_id)
        self._probes.absent(task.block_id)

    def _store(self, task: Task) -> None:
        if not self._jobs.begin(task):
            self._go_on(task, Outcome.LATE)
            return
        row = self._jobs.row(task)
        wrong = block.check_row(row, task.key, self._context.fingerprint)
        if wrong:
            self._end_store(task, Outcome.FAILED, f"its row {wrong}")
            return
        likely = task.seen_elsewhere or task.block_id in self._index
        key, block_id, deadline_s = task.key, task.block_id, task.deadline_s
        try:
            if self._blocks.looks_first(likely) and self._blocks.settle(key, block_id, deadline_s):
                self._stored(task, False)
                return
            if self._bank is not None:
                self._bank.take(self._row_bytes, task.used_ns, self._jobs.stores)
            written: bool | None = None
            try:
                written = self._blocks.store(key, block_id, row, deadline_s)
                # A create-only put that came second.
                self._counters.add("conflicts", int(not written))
            finally:
                if self._bank is not None:
                    # What failed may have arrived all the same, so it counts.
                    self._bank.ended(self._row_bytes, unused=written is False)
        except (NoSpace, NoRoom) as error:
            self._end_store(task, Outcome.SHED, str(error))
        except StoreFault as fault:
            self._end_store(task, Outcome.FAILED, f"{self._settings.url}: {fault}")
        else:
            self._stored(task, written)

    def _stored(self, task: Task, written: bool) -> None:
        if written:
            in_parts = self._row_bytes > self._settings.multipart_threshold
            counted = {"stored": 1, "stored_bytes": self._row_bytes, "multipart": int(in_parts)}
            self._counters.add_all(counted)
        else:
            self._counters.add("dedup_skips")
        self._index.add(task.block_id, task.key, 0, 0, task.used_ns, written=written)
        self._probes.present([task.block_id])
        self._unusable.pop(task.block_id, None)
        self._end_store(task, Outcome.DONE, "", self._row_bytes if written else 0)

    def _end_store(self, task: Task, outcome: Outcome, reason: str, moved_bytes: int = 0) -> None:
        self._go_on(task, outcome)
        self._jobs.end(task, outcome, reason, moved_bytes)

    def _go_on(self, task: Task, outcome: Outcome) -> None:
        """Stores of the same key have waited for this one."""
        followers = self._turns.ended([task])
        if outcome is not Outcome.DONE:
            self._turns.add(followers)
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

    def _probed(self, block_id: int, key: BlockKey, there: bool) -> None:
        self._counters.add("probes")
        if there:
            self._index.add(block_id, key, 0, 0, time.time_ns())
        self._probes.answered(block_id, there)

    def _list_all(self) -> set[int] | None:
        self._counters.add("listings")
        return self._listing.list_own()

    # Making it.

    def _check_sizes(self) -> None:
        capacity = self._settings.capacity_bytes
        if capacity is not None and capacity < self._row_bytes:
            raise TierError(
                f"capacity is {capacity} bytes, expected at least {self._row_bytes}, one block; "
                "make capacity larger"
            )

    def _open_store(self) -> None:
        manifest = pack_manifest(self._context.fingerprint, self._row_bytes, self._context.manifest)
        name = self._namespace.name
        conditional = self._opening.open(name, manifest, self._row_bytes)
        if self._bank is not None and not conditional:
            raise TierError(
                f"{self._settings.url} has no conditional writes, and without them processes "
                "cannot keep one capacity together; set capacity to unbounded and give the bucket "
                "a lifecycle rule, or use another store"
            )
        self._blocks.conditional = conditional

    def _make_sharing(self) -> Sharing | None:
        if self._bank is None:
            return None
        return Sharing(
            *(self._client, self._requests, self._writes, self._index, self._listing),
            self._settings.recency_interval_s,
        )

    def _make_bank(self) -> Bank | None:
        capacity = self._settings.capacity_bytes
        if capacity is None:
            return None
        return Bank(
            capacity,
            self._settings,
            self._client,
            self._requests,
            self._writes,
            self._listing,
            self._index,
            self._counters,
            self._gone,
            self._jobs.is_loading,
        )
