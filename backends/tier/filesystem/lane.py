"""One path with all that works on it: its threads, its turn-taking, its eviction, its keeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from backends.tier.filesystem.blockfiles import Unpublished
from backends.tier.filesystem.commits import GroupCommit
from backends.tier.filesystem.evict import Evictor
from backends.tier.filesystem.keeper import Keeper
from backends.tier.filesystem.prober import Prober
from backends.tier.filesystem.volume import Volume
from backends.tier.jobs import Task
from backends.tier.pool import Pool
from backends.tier.turns import Turns


@dataclass(slots=True)
class Lane:
    """Parts of one path's work, by what they do."""

    volume: Volume
    evictor: Evictor
    pool: Pool
    turns: Turns
    prober: Prober
    keeper: Keeper
    commits: GroupCommit[tuple[Task, Unpublished]]
    high_bytes: int
    stuck_s: float

    def why_not(self, *, loads: bool) -> str | None:
        """Why nothing can be stored, or loaded, here now. Waits for nothing."""
        volume = self.volume
        breaker = volume.loads if loads else volume.stores
        if not breaker.closed():
            return f"{volume.path}: {breaker.reason}; tried again in {breaker.remaining_s():.1f} s"
        if not (volume.place.is_readable if loads else volume.is_open):
            return f"{volume.path}: not open: {volume.stores.reason}"
        busy_s = self.pool.busy_for_s()
        if busy_s > self.stuck_s:
            return f"{volume.path}: a call has not come back for {busy_s:.1f} s"
        return None

    def load(self, tasks: Iterable[Task]) -> None:
        self.pool.add(tasks, loads=True)

    def store(self, tasks: Iterable[Task]) -> None:
        self.turns.add(tasks)

    def stop(self, end_s: float) -> bool:
        """End all threads; False if one has not ended at `end_s`, on time.monotonic's clock."""
        parts: list[Callable[[float], bool]] = []
        for part in (self.turns, self.prober, self.keeper, self.pool):
            part.stop()
            parts.append(part.join)
        ended = [join(max(end_s, time.monotonic())) for join in parts]
        return all(ended)
