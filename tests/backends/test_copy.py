"""One group's copier: where bytes go, what is refused, and what runs in the background."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from copy_cases import (
    Case,
    block_bytes,
    chunk_bytes,
    ids_of,
    make_tensors,
    shared_region,
    tensor_bytes,
)

import backends
from backends.copy import GroupCopier, available_kernels, kernels
from backends.errors import CopyError

CASE = Case("kv_inner", layers=2, num_blocks=6, blocks_per_chunk=3)
BLOCK_BYTES = 2 * 2 * 4 * 2 * 2


@pytest.fixture(params=available_kernels())
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def copier_of(case, tensors, slot, **options):
    return GroupCopier(
        tensors,
        block_dim=case.block_dim,
        slot=slot,
        blocks_per_chunk=case.blocks_per_chunk,
        **options,
    )


@pytest.mark.parametrize("layout", ["kv_inner", "kv_outer", "mla", "blocks_first"])
def test_block_j_stands_at_j_block_sizes_with_layers_and_planes_in_order(layout, kernel):
    case = Case(layout, layers=3, num_blocks=5, blocks_per_chunk=2)
    tensors = make_tensors(case, seed=1)
    slot = shared_region(4, 8192)[:, 4096:]
    copier = copier_of(case, tensors, slot, kernel=kernel)
    stats = copier.store(ids_of((4, 0), (2, 3)), np.array([3, 1]))
    size = copier.worker_bytes_per_block
    assert np.array_equal(slot[3, :size], block_bytes(case, tensors, 4))
    assert np.array_equal(slot[3, size : 2 * size], block_bytes(case, tensors, 0))
    assert np.array_equal(slot[1, :size], block_bytes(case, tensors, 2))
    assert (stats.bytes, stats.chunks) == (4 * size, 2)
    assert stats.seconds > 0


def test_planes_outside_blocks_give_k_then_v_of_each_layer(kernel):
    layers = [
        torch.tensor([[[1], [2]], [[3], [4]]], dtype=torch.uint8),
        torch.tensor([[[5], [6]], [[7], [8]]], dtype=torch.uint8),
    ]
    slot = shared_region(1, 64)
    copier = GroupCopier(layers, block_dim=1, slot=slot, blocks_per_chunk=2, kernel=kernel)
    copier.store(ids_of((1, 0)), np.array([0]))
    assert slot[0, :8].tolist() == [2, 4, 6, 8, 1, 3, 5, 7]


def test_store_of_a_partial_chunk_zeroes_the_rest_of_the_slot_and_nothing_else(kernel):
    tensors = make_tensors(CASE, seed=2)
    region = shared_region(3, 1024)
    slot = region[:, 256:768]
    copier_of(CASE, tensors, slot, kernel=kernel).store(ids_of((5, -1, -1)), np.array([1]))
    expected = np.full_like(region, 0xEE)
    expected[1, 256:768] = chunk_bytes(CASE, tensors, np.array([5]), 512)
    assert np.array_equal(region, expected)


def test_store_zeroes_skipped_blocks_wherever_they_stand(kernel):
    tensors = make_tensors(CASE, seed=3)
    slot = shared_region(2, 512)
    ids = ids_of((-1, 4, -1), (-1, -1, -1))
    copier_of(CASE, tensors, slot, kernel=kernel).store(ids, np.array([0, 1]))
    assert np.array_equal(slot[0], chunk_bytes(CASE, tensors, ids[0], 512))
    assert not slot[1].any()


def test_load_leaves_skipped_and_unnamed_blocks_alone(kernel):
    tensors = make_tensors(CASE, seed=4)
    stored = [t.clone() for t in tensors]
    slot = shared_region(1, 512)
    copier = copier_of(CASE, tensors, slot, kernel=kernel)
    copier.store(ids_of((0, 1, 2)), np.array([0]))
    for t in tensors:
        t.zero_()
    copier.load(ids_of((-1, 5, -1)), np.array([0]))
    for block in range(6):
        wanted = block_bytes(CASE, stored, 1) if block == 5 else np.zeros(BLOCK_BYTES, np.uint8)
        assert np.array_equal(block_bytes(CASE, tensors, block), wanted)


def test_one_row_may_be_loaded_into_several_blocks(kernel):
    tensors = make_tensors(CASE, seed=5)
    slot = shared_region(1, 512)
    copier = copier_of(CASE, tensors, slot, kernel=kernel)
    copier.store(ids_of((0, -1, -1)), np.array([0]))
    copier.load(ids_of((3, -1, -1), (4, -1, -1)), np.array([0, 0]))
    assert np.array_equal(block_bytes(CASE, tensors, 3), block_bytes(CASE, tensors, 0))
    assert np.array_equal(block_bytes(CASE, tensors, 4), block_bytes(CASE, tensors, 0))


def test_runs_of_adjacent_blocks_in_a_blocks_first_tensor_keep_their_places(kernel):
    case = Case("blocks_first", layers=2, num_blocks=9, blocks_per_chunk=4, inner=(64,))
    tensors = make_tensors(case, seed=6)
    slot = shared_region(3, 2048)
    ids = ids_of((2, 3, 4, 5), (6, 7, -1, 8), (8, 7, 0, 1))
    copier = copier_of(case, tensors, slot, kernel=kernel)
    copier.store(ids, np.array([0, 1, 2]))
    for row in range(3):
        assert np.array_equal(slot[row], chunk_bytes(case, tensors, ids[row], 2048))


def test_a_stage_without_layers_of_the_group_stores_zeroes_and_loads_nothing(kernel):
    slot = shared_region(2, 128)
    copier = GroupCopier([], block_dim=0, slot=slot, blocks_per_chunk=2, kernel=kernel)
    assert copier.worker_bytes_per_block == 0
    assert copier.store(ids_of((0, 7)), np.array([1])).bytes == 0
    assert copier.load(ids_of((0, 7)), np.array([0])).bytes == 0
    assert not slot[1].any()
    assert (slot[0] == 0xEE).all()


def test_an_empty_batch_moves_nothing(kernel):
    slot = shared_region(1, 512)
    copier = copier_of(CASE, make_tensors(CASE, seed=7), slot, kernel=kernel)
    stats = copier.store(np.empty((0, 3), np.int64), np.empty(0, np.int64))
    assert (stats.bytes, stats.chunks) == (0, 0)
    assert (slot == 0xEE).all()


def test_two_groups_share_rows_without_touching_each_other(kernel):
    other_case = Case("mla", layers=3, num_blocks=4, blocks_per_chunk=1, inner=(24,))
    first, second = make_tensors(CASE, seed=8), make_tensors(other_case, seed=9)
    slot = shared_region(2, 512)
    copier_of(CASE, first, slot, kernel=kernel).store(ids_of((0, 1, 2)), np.array([0]))
    copier_of(other_case, second, slot, kernel=kernel).store(ids_of((3,)), np.array([1]))
    assert np.array_equal(slot[0], chunk_bytes(CASE, first, np.array([0, 1, 2]), 512))
    assert np.array_equal(slot[1], chunk_bytes(other_case, second, np.array([3]), 512))


@pytest.mark.parametrize("chunks", [1, 5], ids=["fewer blocks than threads", "more"])
def test_several_threads_write_what_one_would(chunks, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_BYTES_PER_THREAD", 1)
    case = Case("kv_outer", layers=5, num_blocks=10, blocks_per_chunk=2, inner=(8, 100))
    tensors = make_tensors(case, seed=10)
    stored = [t.clone() for t in tensors]
    slot_bytes = 2 * 2 * 5 * 1600 + 64
    slot = shared_region(chunks, slot_bytes)
    ids = np.random.default_rng(0).permutation(10)[: chunks * 2].reshape(chunks, 2)
    rows = np.arange(chunks)[::-1]
    copier = copier_of(case, tensors, slot, kernel=kernel, threads=3)
    copier.store(ids, rows)
    for chunk, row in enumerate(rows.tolist()):
        assert np.array_equal(slot[row], chunk_bytes(case, tensors, ids[chunk], slot_bytes))
    for t in tensors:
        t.zero_()
    copier.load(ids, rows)
    for block in ids.ravel().tolist():
        assert np.array_equal(block_bytes(case, tensors, block), block_bytes(case, stored, block))


GOOD_IDS, GOOD_ROWS = ids_of((0, 1, 2), (3, 4, 5)), np.array([0, 1])


@pytest.mark.parametrize(
    ("verb", "ids", "rows", "message"),
    [
        ("store", GOOD_IDS, np.array([1, 1]), "row 1 is stored to more than once"),
        ("load", ids_of((0, 1, 2), (3, 4, 1)), GOOD_ROWS, "block id 1 is loaded into more than"),
        ("store", ids_of((0, 1, 2), (3, 4, 6)), GOOD_ROWS, "block id is 6, expected"),
        ("load", ids_of((0, 1, 2), (3, 4, -2)), GOOD_ROWS, "block id is -2, expected"),
        ("store", GOOD_IDS, np.array([0, 4]), "row is 4, expected 0 <= row < 4"),
        ("load", GOOD_IDS, np.array([0, -1]), "row is -1, expected"),
        ("store", GOOD_IDS.astype(np.int32), GOOD_ROWS, "block_ids is int32, expected"),
        ("store", GOOD_IDS, GOOD_ROWS.astype(np.uint64), "rows is uint64, expected"),
        ("store", GOOD_IDS.tolist(), GOOD_ROWS, "block_ids is list, expected"),
        ("store", GOOD_IDS[:, :2], GOOD_ROWS, r"block_ids has shape \(2, 2\)"),
        ("store", GOOD_IDS, GOOD_ROWS[:1], r"rows \(1,\)"),
        ("store", GOOD_IDS, GOOD_ROWS.reshape(2, 1), r"rows \(2, 1\)"),
    ],
)
def test_a_wrong_batch_is_refused_before_a_byte_is_written(verb, ids, rows, message):
    tensors = make_tensors(CASE, seed=11)
    before = [tensor_bytes(t) for t in tensors]
    slot = shared_region(4, 512)
    copier = copier_of(CASE, tensors, slot)
    for call in (getattr(copier, verb), getattr(copier, f"submit_{verb}")):
        with pytest.raises(CopyError, match=message):
            call(ids, rows)
    copier.close()
    assert (slot == 0xEE).all()
    assert all(np.array_equal(tensor_bytes(t), b) for t, b in zip(tensors, before, strict=True))


WHOLE = torch.zeros(4, 2, 8, dtype=torch.int16)


@pytest.mark.parametrize(
    ("tensors", "block_dim", "message"),
    [
        ([WHOLE.transpose(1, 2)], 0, "not contiguous"),
        ([WHOLE[:, :, ::2]], 0, "not contiguous"),
        ([WHOLE, torch.zeros(5, 2, 8)], 0, "tensor 1 has 5 blocks"),
        ([WHOLE], 3, "expected at least one block in dimension 3"),
        ([WHOLE], -1, "expected at least one block in dimension -1"),
        ([torch.zeros(0, 2, 8)], 0, "expected at least one block"),
        ([torch.zeros(4, 0)], 0, "no empty dimension"),
        ([WHOLE, WHOLE], 0, "overlap"),
        ([WHOLE[:, 0], WHOLE], 0, "overlap"),
        ([torch.zeros(1, 8).expand(4, 8)], 0, "overlap"),
        ([torch.zeros(1, 4, 8).expand(2, 4, 8)], 1, "overlap"),
        ([torch.zeros(40).as_strided((4, 8), (6, 1))], 0, "overlap"),
        ([torch.zeros(4, 8, device="meta")], 0, "on meta"),
        ([torch.eye(4).to_sparse()], 0, "sparse"),
    ],
)
def test_tensors_that_cannot_be_described_as_fragments_are_refused(tensors, block_dim, message):
    slot = shared_region(1, 4096)
    with pytest.raises(CopyError, match=message):
        GroupCopier(tensors, block_dim=block_dim, slot=slot, blocks_per_chunk=1)


def test_single_blocks_that_overlap_are_refused_and_those_that_touch_are_not():
    memory = torch.zeros(24, dtype=torch.uint8)
    slot = shared_region(1, 64)
    touching = [memory[:8].view(1, 8), memory[8:16].view(1, 8)]
    GroupCopier(touching, block_dim=0, slot=slot, blocks_per_chunk=1)
    overlapping = [memory[:8].view(1, 8), memory[7:15].view(1, 8)]
    with pytest.raises(CopyError, match="overlap"):
        GroupCopier(overlapping, block_dim=0, slot=slot, blocks_per_chunk=1)


def test_layers_sliced_from_one_blocks_first_tensor_interleave(kernel):
    whole = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 40), np.uint8))
    slot = shared_region(1, 128)
    layers = [whole[:, 2], whole[:, 0]]
    copier = GroupCopier(layers, block_dim=0, slot=slot, blocks_per_chunk=1, kernel=kernel)
    copier.store(ids_of((3,)), np.array([0]))
    assert np.array_equal(slot[0, :80], np.concatenate([whole[3, 2], whole[3, 0]]))


def read_only(slot):
    slot.flags.writeable = False
    return slot


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (np.zeros((2, 512), np.int8), "int8 array"),
        (np.zeros(512, np.uint8), r"shape \(512,\)"),
        (np.zeros((2, 1024), np.uint8)[:, ::2], "contiguous"),
        (np.zeros((512, 2), np.uint8).T, "contiguous"),
        (read_only(np.zeros((2, 512), np.uint8)), "read-only"),
        (np.zeros((2, 191), np.uint8), "takes 192 bytes of a slot of 191"),
    ],
)
def test_a_slot_of_another_shape_is_refused(slot, message):
    with pytest.raises(CopyError, match=message):
        copier_of(CASE, make_tensors(CASE, seed=12), slot)


@pytest.mark.parametrize("option", [{"blocks_per_chunk": 0}, {"threads": 0}])
def test_less_than_one_thread_or_block_is_refused(option):
    options = {"blocks_per_chunk": 3, "threads": 1, **option}
    with pytest.raises(CopyError, match="at least 1"):
        GroupCopier([WHOLE], block_dim=0, slot=shared_region(1, 512), **options)


def test_a_kernel_that_is_not_here_is_refused_with_those_that_are():
    with pytest.raises(CopyError, match="'numpy'"):
        copier_of(CASE, make_tensors(CASE, 13), shared_region(1, 512), kernel="c-none")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: the extension is not built")
def test_a_machine_with_a_compiler_has_the_compiled_kernels():
    assert "c-portable" in available_kernels(), "python setup.py build_ext --inplace builds them"


def test_auto_takes_the_best_kernel_and_says_which():
    copier = copier_of(CASE, make_tensors(CASE, 14), shared_region(1, 512))
    assert copier.kernel == available_kernels()[0]


def test_without_the_compiled_extension_copies_work_and_say_numpy(tmp_path: Path):
    source = Path(backends.__file__).parent
    shutil.copytree(source, tmp_path / "backends", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    program = (
        "import numpy as np, torch; from backends.copy import GroupCopier, available_kernels\n"
        "slot = np.ones((2, 16), np.uint8)\n"
        "c = GroupCopier([torch.arange(24, dtype=torch.uint8).view(3, 8)], block_dim=0, slot=slot,"
        " blocks_per_chunk=1)\n"
        "c.store(np.array([[2]]), np.array([1]))\n"
        "print(c.kernel, available_kernels(), slot.tolist()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    expected = [*range(16, 24), *[0] * 8]
    assert done.stdout.strip() == f"numpy ('numpy',) {expected}"


def test_submitted_batches_keep_their_ids_and_run_in_order(kernel):
    tensors = make_tensors(CASE, seed=15)
    stored = [t.clone() for t in tensors]
    slot = shared_region(2, 512)
    copier = copier_of(CASE, tensors, slot, kernel=kernel)
    ids, rows = ids_of((0, 1, 2)), np.array([0])
    handles = [copier.submit_store(ids, rows)]
    ids[:], rows[:] = (5, 4, 3), 0
    handles.append(copier.submit_load(ids, rows))
    rows[:] = 1
    handles.append(copier.submit_store(ids, rows))
    ids[:] = -1
    assert [handle.wait().bytes for handle in handles] == [3 * BLOCK_BYTES] * 3
    assert all(handle.done() for handle in handles)
    assert handles[0].wait() == handles[0].wait()
    for row in (0, 1):
        assert np.array_equal(slot[row], chunk_bytes(CASE, stored, np.array([0, 1, 2]), 512))


def test_a_blocking_copy_waits_its_turn_behind_submitted_ones(kernel):
    case = Case("blocks_first", layers=1, num_blocks=64, blocks_per_chunk=1, inner=(1 << 16,))
    tensors = make_tensors(case, seed=16)
    slot = shared_region(64, 1 << 17)
    everything, rows = np.arange(64).reshape(64, 1), np.arange(64)
    copier = copier_of(case, tensors, slot, kernel=kernel)
    copier.submit_store(everything, rows)
    copier.load(everything[::-1], rows)
    assert np.array_equal(tensor_bytes(tensors[0][0]), slot[63])
    assert not (slot[63] == 0xEE).all()


def test_the_caller_runs_python_while_a_submitted_batch_is_copied(kernel):
    if kernel == "numpy":
        pytest.skip("numpy releases the GIL fragment by fragment, not for a whole batch")
    case = Case("blocks_first", layers=1, num_blocks=64, blocks_per_chunk=1, inner=(1 << 18,))
    slot = shared_region(64, 1 << 19)
    copier = copier_of(case, make_tensors(case, seed=17), slot, kernel=kernel)
    ids, rows = np.arange(64).reshape(64, 1), np.arange(64)
    # With switches forbidden the copying thread runs on until it lets go of the GIL by itself: if
    # it kept it, no attempt could ever see a batch under way.
    switch_interval_s = sys.getswitchinterval()
    event = threading.Event()
    sys.setswitchinterval(1000)
    try:
        for _ in range(50):
            handle = copier.submit_store(ids, rows)
            event.wait(1e-4)
            seen_under_way = not handle.done()
            handle.wait()
            if seen_under_way:
                break
    finally:
        sys.setswitchinterval(switch_interval_s)
    assert seen_under_way


def test_close_waits_for_what_was_submitted_and_ends_the_copier(kernel):
    tensors = make_tensors(CASE, seed=18)
    slot = shared_region(1, 512)
    with copier_of(CASE, tensors, slot, kernel=kernel) as copier:
        handle = copier.submit_store(ids_of((0, 1, 2)), np.array([0]))
    assert handle.done()
    assert np.array_equal(slot[0], chunk_bytes(CASE, tensors, np.array([0, 1, 2]), 512))
    copier.close()
    with pytest.raises(CopyError, match="closed"):
        copier.store(ids_of((0, 1, 2)), np.array([0]))


def test_a_closed_copier_holds_no_part_of_the_region():
    memory = mmap.mmap(-1, 4096)
    slot = np.frombuffer(memory, np.uint8).reshape(8, 512)
    copier = copier_of(CASE, make_tensors(CASE, seed=19), slot)
    copier.submit_store(ids_of((0, 1, 2)), np.array([0])).wait()
    copier.close()
    del slot
    memory.close()
