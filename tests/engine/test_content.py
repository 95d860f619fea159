"""Block content: every coordinate decides the bytes, and every rank makes its own slice of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.config import CacheConfig, KvGroup, ModelConfig, ParallelConfig
from backends.layout import WorkerGroup, cp_tokens, worker_groups
from orchestrator.engine.content import BlockContent

MODEL = ModelConfig("m", "main", "bfloat16", 4)
GROUP = KvGroup("full", "full", (0, 1, 2, 3), kv_heads=4, head_size=8, planes=2)


def parallel(rank: int, tp: int, pp: int, dcp: int = 1) -> ParallelConfig:
    return ParallelConfig(
        rank=rank,
        world_size=tp * pp,
        tp_size=tp,
        pp_size=pp,
        pcp_size=1,
        dcp_size=dcp,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=0,
        data_parallel_size_local=1,
        node_rank=0,
        nnodes=1,
        local_rank=rank,
        local_world_size=tp * pp,
    )


def slice_of(config: ParallelConfig, tokens: int) -> tuple[WorkerGroup, BlockContent]:
    cache = CacheConfig(tokens_per_block=tokens, tokens_per_hash=tokens, blocks_per_chunk=1)
    (group,) = worker_groups((GROUP,), MODEL, cache, config)
    positions = cp_tokens(tokens, config.cp_size, config.cp_rank)
    return group, BlockContent(group, positions, torch.device("cpu"))


HASHES = np.array([1, -5, 2**62], dtype=np.int64)


def test_no_two_words_of_different_places_or_blocks_are_equal() -> None:
    group, content = slice_of(parallel(0, 1, 1), 4)
    words = torch.cat([content.words(layer, HASHES).flatten() for layer in range(4)])
    assert words.numel() == 3 * group.block_bytes // 8
    assert len(torch.unique(words)) == words.numel()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_ranks_bytes_are_its_slice_of_the_whole_block(tp: int, pp: int) -> None:
    _, whole = slice_of(parallel(0, 1, 1), 4)
    for rank in range(tp * pp):
        group, part = slice_of(parallel(rank, tp, pp), 4)
        heads = list(group.heads)
        for local, layer in enumerate(group.layers):
            expected = whole.words(layer, HASHES)[:, :, :, heads]
            assert torch.equal(part.words(local, HASHES), expected)


def test_context_parallel_ranks_hold_the_tokens_between_them() -> None:
    _, whole = slice_of(parallel(0, 8, 1), 4)
    full = whole.words(0, HASHES)
    found = [slice_of(parallel(rank, 8, 1, dcp=2), 2)[1].words(0, HASHES) for rank in (0, 1)]
    for token in range(4):
        assert torch.equal(found[token % 2][:, :, token // 2], full[:, :, token])
