"""Runs one replica's engine on one worker: the leader schedules and broadcasts, all execute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from backends.block import COMPLETE, WRITING, BlockKey, set_state, write_header
from backends.primary import PrimaryIndex
from backends.region.region import Region
from backends.stack import Chunk, TierStack
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.stats import ReplicaStats
from orchestrator.engine.step import STOP, ChunkWork, StepCodec
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
    """Rank 0: decides, tells, executes its own part, keeps the row headers."""

    def __init__(
        self,
        plan: Plan,
        runner: WorkerRunner,
        region: Region,
        group: Group,
        progress: Progress,
        below: TierStack | None = None,
    ) -> None:
        """`below` are the tiers under the region, if there are any; the caller closes them."""
        topology = plan.topology
        self._codec = step_codec(plan)
        self.below = below
        held = () if below is None else below.held_rows
        self._index = PrimaryIndex(plan.region.rows, len(plan.groups), held)
        self._scheduler = Scheduler(
            DeviceCache(plan.device_blocks),
            self._index,
            plan.cache,
            cp_size=topology.pcp_size * topology.dcp_size,
            groups=len(plan.groups),
            chunks_per_step=self._codec.chunks_max,
            below=below,
        )
        self._fingerprint = bytes.fromhex(plan.fingerprint)
        # What each worker of this node keeps of a chunk, by group.
        self._slot_lengths = [
            [
                worker.worker_bytes_per_block[group] * plan.cache.blocks_per_chunk
                for worker in plan.replicas[0].workers[: topology.local_world_size]
            ]
            for group in range(len(plan.groups))
        ]
        self._headers = region.row_headers()
        self._runner = runner
        self._group = group
        self._progress = progress
        self._told_s = 0.0
        self._writing: list[Chunk] = []

    @property
    def index(self) -> PrimaryIndex:
        return self._index

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
                written, self._writing = self._writing, self._announce(chunks)
                self._codec.encode(message, chunks)
                self._group.broadcast(message)
                agreed = self._runner.execute(chunks, self._group)
                self.stats.steps += 1
                # Every rank was in this step's collective, so it had ended the step before.
                self._commit(written)
                try:
                    chunks = steps.send(agreed)
                except StopIteration:
                    break
            self._tell()
        message[0] = STOP
        self._group.broadcast(message)
        self._tell(now=True)

    def close(self) -> None:
        self._headers = None  # type: ignore[assignment]  # lets the region unmap

    def finish(self) -> None:
        """All ranks have passed a collective since the last step: its rows are complete."""
        written, self._writing = self._writing, []
        self._commit(written)

    def _announce(self, chunks: list[ChunkWork]) -> list[Chunk]:
        """Name the rows that a step writes, before any rank is told of them; what is written."""
        now_ns = time.time_ns()
        writing = [Chunk(chunk.key, chunk.rows) for chunk in chunks if chunk.store]
        for chunk in writing:
            for group, row in enumerate(chunk.rows):
                write_header(
                    self._headers[row],
                    BlockKey(chunk.key, group),
                    fingerprint=self._fingerprint,
                    slot_lengths=self._slot_lengths[group],
                    created_ns=now_ns,
                    state=WRITING,
                )
        return writing

    def _commit(self, written: Iterable[Chunk]) -> None:
        """Every rank has written these chunks, but some may have been evicted since."""
        there = [chunk for chunk in written if self._index.rows_of(chunk.key) == chunk.rows]
        for chunk in there:
            for row in chunk.rows:
                set_state(self._headers[row], COMPLETE)
        if self.below is not None:
            self.below.store(there)
            self.below.step()

    def _tell(self, *, now: bool = False) -> None:
        time_s = time.monotonic()
        if not now and time_s - self._told_s < PROGRESS_INTERVAL_S:
            return
        self._told_s = time_s
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
