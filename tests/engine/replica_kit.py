"""A whole replica in one process: a thread a rank, a real region, real copies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from backends.machine import host_identity
from backends.region.region import Region
from backends.stack.settings import StackSettings
from backends.stack.stack import TierStack
from backends.tier.base import Tier, TierContext
from orchestrator.engine.replica import Leader, follow, step_codec
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.tiers import make_stack, tier_context
from orchestrator.groups import ThreadGroups, find_identity
from orchestrator.plan import Plan
from orchestrator.regions import open_region
from orchestrator.workload.request import Request
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec

SMALL = (
    "profile=ci",
    "parallel=dp1_tp2",
    "workload.requests=60",
    "engine.device_cache_size=640KiB",
    "region.size=3MiB",
)

Tamper = Callable[[Region, Leader, int], None]
OpenTiers = Callable[[TierContext], Sequence[Tier]]


class Replica:
    """Runs replica 0 of a plan with a thread a rank; `tamper` is called before each request."""

    def __init__(
        self,
        plan: Plan,
        tamper: Tamper | None = None,
        below: OpenTiers | None = None,
        stack_settings: StackSettings | None = None,
    ) -> None:
        self.plan = plan
        self.tamper = tamper
        self.below = below
        self.stack: TierStack | None = None
        self.stack_settings = stack_settings
        self.runners: dict[int, WorkerRunner] = {}
        self.leader: Leader | None = None
        self.errors: list[BaseException] = []
        self.requests: list[Request] = []
        self.headers: np.ndarray[Any, Any] | None = None
        groups = ThreadGroups(plan.topology.world_size, timeout_s=60)
        threads = [
            threading.Thread(target=self._work, args=(groups, rank))
            for rank in range(plan.topology.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _work(self, groups: ThreadGroups, rank: int) -> None:
        try:
            self._serve(groups, rank)
        except BaseException as error:
            self.errors.append(error)
            groups.abort()

    def _serve(self, groups: ThreadGroups, rank: int) -> None:
        plan, group, host = self.plan, groups.member(rank), host_identity()
        identity = find_identity(group, host)
        with contextlib.closing(open_region(group, identity, host, plan.region_spec(0))) as region:
            runner = WorkerRunner(
                plan.offload_config(0, rank),
                region,
                torch.device("cpu"),
                device_blocks=plan.device_blocks,
                verify=plan.settings.engine.verify,
                copy_threads=1,
                copy_kernel="auto",
            )
            self.runners[rank] = runner
            if identity.leader:
                tiers = [] if self.below is None else self.below(tier_context(plan, 0, region))
                self.stack = make_stack(plan, region, tiers, self.stack_settings)
                self.leader = Leader(plan, runner, self.stack, group, lambda _fields: None)
                self.leader.serve(self._stream(region))
            else:
                follow(runner, step_codec(plan), group)
            group.all_gather_json(None)
            if identity.leader:
                assert self.leader is not None
                assert self.stack is not None
                self.leader.finish()
                assert self.stack.drain(30)
                self.headers = region.row_headers().copy()
                self.stack.close()
            runner.close()

    def _stream(self, region: Region) -> Iterator[Request]:
        spec = workload_spec(self.plan.settings.workload, self.plan.cache)
        for request in stream_for_replica(spec, 1, 0):
            assert self.leader is not None
            if self.tamper is not None:
                self.tamper(region, self.leader, len(self.requests))
            self.requests.append(request)
            yield request


def totals(replica: Replica) -> tuple[int, int]:
    stats = [runner.stats for runner in replica.runners.values()]
    return sum(s.blocks_checked for s in stats), sum(s.blocks_wrong for s in stats)
