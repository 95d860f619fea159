"""Runs one replica's engine on one worker: the leader schedules and broadcasts, all execute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from backends.stack.stack import TierStack
from orchestrator.engine.lockstep import Turn
from orchestrator.engine.paging import Paging
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.scheduler import REST_TIMEOUT_S, chunks_per_step, open_scheduler
from orchestrator.engine.stats import ReplicaStats
from orchestrator.engine.step import STOP, ChunkWork, Int64Array, StepCodec
from orchestrator.groups import Group
from orchestrator.plan import Plan
from orchestrator.workload.request import Request

PROGRESS_INTERVAL_S = 0.2
BEAT_S = 2.0

Progress = Callable[[dict[str, Any]], None]


def step_codec(plan: Plan) -> StepCodec:
    """The broadcast array's shape, which every rank derives from the plan."""
    paging = Paging.of(plan.groups, plan.cache, plan.topology)
    return StepCodec(
        chunks_per_step(plan),
        paging.blocks_per_chunk,
        len(paging.columns),
        paging.words_per_block,
    )


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
        turn: Turn | None = None,
    ) -> None:
        """`stack` is the replica's, and is closed by the caller, as is `turn`: when each request is
        to be served, None where no other replica has to be waited for."""
        self._codec = step_codec(plan)
        self.stack = stack
        self._scheduler = open_scheduler(plan, stack)
        self._runner = runner
        self._group = group
        self._progress = progress
        self._told_s = 0.0
        self._turn = turn
        self._lockstep = plan.settings.engine.lockstep
        self._tokens_per_s = plan.settings.engine.prefill_tokens_per_s

    @property
    def stats(self) -> ReplicaStats:
        return self._scheduler.stats

    def serve(self, requests: Iterator[Request]) -> None:
        """Serve requests in order, then tell all ranks to stop."""
        message = self._codec.empty()
        if self._lockstep:
            self.stack.settle(REST_TIMEOUT_S)
        for request in requests:
            if self._turn is not None:
                self._await_turn(self._turn, request.index, message)
            steps = self._scheduler.steps(request)
            chunks = next(steps, None)
            while chunks is not None:
                self._codec.encode(message, chunks)
                self._group.broadcast(message)
                agreed = self._execute(chunks)
                self.stats.steps += 1
                try:
                    chunks = steps.send(agreed)
                except StopIteration:
                    break
            if self._turn is not None:
                self._turn.ended(request.index)
            if time.monotonic() - self._told_s >= PROGRESS_INTERVAL_S:
                self.tell()
        message[0] = STOP
        self._group.broadcast(message)
        self.tell()

    def _execute(self, chunks: list[ChunkWork]) -> int:
        """This rank's part of a step, and what it tells of the engine's speed."""
        worker = self._runner.stats
        tokens, seconds = worker.computed_tokens, worker.computed_s
        agreed = self._runner.execute(chunks, self._group)
        tokens, seconds = worker.computed_tokens - tokens, worker.computed_s - seconds
        if tokens:
            given = self._tokens_per_s
            self.stack.engine.add(tokens, seconds if given is None else tokens / given)
        return agreed

    def _await_turn(self, turn: Turn, index: int, message: Int64Array) -> None:
        while not turn.wait(index, BEAT_S):
            # An empty step: the other ranks must not wait in a collective for too long.
            self._codec.encode(message, [])
            self._group.broadcast(message)
            self._runner.execute([], self._group)
            self.tell()
        if turn.others_acted:
            self.stack.settle(REST_TIMEOUT_S)

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
