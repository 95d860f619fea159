"""Runs one replica's engine on one worker: the leader schedules and broadcasts, all execute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from backends.stack.stack import TierStack
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.stats import ReplicaStats
from orchestrator.engine.step import STOP, StepCodec
from orchestrator.groups import Group
from orchestrator.plan import Plan
from orchestrator.workload.request import Request

PROGRESS_INTERVAL_S = 0.2

Progress = Callable[[dict[str, Any]], None]


def step_codec(plan: Plan) -> StepCodec:
    """The broadcast array's shape, which every rank derives from the plan."""
    per_step = plan.settings.engine.max_tokens_per_step // plan.region.tokens_per_row
    return StepCodec(max(1, per_step), plan.cache.blocks_per_chunk, len(plan.groups))


def follow(runner: WorkerRunner, codec: StepCodec, group: Group) -> None:
    """What every rank but the leader does until the leader says stop."""
    message = codec.empty()
    while True:
        group.broadcast(message)
        chunks = codec.decode(message)
        if chunks is None:
            return
        runner.execute(chunks, group)


class Leader:
    """Rank 0: decides, tells, executes its own part."""

    def __init__(
        self,
        plan: Plan,
        runner: WorkerRunner,
        stack: TierStack,
        group: Group,
        progress: Progress,
    ) -> None:
        """`stack` is the replica's, and is closed by the caller."""
        topology = plan.topology
        self._codec = step_codec(plan)
        self.stack = stack
        self._scheduler = Scheduler(
            DeviceCache(plan.device_blocks),
            stack,
            plan.cache,
            cp_size=topology.pcp_size * topology.dcp_size,
            chunks_per_step=self._codec.chunks_max,
        )
        self._runner = runner
        self._group = group
        self._progress = progress
        self._told_s = 0.0

    @property
    def stats(self) -> ReplicaStats:
        return self._scheduler.stats

    def serve(self, requests: Iterator[Request]) -> None:
        """Serve requests in order, then tell all ranks to stop."""
        message = self._codec.empty()
        for request in requests:
            steps = self._scheduler.steps(request)
            chunks = next(steps, None)
            while chunks is not None:
                self._codec.encode(message, chunks)
                self._group.broadcast(message)
                agreed = self._runner.execute(chunks, self._group)
                self.stats.steps += 1
                try:
                    chunks = steps.send(agreed)
                except StopIteration:
                    break
            if time.monotonic() - self._told_s >= PROGRESS_INTERVAL_S:
                self.tell()
        message[0] = STOP
        self._group.broadcast(message)
        self.tell()

    def finish(self) -> None:
        """All ranks have passed a collective since the last step: its rows are complete."""
        self._scheduler.settle()

    def tell(self) -> None:
        """Tell of progress now."""
        self._told_s = time.monotonic()
        stats, worker = self.stats, self._runner.stats
        self._progress(
            {
                "requests": stats.requests,
                "rejected": stats.rejected,
                "prompt_tokens": stats.prompt_tokens,
                "hit_tokens": stats.hit_tokens,
                "copied_bytes": worker.stored_bytes + worker.loaded_bytes,
            }
        )
