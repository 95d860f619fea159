"""One replica of a simulation: the engine's own scheduler over a real tier stack, without bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.tier.base import Tier
from orchestrator.engine.scheduler import Steps, open_scheduler
from orchestrator.engine.step import ChunkWork
from orchestrator.engine.tiers import make_stack
from orchestrator.plan import Plan
from orchestrator.simulate.clock import Clock
from orchestrator.simulate.copies import Copies
from orchestrator.simulate.medium import Medium
from orchestrator.simulate.tier import SimTier
from orchestrator.simulate.timing import Timing
from orchestrator.telemetry import replica_values
from orchestrator.workload.request import Request


class SimReplica:
    """Serves requests in lockstep: what a step has begun has ended before the next one."""

    def __init__(
        self, plan: Plan, index: int, media: dict[str, tuple[Medium, bool]], timing: Timing
    ) -> None:
        """`media` by name, nearest first, each with whether replicas are isolated in it."""
        self._clock = Clock()
        tiers: list[Tier] = [
            SimTier(
                name,
                medium,
                plan.region.row_bytes,
                self._clock,
                timing.tier(name),
                private=index if isolated else None,
            )
            for name, (medium, isolated) in media.items()
        ]
        self.stack = make_stack(plan, None, tiers, now=self._clock)
        prefill = plan.settings.engine.prefill_tokens_per_s
        if prefill is not None:
            self.stack.engine.add(plan.region.tokens_per_row, plan.region.tokens_per_row / prefill)
        self._scheduler = open_scheduler(plan, self.stack)
        self._scheduler.pause = self._clock.wait
        self._scheduler.monotonic = self._clock
        self._copies = Copies(plan, index, timing)
        self._plan = plan
        self._found_s: float | None = None
        self.index = index
        self.stats = self._scheduler.stats

    def serve(self, request: Request) -> tuple[int, float] | None:
        """Prompt tokens that were hit, and the time that their loads took; None if rejected."""
        stats = self.stats
        before, rejected, copied_s = stats.hit_tokens, stats.rejected, self._copies.loaded_s
        self._clock.at_least(request.arrival_s)
        began_s, self._found_s = self._clock.now_s, None
        self._run(self._scheduler.steps(request))
        if stats.rejected > rejected:
            return None
        found_s = self._clock.now_s if self._found_s is None else self._found_s
        return stats.hit_tokens - before, found_s - began_s + self._copies.loaded_s - copied_s

    def _run(self, steps: Steps) -> None:
        chunks = next(steps, None)
        while chunks is not None:
            agreed = self._execute(chunks)
            self.stats.steps += 1
            try:
                chunks = steps.send(agreed)
            except StopIteration:
                return

    def _execute(self, chunks: Sequence[ChunkWork]) -> int:
        """What the workers would do: how many of the loads they made good, which is all."""
        if chunks and self._found_s is None:
            # The first step with work in it: all that was waited for is there.
            self._found_s = self._clock.now_s
        return self._copies.step(chunks)

    def values(self) -> dict[str, Any]:
        """What a real replica's leader writes when it ends, as far as a report is made of it."""
        return replica_values(
            self._plan, self.index, self.stats, self.stack, self._copies.workers()
        )
