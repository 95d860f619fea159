"""Load blocks, wherever they are: what an I/O thread does."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from backends.tier.base import Outcome
from backends.tier.counters import Counters
from backends.tier.filesystem.blockfiles import BlockWrong, Wanted
from backends.tier.filesystem.io import words
from backends.tier.filesystem.lane import Lane
from backends.tier.filesystem.refusals import Refusals
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.volume import Volume
from backends.tier.index import Index
from backends.tier.jobs import Jobs, Task
from backends.tier.probes import Probes

# This process's lack of something, not the path's or the block's fault.
_OURS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


class Loading:
    """Of one tier. `order` gives the numbers of a block's paths, best first."""

    def __init__(
        self,
        settings: FilesystemSettings,
        row_bytes: int,
        jobs: Jobs,
        index: Index,
        probes: Probes,
        refusals: Refusals,
        counters: Counters,
        order: Callable[[int], list[int]],
    ) -> None:
        self._settings = settings
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

    def load(self, lane: Lane, tasks: Sequence[Task]) -> None:
        for task in tasks if len(tasks) == 1 else self._load_together(lane, tasks):
            try:
                outcome, reason = self._read(lane, task)
            # One key's trouble, of whatever kind, is its outcome and never ends the thread.
            except Exception as error:
                outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
            if outcome is Outcome.DONE:
                self._count([task])
            moved_bytes = self._row_bytes if outcome is Outcome.DONE else 0
            self._jobs.end(task, outcome, reason, moved_bytes)

    def _load_together(self, lane: Lane, tasks: Sequence[Task]) -> list[Task]:
        """Read several blocks at once. Those that nothing is wrong with end; the others."""
        began_s, done = time.monotonic(), []
        # What it is that is wrong, and with which of them, shows when each is read by itself.
        with contextlib.suppress(Exception):
            shown = lane.volume.blocks.load_all([self._wanted(task) for task in tasks])
            for task, shown_ns in zip(tasks, shown, strict=True):
                if shown_ns is not None:
                    self._note_loaded(task, lane.volume, shown_ns)
                    done.append(task)
        if done:
            lane.volume.loads.succeeded(began_s)
            self._count(done)
            self._jobs.end_all(done, Outcome.DONE, self._row_bytes)
        return [task for task in tasks if task not in done]

    def _wanted(self, task: Task) -> Wanted:
        before_ns = task.used_ns - int(self._settings.touch_interval_s * 1e9)
        return Wanted(task.key, task.block_id, self._jobs.row(task), task.used_ns, before_ns)

    def _count(self, tasks: Sequence[Task]) -> None:
        count = sum(not task.is_late() for task in tasks)
        if count:
            self._counters.add_all({"loaded": count, "loaded_bytes": count * self._row_bytes})

    def _read(self, lane: Lane, task: Task) -> tuple[Outcome, str]:
        """Read a block where it should be, else wherever it may be."""
        others = [n for n in self._order(task.block_id) if n != lane.volume.number]
        lanes = [lane, *(self._lanes[n] for n in others)]
        for at in lanes:
            volume = at.volume
            if at is not lane and at.why_not(loads=True) is not None:
                continue
            began_s = time.monotonic()
            try:
                shown_ns = volume.blocks.load(self._wanted(task))
            except BlockWrong as error:
                self._forget(task, volume)
                # What could not be moved is wrong until the next store.
                refused_s = self._settings.probe_interval_s if error.moved else math.inf
                self._refusals.refuse(task.block_id, refused_s)
                return Outcome.CORRUPT, f"{volume.path}: what stood there {error}"
            except OSError as error:
                if error.errno in _ABSENT:
                    self._index.remove(task.block_id, volume.number)
                    continue
                if error.errno not in _OURS:
                    volume.loads.failed(began_s, words(error))
                    self._refusals.refuse(task.block_id, self._settings.retry_most_s)
                return Outcome.FAILED, f"{volume.path}: {words(error)}"
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
        self._refusals.end(task.block_id)

    def _forget(self, task: Task, volume: Volume) -> None:
        self._index.remove(task.block_id, volume.number)
        self._probes.absent(task.block_id)
