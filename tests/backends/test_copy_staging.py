"""The staging buffer takes the shape of slots; being plain torch, it is held to that on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from copy_cases import BLOCK_DIM, Case, block_bytes, chunk_bytes, make_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.copy.fragments import map_blocks
from backends.copy.staging import StagingBuffer


@st.composite
def chunks(draw):
    case = Case(
        layout=draw(st.sampled_from(sorted(BLOCK_DIM))),
        layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(1, 9)),
        blocks_per_chunk=draw(st.integers(1, 3)),
        inner=draw(st.sampled_from([(1,), (3,), (2, 5), (4, 8)])),
        dtype=draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])),
        pad=draw(st.sampled_from([0, 1])),
    )
    places = list(draw(st.permutations(range(case.num_blocks))))
    places += [-1] * (-len(places) % case.blocks_per_chunk)
    skipped = draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    ids = np.where(skipped, -1, places).astype(np.int64)
    return case, ids.reshape(-1, case.blocks_per_chunk)


@settings(max_examples=150, deadline=None)
@given(drawn=chunks(), spare=st.integers(0, 2))
def test_gather_makes_what_a_store_writes_and_scatter_takes_it_back(drawn, spare):
    case, ids = drawn
    tensors = make_tensors(case, seed=3)
    blocks = map_blocks(tensors, case.block_dim)
    staging = StagingBuffer(tensors, blocks, case.blocks_per_chunk, len(ids) + spare)
    staging.chunks.fill_(0xEE)

    staging.gather(ids)

    chunk_size = case.blocks_per_chunk * blocks.block_bytes
    for place, chunk in enumerate(ids):
        expected = chunk_bytes(case, tensors, chunk, chunk_size)
        assert np.array_equal(staging.chunks[place].numpy(), expected)
    assert (staging.chunks[len(ids) :] == 0xEE).all()

    before = [block_bytes(case, tensors, block) for block in range(case.num_blocks)]
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0x55)
    staging.scatter(ids)
    for block, content in enumerate(before):
        expected = content if block in ids else np.full_like(content, 0x55)
        assert np.array_equal(block_bytes(case, tensors, block), expected)
