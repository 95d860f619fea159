"""Views and their lifetime, prefault, huge pages, NUMA and page-locking, on real memory."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from region_kit import NOBODY, make_spec, run_in_child

from backends import machine
from backends.errors import RegionError
from backends.region import hugepages, memory, numa
from backends.region.pin import pin_rows
from backends.region.prefault import page_ranges
from backends.region.region import Region

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mlock.argtypes = LIBC.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mappings_of(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_views_have_the_promised_shapes_and_look_at_the_same_bytes() -> None:
    spec = make_spec(rows=5, slot_bytes=192, local_world_size=3)
    with Region.create(spec) as region:
        for local_rank in range(3):
            slots = region.slot_view(local_rank)
            assert (slots.shape, slots.dtype) == ((5, 192), np.uint8)
            assert slots.strides == (spec.row_bytes, 1)
            slots[:] = local_rank + 1
        region.row_headers()[:] = 9
        assert region.row_headers().shape == (5, 4096)
        row = region.row_view(4)
        assert row.shape == (spec.row_bytes,)
        assert row.ctypes.data % 4096 == 0
        expected = np.repeat(np.uint8([9, 1, 2, 3, 0]), [4096, 192, 192, 192, 4096 - 576])
        assert np.array_equal(row, expected)


def test_fresh_memory_is_zero_to_the_last_byte_of_padding() -> None:
    with Region.create(make_spec(slot_bytes=64, local_world_size=1)) as region:
        for row in range(8):
            assert region.row_view(row).max() == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda region: region.row_view(8),
        lambda region: region.row_view(-1),
        lambda region: region.slot_view(2),
        lambda region: region.slot_view(-1),
    ],
)
def test_a_view_outside_the_region_is_refused(look: Callable[[Region], Any]) -> None:
    with (
        Region.create(make_spec()) as region,
        pytest.raises(RegionError, match="expected 0 <="),
    ):
        look(region)


def test_views_outlive_close_and_memory_is_unmapped_with_the_last_one() -> None:
    spec = make_spec(engine_id="lifetime")
    region = Region.create(spec)
    row = region.row_view(1)
    slot = region.slot_view(0)[2:4, 10:20]
    region.close()
    region.close()
    row[:] = 3
    assert mappings_of(spec.name) == 1
    del row
    gc.collect()
    slot[:] = 4
    assert slot.sum() == 2 * 10 * 4
    assert mappings_of(spec.name) == 1
    del slot
    gc.collect()
    assert mappings_of(spec.name) == 0


def test_close_without_views_unmaps_and_closes_every_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    spec = make_spec(engine_id="descriptors")
    Region.create(spec).close()
    Region.create(replace(spec, backing="shm")).close()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    assert mappings_of(spec.name) == 0


def test_a_failed_create_leaves_neither_descriptor_nor_mapping() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionError):
        Region.create(make_spec(engine_id="failing", huge_pages="require", rows=1))
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    assert mappings_of("kvquay_failing") == 0


@pytest.mark.parametrize("verb", ["slot_view", "row_view", "prefault"])
def test_a_closed_region_says_so(verb: str) -> None:
    region = Region.create(make_spec())
    region.close()
    with pytest.raises(RegionError, match="is closed"):
        getattr(region, verb)(0)


def test_mapping_starts_at_a_multiple_of_2_mib_and_leaks_no_address_space() -> None:
    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    fd = os.memfd_create("aligned")
    os.ftruncate(fd, 5 * mmap.PAGESIZE)
    before = mapped_bytes()
    mapping = memory.Mapping(fd, 5 * mmap.PAGESIZE)
    assert mapping.address % (2 * MIB) == 0
    assert mapped_bytes() - before == 5 * mmap.PAGESIZE
    del mapping
    os.close(fd)
    assert mapped_bytes() == before


@given(
    rows=st.integers(1, 10),
    units=st.integers(1, 400),
    workers=st.integers(1, 6),
    data=st.data(),
)
def test_a_workers_page_ranges_hold_its_slots_and_are_whole_and_apart(
    rows: int, units: int, workers: int, data: st.DataObject
) -> None:
    spec = make_spec(rows=rows, slot_bytes=units * 64, local_world_size=workers)
    local_rank = data.draw(st.integers(0, workers - 1))
    pages: list[int] = []
    for offset, nbytes in page_ranges(spec, local_rank, 4096):
        assert offset % 4096 == nbytes % 4096 == 0
        assert nbytes > 0
        pages += range(offset // 4096, (offset + nbytes) // 4096)
    assert pages == sorted(set(pages))
    assert pages[-1] < spec.nbytes // 4096
    needed = {
        page
        for row in range(rows)
        for page in range(
            spec.slot_offset(row, local_rank) // 4096,
            (spec.slot_offset(row, local_rank) + spec.slot_bytes - 1) // 4096 + 1,
        )
    }
    if local_rank == 0:
        needed |= {0} | {spec.row_offset(row) // 4096 for row in range(rows)}
    assert set(pages) == needed


def faults_of(function: Callable[[], Any]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("slot_bytes", [4096 + 64, 256 << 10])
@pytest.mark.parametrize("method", ["populate", "touch"])
@pytest.mark.parametrize("threads", [1, 3])
def test_after_prefault_a_workers_writes_do_not_fault(
    slot_bytes: int, method: str, threads: int
) -> None:
    spec = make_spec(rows=(16 * MIB) // slot_bytes, slot_bytes=slot_bytes, local_world_size=2)

    def measure() -> tuple[int, int, Any]:
        with Region.create(spec) as region:
            report = region.prefault(1, method=method, threads=threads)
            mine, theirs = region.slot_view(1), region.slot_view(0)
            return faults_of(lambda: mine.fill(1)), faults_of(lambda: theirs.fill(1)), report

    mine, theirs, report = run_in_child(measure)
    assert mine < spec.rows * slot_bytes // 4096 // 50
    assert (report.asked, report.got, report.local_rank) == (method, method, 1)
    assert report.bytes == spec.rows * spec.slot_bytes
    assert report.seconds > 0
    # Large slots: the neighbour's pages are not this worker's to map.
    if slot_bytes > 32 << 10:
        assert theirs > spec.rows * slot_bytes // 4096 // 2


@pytest.mark.parametrize("method", ["populate", "touch"])
@pytest.mark.parametrize("slot_bytes", [64, 8192 + 64, 64 << 10])
def test_prefault_changes_no_byte(method: str, slot_bytes: int) -> None:
    spec = make_spec(slot_bytes=slot_bytes)
    with Region.create(spec) as region:
        pattern = np.random.default_rng(1).integers(0, 256, (8, spec.row_bytes), np.uint8)
        for row in range(8):
            region.row_view(row)[:] = pattern[row]
        peer = Region.attach(region.handle(), spec)
        for local_rank in range(2):
            peer.prefault(local_rank, method=method)
        for row in range(8):
            assert np.array_equal(peer.row_view(row), pattern[row])


def test_huge_pages_are_reported_as_measured() -> None:
    spec = make_spec(rows=64, slot_bytes=128 << 10, huge_pages="try")
    with Region.create(spec) as region:
        for local_rank in (0, 1, 0):
            report = region.prefault(local_rank)
        got = region.report()["huge_pages"]
        region.slot_view(1)[:] = 5
        assert region.row_view(3)[-4096:].max() == 0 or spec.row_bytes % 4096 == 0
        if got["got"] in ("pool", "collapse"):
            assert got["page_bytes"] == 2 * MIB
            assert report.huge_bytes >= spec.nbytes // (2 * MIB) * (2 * MIB)
        else:
            assert (got["got"], got["page_bytes"], report.huge_bytes) == ("none", 4096, 0)
            assert got["reason"]


def test_huge_pages_off_are_off() -> None:
    with Region.create(make_spec(rows=64, slot_bytes=128 << 10)) as region:
        assert region.prefault(0).huge_bytes == 0
        assert region.report()["huge_pages"]["got"] == "off"


def test_a_peer_collapses_its_share_as_its_creator_decided() -> None:
    spec = make_spec(rows=64, slot_bytes=128 << 10, huge_pages="try")
    with Region.create(spec) as region:
        peer = Region.attach(region.handle(), spec)
        peer.prefault(1)
        assert peer.report()["huge_pages"]["got"] == region.report()["huge_pages"]["got"]
        region.slot_view(1)[:] = 5
        assert peer.slot_view(1).min() == 5
        peer.close()


def test_required_huge_pages_that_are_not_granted_are_an_error() -> None:
    # Smaller than one huge page, and no pool would be taken for it either.
    offer = replace(machine.huge_pages(), free_bytes=0)
    with pytest.raises(RegionError, match="huge_pages is 'require', but none are granted"):
        hugepages.plan("require", MIB, "memfd", offer)


@pytest.mark.parametrize(
    ("asked", "nbytes", "backing", "free_bytes", "shmem_thp", "got"),
    [
        ("off", 8 * MIB, "memfd", 1 << 30, "always", "off"),
        ("try", 8 * MIB, "memfd", 8 * MIB, "never", "pool"),
        ("try", 7 * MIB, "memfd", 8 * MIB, "never", "pool"),
        ("require", 8 * MIB, "memfd", 8 * MIB, "deny", "pool"),
        ("try", 9 * MIB, "memfd", 8 * MIB, "never", "collapse"),
        ("try", 8 * MIB, "shm", 1 << 30, "never", "collapse"),
        ("try", 8 * MIB, "shm", 1 << 30, "deny", "none"),
        ("try", 8 * MIB, "memfd", 0, "", "none"),
        ("try", MIB, "memfd", 0, "always", "none"),
    ],
)
def test_the_way_to_huge_pages_follows_from_what_the_kernel_offers(
    asked: str, nbytes: int, backing: str, free_bytes: int, shmem_thp: str, got: str
) -> None:
    offer = machine.HugePages(2 * MIB, free_bytes, "madvise", shmem_thp)
    report = hugepages.plan(asked, nbytes, backing, offer)
    assert report.got == got
    assert report.page_bytes == (2 * MIB if got in ("pool", "collapse") else 4096)


def test_a_pool_of_huge_pages_is_used_and_its_size_rounded_up() -> None:
    spec = make_spec(rows=40, slot_bytes=128 << 10, huge_pages="require")
    if machine.huge_pages().free_bytes < spec.nbytes + 2 * MIB:
        pytest.skip("the pool of huge pages is empty (vm.nr_hugepages)")
    with Region.create(spec) as region:
        handle = region.handle()
        assert handle.huge_pages == "pool"
        assert handle.file_bytes % (2 * MIB) == 0
        with Region.attach(handle, spec) as peer:
            assert peer.prefault(1).huge_bytes > 0
            peer.slot_view(1)[:] = 6
        assert region.slot_view(1).min() == 6
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(handle.fd, 0)


def node(number: int, available_bytes: int) -> machine.NumaNode:
    return machine.NumaNode(number, (number,), 64 << 30, available_bytes)


@pytest.mark.parametrize(
    ("asked", "nodes", "got"),
    [
        (None, (node(0, 32 << 30), node(1, 32 << 30)), "off"),
        (0, (node(0, 32 << 30),), "single node"),
        (0, (), "single node"),
        (1, (node(0, 32 << 30), node(1, 32 << 30)), "bind"),
        (1, (node(0, 32 << 30), node(1, 8 << 30)), "preferred"),
        (7, (node(0, 32 << 30), node(1, 8 << 30)), "unsupported"),
    ],
)
def test_the_numa_policy_follows_from_the_nodes(
    asked: int | None, nodes: tuple[machine.NumaNode, ...], got: str
) -> None:
    assert numa.plan(asked, 8 << 30, nodes).got == got


@pytest.mark.parametrize(
    ("replicas", "nodes", "expected"),
    [
        (4, 2, [0, 0, 1, 1]),
        (2, 2, [0, 1]),
        (1, 2, [0]),
        (3, 2, [0, 0, 1]),
        (2, 4, [0, 2]),
        (2, 1, [None, None]),
        (1, 0, [None]),
    ],
)
def test_replicas_are_spread_over_the_nodes(
    replicas: int, nodes: int, expected: list[int | None]
) -> None:
    have = tuple(node(number, 1 << 30) for number in range(nodes))
    assert [numa.replica_node(index, replicas, have) for index in range(replicas)] == expected


@pytest.mark.parametrize("got", ["bind", "preferred"])
def test_the_policy_is_set_while_allocating_and_put_back(got: str) -> None:
    def policy() -> str:
        # The first mapping's line begins with the task's policy.
        return Path("/proc/self/numa_maps").read_text().split(maxsplit=2)[1]

    def set_and_look() -> tuple[str, str, str]:
        try:
            before = policy()
        except FileNotFoundError:
            return "", "", ""
        with numa.allocating_on(numa.NumaReport(0, got, "")):
            inside = policy()
        return before, inside, policy()

    before, inside, after = run_in_child(set_and_look)
    if not before:
        pytest.skip("this kernel has no NUMA support")
    assert (before, after) == ("default", "default")
    assert inside == {"bind": "bind:0", "preferred": "prefer:0"}[got]


def test_a_single_node_machine_says_so_in_the_report() -> None:
    if len(machine.numa_nodes()) > 1:
        pytest.skip("this machine has several memory nodes")
    with Region.create(make_spec(numa_node=0)) as region:
        assert region.report()["numa"]["got"] == "single node"


class PageLocks:
    """mlock and munlock in the shape of a driver's register and unregister calls."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def register(self, pointer: int, nbytes: int) -> int:
        if LIBC.mlock(pointer, nbytes):
            return ctypes.get_errno()
        self.sizes[pointer] = nbytes
        return 0

    def unregister(self, pointer: int) -> int:
        return int(LIBC.munlock(pointer, self.sizes.pop(pointer)))


