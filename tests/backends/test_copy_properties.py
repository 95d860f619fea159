"""Whatever the geometry and the places: bytes go where the model says, and come back the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from copy_cases import (
    BLOCK_DIM,
    Case,
    block_bytes,
    chunk_bytes,
    make_tensors,
    shared_region,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.copy import GroupCopier, available_kernels, kernels
from backends.copy.fragments import map_blocks

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.int64,
]


@dataclass(frozen=True)
class Plan:
    """A case, where its slots lie, and what is copied where."""

    case: Case
    order: list[int]
    num_rows: int
    slot_start: int
    slot_slack: int
    row_slack: int
    store_ids: NDArray[np.int64]
    store_rows: NDArray[np.int64]
    load_from: NDArray[np.int64]
    load_ids: NDArray[np.int64]
    threads: int
    seed: int


@st.composite
def cases(draw):
    return Case(
        layout=draw(st.sampled_from(sorted(BLOCK_DIM))),
        layers=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(1, 12)),
        blocks_per_chunk=draw(st.integers(1, 4)),
        inner=draw(st.sampled_from([(1,), (3,), (2, 5), (4, 1, 16), (7, 41), (2, 300)])),
        dtype=draw(st.sampled_from(DTYPES)),
        pad=draw(st.sampled_from([0, 0, 1, 5])),
    )


@st.composite
def plans(draw):
    case = draw(cases())
    num_rows = draw(st.integers(1, 6))
    ids = st.integers(-1, case.num_blocks - 1)
    chunk = st.lists(ids, min_size=case.blocks_per_chunk, max_size=case.blocks_per_chunk)
    rows = draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    stored = [draw(chunk) for _ in rows]
    loads = draw(st.integers(1, 4))
    spare = draw(st.permutations(range(case.num_blocks)))
    wanted = [
        spare.pop() if spare and draw(st.booleans()) else -1
        for _ in range(loads * case.blocks_per_chunk)
    ]
    tensors = 1 if case.layout == "blocks_first" else case.layers
    shape = (-1, case.blocks_per_chunk)
    return Plan(
        case=case,
        order=draw(st.permutations(range(tensors))),
        num_rows=num_rows,
        slot_start=64 * draw(st.integers(0, 3)),
        slot_slack=draw(st.integers(0, 100)),
        row_slack=draw(st.integers(0, 70)),
        store_ids=np.array(stored, np.int64).reshape(shape),
        store_rows=np.array(rows, np.int64),
        load_from=np.array([draw(st.integers(0, num_rows - 1)) for _ in range(loads)], np.int64),
        load_ids=np.array(wanted, np.int64).reshape(shape),
        threads=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("kernel", available_kernels())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plan=plans())
def test_store_and_load_do_to_every_byte_what_the_model_says(kernel, plan, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_BYTES_PER_THREAD", 1)
    case = plan.case
    made = make_tensors(case, plan.seed)
    tensors = [made[index] for index in plan.order]
    chunk_size = case.blocks_per_chunk * block_bytes(case, tensors, 0).size
    slot_bytes = chunk_size + plan.slot_slack
    region = shared_region(plan.num_rows, plan.slot_start + slot_bytes + plan.row_slack)
    slot = region[:, plan.slot_start : plan.slot_start + slot_bytes]
    expected = region.copy()
    for row, ids in zip(plan.store_rows.tolist(), plan.store_ids, strict=True):
        expected[row, plan.slot_start : plan.slot_start + slot_bytes] = chunk_bytes(
            case, tensors, ids, slot_bytes
        )
    copier = GroupCopier(
        tensors,
        block_dim=case.block_dim,
        slot=slot,
        blocks_per_chunk=case.blocks_per_chunk,
        threads=plan.threads,
        kernel=kernel,
    )

    copier.store(plan.store_ids, plan.store_rows)
    assert np.array_equal(region, expected)

    blocks = [block_bytes(case, tensors, block) for block in range(case.num_blocks)]
    for row, ids in zip(plan.load_from.tolist(), plan.load_ids.tolist(), strict=True):
        for place, block in enumerate(ids):
            if block >= 0:
                size = blocks[block].size
                blocks[block] = slot[row, place * size : (place + 1) * size].copy()
    padding = [_padding(t) for t in tensors]
    copier.load(plan.load_ids, plan.load_from)
    for block, content in enumerate(blocks):
        assert np.array_equal(block_bytes(case, tensors, block), content)
    assert np.array_equal(region, expected)
    for tensor, before in zip(tensors, padding, strict=True):
        assert np.array_equal(_padding(tensor), before)


@pytest.mark.parametrize("kernel", available_kernels())
@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000), data=st.data())
def test_store_then_load_anywhere_is_the_identity(kernel, case, seed, data):
    tensors = make_tensors(case, seed)
    stored = [block_bytes(case, tensors, block) for block in range(case.num_blocks)]
    chunks = -(-case.num_blocks // case.blocks_per_chunk)
    ids = np.full(chunks * case.blocks_per_chunk, -1, np.int64)
    ids[: case.num_blocks] = data.draw(st.permutations(range(case.num_blocks)))
    ids = ids.reshape(chunks, case.blocks_per_chunk)
    rows = np.array(data.draw(st.permutations(range(chunks))), np.int64)
    slot = shared_region(chunks, case.blocks_per_chunk * stored[0].size)
    copier = GroupCopier(
        tensors,
        block_dim=case.block_dim,
        slot=slot,
        blocks_per_chunk=case.blocks_per_chunk,
        kernel=kernel,
    )
    copier.store(ids, rows)
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0x55)
    copier.load(ids, rows)
    for block, content in enumerate(stored):
        assert np.array_equal(block_bytes(case, tensors, block), content)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_fragments_of_a_block_tile_its_place_in_the_slot(case):
    tensors = make_tensors(case, seed=0)
    blocks = map_blocks(tensors, case.block_dim)
    taken = np.zeros(blocks.block_bytes, np.int64)
    for fragment in blocks.fragments:
        end = fragment.slot_offset_bytes + fragment.nbytes
        assert end <= blocks.block_bytes
        taken[fragment.slot_offset_bytes : end] += 1
    assert (taken == 1).all()
    assert blocks.block_bytes == block_bytes(case, tensors, 0).size
    assert blocks.num_blocks == case.num_blocks


def _padding(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes between the tensor's blocks: those of its storage with its own taken out."""
    content = tensor.view(torch.uint8)
    kept = content.clone()
    content.zero_()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().copy()
    content.copy_(kept)
    return whole
