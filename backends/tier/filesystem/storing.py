"""Store one block, on the path that it is to stand on: what an I/O thread does."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from backends import block
from backends.tier.base import Outcome
from backends.tier.counters import Counters
from backends.tier.filesystem.blockfiles import Draft, Unpublished
from backends.tier.filesystem.io import words
from backends.tier.filesystem.lane import Lane
from backends.tier.filesystem.refusals import Refusals
from backends.tier.filesystem.room import NoRoom, NotAtOnce, NotCounted, Room
from backends.tier.index import Index
from backends.tier.jobs import Jobs, Task
from backends.tier.probes import Probes


class _Wrong(Exception):
    """A row is not the block that it is to be stored as."""


class _Elsewhere(Exception):
    """A store is for another path."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.lane = lane


class Storing:
    """Of one tier. `order` gives the numbers of a block's paths, best first."""

    def __init__(
        self,
        fingerprint: bytes,
        row_bytes: int,
        jobs: Jobs,
        index: Index,
        probes: Probes,
        refusals: Refusals,
        counters: Counters,
        order: Callable[[int], list[int]],
    ) -> None:
        self._fingerprint = fingerprint
        self._row_bytes = row_bytes
        self._jobs = jobs
        self._index = index
        self._probes = probes
        self._refusals = refusals
        self._counters = counters
        self._order = order
        self._lanes: Sequence[Lane] = ()

    def begin(self, lanes: Sequence[Lane]) -> None:
        """From now on tasks may come, and these are all lanes there are."""
        self._lanes = lanes

    def store(self, lane: Lane, tasks: Sequence[Task]) -> bool:
        """Write blocks to files. They get their names together with others, in `publish`.

        Whether any of them took room.
        """
        left = deque(tasks)
        took_room = False
        while left:
            drafts = self._draft_all(lane, left)
            took_room = took_room or bool(drafts)
            self._write(lane, drafts)
            if left:
                # What is written can be evicted for what comes, as soon as it has its name.
                lane.commits.settle()
        return took_room

    def _draft_all(self, lane: Lane, left: deque[Task]) -> list[tuple[Task, Draft]]:
        """Files for tasks, which are taken from `left`. After the first one, only for as long as
        there is room: nobody waits for that with files that are not written."""
        drafts: list[tuple[Task, Draft]] = []
        while left:
            task = left.popleft()
            try:
                draft = self._draft(lane, task, wait=not drafts)
            except NotAtOnce:
                left.appendleft(task)
                break
            except _Elsewhere as elsewhere:
                self._send_on(lane, task, elsewhere.lane)
            except _Wrong as error:
                self._end_store(lane, task, Outcome.FAILED, str(error))
            # One key's trouble, of whatever kind, is its outcome and never ends the thread.
            except Exception as error:
                self._store_failed(lane, task, error)
            else:
                if draft is None:
                    self._skipped(lane, task)
                else:
                    drafts.append((task, draft))
        return drafts

    def _draft(self, lane: Lane, task: Task, *, wait: bool) -> Draft | None:
        """A file that is still to be written; None where the block is there already."""
        row = self._jobs.row(task)
        wrong = block.check_row(row, task.key, self._fingerprint)
        if wrong:
            raise _Wrong(f"its row {wrong}")
        volume = lane.volume

        def make_room(short_bytes: int) -> Room:
            if len(self._lanes) > 1 and not task.moved:
                self._look_elsewhere(lane, task)
            return lane.evictor.make_room(short_bytes, task.used_ns, spare=True)

        def draft() -> Draft | None:
            # Without replicas nobody is looked for: what is there cannot be given the same name.
            likely = task.seen_elsewhere or task.block_id in self._index
            if likely and volume.blocks.settle(task.key, task.block_id):
                return None
            if task.seen_elsewhere and not task.moved:
                self._find_elsewhere(lane, task)
            space = volume.space
            spare = space.obtain(make_room) if wait else space.obtain_at_once()
            return volume.blocks.draft(task.key, task.block_id, row, task.used_ns, spare)

        try:
            return draft()
        except FileNotFoundError:
            if not volume.needs_opening():
                raise
            volume.open(make=False)
            return draft()

    def _write(
        self, lane: Lane, drafts: Sequence[tuple[Task, Draft]], *, last: bool = False
    ) -> None:
        """`last`: what cannot be written now is not tried again."""
        if not drafts:
            return
        results: Sequence[Exception | None]
        try:
            results = lane.volume.blocks.write([draft for _, draft in drafts])
        except Exception as error:
            results = [error] * len(drafts)
        for (task, draft), wrong in zip(drafts, results, strict=True):
            if wrong is None:
                lane.commits.add((task, draft.file))
            elif isinstance(wrong, FileNotFoundError) and not last:
                self._write_again(lane, task, wrong)
            else:
                self._store_failed(lane, task, wrong)

    def _write_again(self, lane: Lane, task: Task, wrong: FileNotFoundError) -> None:
        """Somebody may have removed the directory, so what was open leads nowhere."""
        try:
            if not lane.volume.needs_opening():
                raise wrong
            lane.volume.open(make=False)
        except Exception as error:
            self._store_failed(lane, task, error)
        else:
            self._write(lane, self._draft_all(lane, deque([task])), last=True)

    def _find_elsewhere(self, lane: Lane, task: Task) -> None:
        """Another replica may prefer another path. Raises _Elsewhere if the block stands there."""
        for number, other in enumerate(self._lanes):
            if other is lane or not self._may_take(number, task):
                continue
            # The other path's own fault shows where it is used.
            with contextlib.suppress(OSError):
                if other.volume.blocks.holds(task.key, task.block_id):
                    raise _Elsewhere(other)

    def publish(self, lane: Lane, batch: list[tuple[Task, Unpublished]]) -> None:
        """Give files that have been written their names, and end their tasks."""
        try:
            results = lane.volume.blocks.publish([file for _, file in batch])
        # One batch's trouble, of whatever kind, is its outcome and never ends the thread.
        except Exception as error:
            for task, _ in batch:
                self._store_failed(lane, task, error)
            return
        self._stored(
            lane, [file[0] for file, wrong in zip(batch, results, strict=True) if not wrong]
        )
        for (task, _), wrong in zip(batch, results, strict=True):
            if isinstance(wrong, FileExistsError):
                self._lost_race(lane, task)
            elif wrong is not None:
                self._store_failed(lane, task, wrong)

    def _lost_race(self, lane: Lane, task: Task) -> None:
        """Another writer was first; if what it wrote is wrong, it is out of the way now."""
        try:
            there = lane.volume.blocks.settle(task.key, task.block_id)
        except OSError as error:
            self._store_failed(lane, task, error)
            return
        if there:
            self._skipped(lane, task)
        else:
            self._jobs.put_back(task)
            lane.pool.add([task], loads=False)

    def _stored(self, lane: Lane, tasks: list[Task]) -> None:
        """Blocks that have got their names."""
        if not tasks:
            return
        volume, count = lane.volume, len(tasks)
        volume.stores.succeeded(max(task.began_s for task in tasks))
        self._counters.add_all(
            {
                "stored": count,
                "stored_bytes": count * self._row_bytes,
                "written_never_read": count,
            }
        )
        self._index.add_written(
            [(task.block_id, task.key, task.used_ns) for task in tasks], 0, volume.number
        )
        self._known(tasks)
        followers = lane.turns.ended(tasks)
        self._jobs.end_all(tasks, Outcome.DONE, self._row_bytes)
        self._end_followers(followers)
        spares = volume.space.spares
        if len(spares) <= spares.most // 2 and volume.ledger.cached.bytes > lane.high_bytes:
            lane.keeper.kick()

    def evict_ahead(self, lane: Lane, before_ns: int) -> None:
        """Have files ready for the next stores, which go where these went. Nobody waits for it."""
        # Among several paths each block finds out by itself which of them has the oldest one.
        if len(self._lanes) == 1:
            # What fails here fails again where it is needed.
            with contextlib.suppress(OSError):
                lane.volume.space.make_ahead(
                    lambda need: lane.evictor.make_room(need, before_ns, spare=True)
                )

    def _skipped(self, lane: Lane, task: Task) -> None:
        """A block that is there already."""
        lane.volume.stores.succeeded(task.began_s)
        self._counters.add("dedup_skips")
        self._index.add(task.block_id, task.key, 0, lane.volume.number, task.used_ns)
        self._known([task])
        self._end_store(lane, task, Outcome.DONE, "")

    def _known(self, tasks: list[Task]) -> None:
        self._probes.present([task.block_id for task in tasks])
        for task in tasks:
            self._refusals.end(task.block_id)

    def _store_failed(self, lane: Lane, task: Task, error: Exception) -> None:
        """One key's trouble is its outcome; a path's trouble is the path's too."""
        volume = lane.volume
        if isinstance(error, NotCounted) and volume.stores.closed():
            # Somebody has removed the ledger: it waits until there is a new one.
            self._jobs.put_back(task)
            lane.turns.wait_until_ready(task)
            lane.keeper.kick()
            return
        if isinstance(error, (NoRoom, NotCounted)):
            self._end_store(lane, task, Outcome.SHED, str(error))
            return
        if not isinstance(error, OSError):
            self._end_store(lane, task, Outcome.FAILED, f"{type(error).__name__}: {error}")
            return
        volume.stores.failed(task.began_s, words(error))
        task.tried = (*task.tried, volume.number)
        other = next((n for n in self._order(task.block_id) if self._may_take(n, task)), None)
        if other is not None:
            self._send_on(lane, task, self._lanes[other])
        else:
            self._end_store(lane, task, Outcome.SHED, f"{volume.path}: {words(error)}")

    def _end_store(self, lane: Lane, task: Task, outcome: Outcome, reason: str) -> None:
        self.go_on(lane, task, outcome)
        self._jobs.end(task, outcome, reason)

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
            # One that is still being counted may have room: the block waits there until it is.
            if other.volume.has_room(self._row_bytes) or not other.volume.is_counted():
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
        other.store([task, *lane.turns.ended([task])])

    def go_on(self, lane: Lane, task: Task, outcome: Outcome) -> None:
        """Stores of the same key have waited for this one."""
        followers = lane.turns.ended([task])
        if outcome is Outcome.DONE:
            self._end_followers(followers)
        else:
            lane.store(followers)

    def _end_followers(self, followers: list[Task]) -> None:
        for follower in followers:
            if not self._jobs.begin(follower):
                continue
            wrong = block.check_row(self._jobs.row(follower), follower.key, self._fingerprint)
            if wrong:
                self._jobs.end(follower, Outcome.FAILED, f"its row {wrong}")
            else:
                self._counters.add("dedup_skips")
                self._jobs.end(follower, Outcome.DONE)
