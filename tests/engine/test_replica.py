"""Whole replicas in one process (threads, real regions, real copies): what the ranks agree on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.machine import host_identity
from backends.region.region import Region
from orchestrator.engine.replica import Leader, follow, step_codec
from orchestrator.engine.runner import WorkerRunner
from orchestrator.groups import ThreadGroups, find_identity
from orchestrator.plan import Plan
from orchestrator.regions import open_region
from orchestrator.workload.request import Request
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec
from tests.kit import plan_for
from tests.models.cache_model import ReplicaCacheModel

SMALL = (
    "profile=ci",
    "parallel=dp1_tp2",
    "workload.requests=60",
    "engine.device_cache_size=640KiB",
    "region.size=3MiB",
)

Tamper = Callable[[Region, Leader, int], None]


class Replica:
    """Runs replica 0 of a plan with a thread a rank; `tamper` is called before each request."""

    def __init__(self, plan: Plan, tamper: Tamper | None = None) -> None:
        self.plan = plan
        self.tamper = tamper
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
                self.leader = Leader(plan, runner, region, group, lambda _fields: None)
                self.leader.serve(self._stream(region))
            else:
                follow(runner, step_codec(plan), group)
            group.all_gather_json(None)
            if identity.leader:
                assert self.leader is not None
                self.leader.finish()
                self.headers = region.row_headers().copy()
                self.leader.close()
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


CASES = {
    "tp2": (),
    "blocks_first": ("engine.layout=blocks_first",),
    "uneven_pipeline": ("parallel.pipeline_parallel_size=3", "parallel.tensor_parallel_size=1"),
    "decode_context": (
        "parallel.tensor_parallel_size=4",
        "parallel.decode_context_parallel_size=2",
        "engine.tokens_per_block=8",
    ),
    "prefill_context": (
        "parallel.prefill_context_parallel_size=2",
        "parallel.tensor_parallel_size=1",
        "engine.tokens_per_block=8",
    ),
    "hash_smaller_than_block": ("engine.tokens_per_hash=4",),
    "one_chunk_a_step": ("engine.max_tokens_per_step=128",),
    "shm": ("region=shm", "region.blocks_per_chunk=8", "region.size=3MiB"),
    "fp8": ("model.dtype=float8_e4m3fn", "engine.device_cache_size=320KiB", "region.size=1600KiB"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_loaded_byte_is_right_and_hits_are_those_of_the_model(
    name: str, tmp_path: Path
) -> None:
    plan = plan_for(tmp_path, *SMALL, *CASES[name])
    replica = Replica(plan)
    checked, wrong = totals(replica)
    assert checked > 0
    assert wrong == 0
    context = plan.topology.pcp_size * plan.topology.dcp_size
    model = ReplicaCacheModel(
        plan.device_blocks,
        plan.region.rows,
        plan.cache.tokens_per_block * context,
        plan.cache.blocks_per_chunk,
        plan.cache.tokens_per_hash,
        len(plan.groups),
    )
    for request in replica.requests:
        model.process(request.prompt_tokens, request.output_tokens, request.hashes)
    expected = model.totals()
    assert replica.leader is not None
    assert replica.leader.stats.hit_tokens_device == expected.hit_tokens_device
    assert replica.leader.stats.hit_tokens_shm == expected.hit_tokens_region
    assert replica.leader.index.counters.evictions == expected.evicted_chunks
    assert expected.hit_tokens_region > 0
    assert expected.evicted_chunks > 0


def test_a_flipped_bit_in_one_ranks_slot_is_found_and_the_block_is_a_miss_for_all(
    tmp_path: Path,
) -> None:
    def flip(region: Region, _leader: Leader, request: int) -> None:
        if request == 30:
            region.slot_view(1)[:, 100] ^= 1

    replica = Replica(plan_for(tmp_path, *SMALL), flip)
    healthy = Replica(plan_for(tmp_path, *SMALL))
    _, wrong = totals(replica)
    assert wrong > 0
    assert replica.runners[0].stats.blocks_wrong == 0
    assert replica.leader is not None
    assert healthy.leader is not None
    assert replica.leader.index.counters.errors > 0
    assert replica.leader.stats.hit_tokens_shm < healthy.leader.stats.hit_tokens_shm
    assert replica.leader.stats.requests == healthy.leader.stats.requests


def test_a_row_whose_header_names_another_block_is_refused_before_it_is_copied(
    tmp_path: Path,
) -> None:
    def rename(region: Region, _leader: Leader, request: int) -> None:
        if request == 30:
            region.row_headers()[:, 24] ^= 1

    replica = Replica(plan_for(tmp_path, *SMALL), rename)
    assert totals(replica)[1] == 0
    assert replica.runners[0].stats.refused_rows > 0
    assert replica.leader is not None
    assert replica.leader.index.counters.errors > 0


def test_when_all_is_done_every_used_row_is_marked_complete(tmp_path: Path) -> None:
    replica = Replica(plan_for(tmp_path, *SMALL))
    assert replica.leader is not None
    assert replica.headers is not None
    states = replica.headers[:, 12:16].copy().view(np.uint32).ravel()
    used = {row for rows in replica.leader.index._rows.values() for row in rows}
    assert used
    assert all(states[row] == 2 for row in used)


@pytest.mark.parametrize(("mode", "least", "most"), [("off", 0, 0), ("sample", 0, 0.5)])
def test_verification_can_be_sampled_or_left_out(
    mode: str, least: float, most: float, tmp_path: Path
) -> None:
    checked_all, _ = totals(Replica(plan_for(tmp_path, *SMALL)))
    checked, wrong = totals(Replica(plan_for(tmp_path, *SMALL, f"engine.verify={mode}")))
    assert wrong == 0
    assert least * checked_all <= checked <= most * checked_all