def locked_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmLck")


def test_all_rows_are_page_locked_in_pieces_and_close_unlocks_them(as_root: None) -> None:
    spec = make_spec(rows=10, slot_bytes=64 << 10)

    def lock() -> tuple[int, int, Any]:
        with Region.create(spec) as region:
            locks = PageLocks()
            piece_bytes = 3 * spec.row_bytes + 100
            report = region.pin(locks.register, locks.unregister, piece_bytes)
            with pytest.raises(RegionError, match="page-locked already"):
                region.pin(locks.register, locks.unregister)
            locked = locked_bytes()
            kept = region.row_view(0)
        del kept
        return locked, locked_bytes(), report

    locked, after, report = run_in_child(lock)
    assert (locked, after) == (10 * spec.row_bytes, 0)
    assert (report.pieces, report.piece_rows, report.pinned_rows, report.code) == (4, 3, 10, 0)
    assert report.pinned_bytes == report.asked_bytes == 10 * spec.row_bytes
    assert report.reason == ""


def test_a_locked_memory_limit_is_reported_with_how_far_it_went(as_root: None) -> None:
    spec = make_spec(rows=10, slot_bytes=64 << 10)

    def lock() -> tuple[Any, int]:
        limit = 4 * spec.row_bytes + 4096
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with Region.create(spec) as region:
            locks = PageLocks()
            report = region.pin(locks.register, locks.unregister, piece_bytes=spec.row_bytes)
            assert region.report()["pinned"]["pinned_rows"] == 4
            region.unpin()
            return report, locked_bytes()

    report, after = run_in_child(lock)
    assert (report.pinned_rows, report.pieces, after) == (4, 4, 0)
    assert report.code == 12
    assert "page-locking stopped at row 4 of 10" in report.reason
    assert f"the locked-memory limit (ulimit -l) is {4 * spec.row_bytes + 4096} bytes" in (
        report.reason
    )


