"""The same copier over tensors on a CUDA device. Every test needs an NVIDIA GPU."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from copy_cases import BLOCK_DIM, Case, block_bytes, chunk_bytes, make_tensors

from backends.copy import GroupCopier
from backends.copy import cuda as cuda_engine

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and CUDA torch"),
]


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def pinned(request):
    return request.param


@pytest.fixture
def memory(pinned):
    """16 MiB of shared memory, page-locked or not, with bytes that must not leak."""
    shared = np.frombuffer(mmap.mmap(-1, 16 << 20), np.uint8)
    shared[:] = 0xEE
    if not pinned:
        yield shared
        return
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(shared.ctypes.data, shared.nbytes, 0)) == 0
    yield shared
    torch.cuda.synchronize()
    assert int(runtime.cudaHostUnregister(shared.ctypes.data)) == 0


@pytest.mark.parametrize("layout", sorted(BLOCK_DIM))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_store_and_load_match_the_model(layout, dtype, memory, monkeypatch):
    monkeypatch.setattr(cuda_engine, "_STAGING_BYTES", 20_000)
    case = Case(layout, 3, num_blocks=40, blocks_per_chunk=3, inner=(4, 31), dtype=dtype)
    on_cpu = make_tensors(case, seed=1)
    on_gpu = [t.cuda() for t in on_cpu]
    slot_bytes = 3 * block_bytes(case, on_cpu, 0).size + 40
    slot = memory[: 20 * (slot_bytes + 64)].reshape(20, -1)[:, :slot_bytes]
    ids = np.random.default_rng(0).permutation(40)[:36].reshape(12, 3)
    ids[5, 1:] = ids[7, 0] = -1
    rows = np.random.default_rng(1).permutation(20)[:12]
    untouched = np.setdiff1d(np.arange(20), rows)
    with GroupCopier(on_gpu, block_dim=case.block_dim, slot=slot, blocks_per_chunk=3) as copier:
        stats = copier.store(ids, rows)
        assert (stats.bytes, stats.chunks) == (33 * copier.worker_bytes_per_block, 12)
        assert stats.seconds > 0
        for chunk, row in enumerate(rows.tolist()):
            expected = chunk_bytes(case, on_cpu, ids[chunk], slot_bytes)
            assert np.array_equal(slot[row], expected)
        assert (slot[untouched] == 0xEE).all()
        for tensor in on_gpu:
            tensor.view(torch.uint8).fill_(0x55)
        copier.load(ids, rows)
    back = [t.cpu() for t in on_gpu]
    for block in range(40):
        stored = block_bytes(case, on_cpu, block)
        expected = stored if block in ids else np.full_like(stored, 0x55)
        assert np.array_equal(block_bytes(case, back, block), expected)


def test_a_store_sees_what_the_compute_stream_wrote_before_it(memory):
    tensor = torch.zeros(8, 1 << 17, dtype=torch.uint8, device="cuda")
    slot = memory.reshape(8, -1)[:, : 1 << 17]
    copier = GroupCopier([tensor], block_dim=0, slot=slot, blocks_per_chunk=1)
    torch.cuda._sleep(200_000_000)
    tensor.fill_(7)
    handle = copier.submit_store(np.arange(8).reshape(8, 1), np.arange(8))
    handle.wait()
    assert handle.done()
    assert (slot == 7).all()


def test_the_compute_stream_runs_on_while_a_batch_is_under_way(memory):
    tensor = torch.zeros(8, 1 << 17, dtype=torch.uint8, device="cuda")
    slot = memory.reshape(8, -1)[:, : 1 << 17]
    copier = GroupCopier([tensor], block_dim=0, slot=slot, blocks_per_chunk=1)
    ids, rows = np.arange(8).reshape(8, 1), np.arange(8)
    copier.store(ids, rows)
    torch.cuda._sleep(2_000_000_000)
    handle = copier.submit_store(ids, rows)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        computed = torch.ones(16, device="cuda").sum()
    beside.synchronize()
    assert not handle.done()
    assert computed.item() == 16
    handle.wait()


def test_kernel_says_whether_the_slot_is_page_locked(memory, pinned):
    tensor = torch.zeros(2, 16, dtype=torch.uint8, device="cuda")
    slot = memory.reshape(2, -1)[:, :16]
    copier = GroupCopier([tensor], block_dim=0, slot=slot, blocks_per_chunk=1)
    assert copier.kernel == ("cuda-pinned" if pinned else "cuda-pageable")
