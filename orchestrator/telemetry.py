"""A leader's KV events, metrics and history: opened as the plan has it, closed when it is over.

What metrics show is made of the very numbers that the report is made of, see `replica_values`. A
leader has its own rank's copies at hand while it serves; those of the other ranks are known, and
shown, when serving has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from backends.stack.observer import NODE, PRIMARY, Observer
from backends.stack.stack import TierStack
from orchestrator.engine.stats import ReplicaStats, WorkerStats
from orchestrator.history import History
from orchestrator.plan import Plan
from orchestrator.samples import counts_of, levels_of

if TYPE_CHECKING:
    from backends.events.publisher import Publisher
    from backends.metrics.ages import Ages
    from backends.metrics.exporter import Exporter
    from backends.metrics.snapshot import ReplicaSnapshot

_TELL_S: Final = 1.0
_LIVE_S: Final = 1.0

Values = dict[str, Any]


def replica_values(
    plan: Plan,
    index: int,
    stats: ReplicaStats,
    stack: TierStack,
    workers: Sequence[Mapping[str, Any]],
) -> Values:
    """A replica's numbers, plain JSON types. Each of `workers` has at least `rank` and `stats`."""
    region = stack.region_report()
    return {
        "data_parallel_index": index,
        "engine_id": plan.replicas[index].engine_id,
        "stats": asdict(stats),
        "primary": region,
        "rows_used": region["rows_used"],
        "workers": list(workers),
        "lower_tiers": stack.report(),
    }


class Telemetry(Observer):
    """One replica's. Where events and metrics are off it loads nothing for them."""

    def __init__(self, plan: Plan, index: int) -> None:
        """Raises EventsError or MetricsError where a port cannot be bound."""
        self._plan = plan
        self._index = index
        self._publisher: Publisher | None = None
        self._exporter: Exporter | None = None
        self._ages: Ages | None = None
        self._look: Callable[[], Values] | None = None
        self._next_s = 0.0
        self._history = History()
        self._sample: Callable[[], tuple[dict[str, float], dict[str, float]]] | None = None
        self._began_s = 0.0
        self._told_s = 0.0
        self.observers: list[Observer] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        plan, replica = self._plan, self._plan.replicas[self._index]
        if replica.events_port:
            from backends.events.publisher import Publisher, PublisherSettings
            from backends.events.source import KvEvents

            settings = plan.settings.events
            self._publisher = Publisher(
                PublisherSettings(
                    port=replica.events_port,
                    replay_port=replica.events_replay_port or None,
                    host=settings.host,
                    topic=settings.topic,
                    queue_batches=settings.queue_batches,
                    replay_batches=settings.replay_batches,
                ),
                self._index,
            )
            self.observers.append(
                KvEvents(
                    self._publisher,
                    plan.groups,
                    plan.region.tokens_per_row,
                    rows=plan.region.rows,
                    int_hashes=settings.hashes == "int64",
                )
            )
        if replica.metrics_port:
            from backends.metrics.ages import Ages
            from backends.metrics.exporter import Exporter

            self._exporter = Exporter(replica.metrics_port, plan.settings.metrics.host)
            self._ages = Ages()
            self.observers += [self._ages, self]

    def watch(self, look: Callable[[], Values]) -> None:
        """Where the numbers come from while the replica serves: `look` makes `replica_values`."""
        self._look = look
        self.stepped()

    def record(self, stack: TierStack, stats: ReplicaStats, worker: WorkerStats) -> None:
        """What the history is made of; `worker` is the leader's own, the others' are not at hand.
        Begins it."""
        self._sample = lambda: (counts_of(stack, stats, worker), levels_of(stack))
        self._began_s = time.monotonic()
        self._history.add(0.0, *self._sample())

    def progress(self) -> Values:
        """Note where the replica stands, and what of it a live view shows besides the leader's own
        words: now and then, because it is written down each time."""
        now_s = time.monotonic()
        live = now_s - self._told_s >= _LIVE_S
        due = self._history.due(now_s - self._began_s)
        if self._sample is None or not (live or due):
            return {}
        counts, levels = self._sample()
        if due:
            self._history.add(now_s - self._began_s, counts, levels)
        if not live:
            return {}
        self._told_s = now_s
        return {"counts": counts, "levels": levels}

    def stepped(self) -> None:
        """Show new numbers, unless the last ones are recent."""
        now_s = time.monotonic()
        if self._look is not None and self._exporter is not None and now_s >= self._next_s:
            self._exporter.show(self._snapshot(self.complete(self._look()), ended=False))
            self._next_s = time.monotonic() + self._plan.settings.metrics.refresh_s

    def complete(self, values: Values) -> Values:
        """`values` with what only this knows. What comes of it goes into the report as well."""
        counts = {} if self._publisher is None else self._publisher.counts
        values["events"] = counts
        values["primary"]["oldest_s"] = None if self._ages is None else self._ages.oldest_s()
        return values

    def close_history(self) -> Values:
        """The history to its end, which is now, when everything has landed."""
        if self._sample is not None:
            self._history.add(time.monotonic() - self._began_s, *self._sample())
            self._sample = None
        return self._history.to_dict()

    def finish(self, values: Values) -> None:
        """The replica serves no more; these are its last values."""
        self._look = None
        if self._exporter is not None:
            self._exporter.show(self._snapshot(values, ended=True))

    def linger(self, tell: Callable[[], None]) -> None:
        """Leave the last values where they are until somebody has read them, or for the time that
        `metrics.linger_s` allows. `tell` is called now and then."""
        if self._exporter is None:
            return
        until_s = time.monotonic() + self._plan.settings.metrics.linger_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._exporter.wait_read(min(left_s, _TELL_S)):
                return
            tell()

    def close(self) -> None:
        """May be called again."""
        if self._publisher is not None:
            self._publisher.close()
        if self._exporter is not None:
            exporter, self._exporter = self._exporter, None
            exporter.close()

    def _snapshot(self, values: Values, *, ended: bool) -> ReplicaSnapshot:
        from backends.metrics.snapshot import ReplicaSnapshot, TierSnapshot, copied

        plan, stats = self._plan, values["stats"]
        copies = tuple(copied(worker["rank"], worker["stats"]) for worker in values["workers"])
        region = TierSnapshot.region(PRIMARY, values["primary"], plan.region.row_bytes, copies)
        lower = values["lower_tiers"]
        below = (TierSnapshot.below(name, tier) for name, tier in lower.items())
        tokens = {"device": stats["hit_tokens_device"], PRIMARY: stats["hit_tokens_shm"]}
        sources = [*lower, *([NODE] if values["primary"].get("node") is not None else [])]
        return ReplicaSnapshot(
            self._index,
            values["engine_id"],
            plan.model.name,
            taken_s=time.time(),
            ended=ended,
            tiers=(region, *below),
            hit_tokens=tokens | {name: stats["hit_tokens_below"].get(name, 0) for name in sources},
            engine={
                "requests": stats["requests"],
                "requests_rejected": stats["rejected"],
                "prompt_tokens": stats["prompt_tokens"],
                "output_tokens": stats["output_tokens"],
                "steps": stats["steps"],
            },
            events=values["events"],
        )