@given(
    rows=st.integers(1, 40),
    units=st.integers(1, 400),
    workers=st.integers(1, 4),
    piece_bytes=st.integers(1, 1 << 20),
)
def test_pieces_end_where_rows_end_and_cover_all_rows_once(
    rows: int, units: int, workers: int, piece_bytes: int
) -> None:
    spec = make_spec(rows=rows, slot_bytes=units * 64, local_world_size=workers)
    pieces: list[tuple[int, int]] = []

    def register(pointer: int, nbytes: int) -> int:
        pieces.append((pointer, nbytes))
        return 0

    base = 1 << 40
    pin_rows(base, spec, register, lambda pointer: 0, piece_bytes)
    end = base + 4096
    for pointer, nbytes in pieces:
        assert pointer == end
        assert nbytes % spec.row_bytes == 0
        assert nbytes <= max(piece_bytes, spec.row_bytes)
        end += nbytes
    assert end == base + spec.nbytes


def test_a_failed_unlock_is_told() -> None:
    region = Region.create(make_spec())
    region.pin(lambda pointer, nbytes: 0, lambda pointer: 5)
    with pytest.raises(RegionError, match=r"could not be unlocked, codes \[5\]"):
        region.unpin()
    region.close()


def test_the_report_is_plain_json() -> None:
    with Region.create(make_spec()) as region:
        region.prefault(0)
        region.pin(lambda pointer, nbytes: 0, lambda pointer: 0)
        report = region.report()
        assert json.loads(json.dumps(report)) == report
        assert report["backing"] == "memfd"
        assert report["prefault"]["got"] == "populate"
        assert report["pinned"]["pinned_rows"] == 8
