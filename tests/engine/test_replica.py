"""What the ranks of a replica agree on, and that hits and bytes are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.region.region import Region
from orchestrator.engine.replica import Leader
from tests.engine.replica_kit import SMALL, Replica, totals
from tests.kit import plan_for
from tests.models.cache_model import ReplicaCacheModel

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
        plan.settings.tiers.stack.shm.eviction,
    )
    for request in replica.requests:
        model.process(
            request.prompt_tokens, request.output_tokens, request.hashes, request.arrival_s
        )
    expected = model.totals()
    assert replica.leader is not None
    assert replica.leader.stats.hit_tokens_device == expected.hit_tokens_device
    assert replica.leader.stats.hit_tokens_shm == expected.hit_tokens_region
    assert replica.leader.stack.counters.evictions == expected.evicted_chunks
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
    assert replica.leader.stack.counters.errors > 0
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
    assert replica.leader.stack.counters.errors > 0


def test_when_all_is_done_every_used_row_is_marked_complete(tmp_path: Path) -> None:
    replica = Replica(plan_for(tmp_path, *SMALL))
    assert replica.leader is not None
    assert replica.headers is not None
    states = replica.headers[:, 12:16].copy().view(np.uint32).ravel()
    index = replica.leader.stack.index
    used = set(index.rows_of(list(index.ready_keys()), 0))
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
