"""Is there room: asked of /dev/shm, of the machine and of the cgroup, for all replicas at once."""

from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from region_kit import ChildFailed, Kept, child, make_spec, run_in_child

from backends import machine
from backends.errors import RegionError
from backends.region.region import Region
from backends.region.reserve import reserve
from backends.region.space import check_node_space, headroom_bytes, human_bytes

MIB = 1 << 20
GIB = 1 << 30


def proc_with(tmp_path: Path, total_bytes: int, available_bytes: int) -> Path:
    """A /proc that tells of so much memory and of no cgroup."""
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {total_bytes // 1024} kB\nMemAvailable: {available_bytes // 1024} kB\n"
    )
    return proc


def test_what_fits_is_no_problem() -> None:
    for backing in ("memfd", "shm"):
        assert check_node_space([("r_dp0", MIB), ("r_dp1", MIB)], backing) == []


def test_replicas_are_summed_against_the_machines_memory(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, 64 * GIB, 20 * GIB)
    requests = [(f"r_dp{k}", 8 * GIB) for k in range(3)]
    assert check_node_space(requests[:2], "memfd", proc_root=proc) == []
    (problem,) = check_node_space(requests, "memfd", proc_root=proc)
    assert problem.resource == "memory"
    assert problem.asked_bytes == 24 * GIB + 24 * GIB // 512
    assert problem.free_bytes == 19 * GIB
    text = str(problem)
    assert "3 replicas on this node ask 24.0 GiB with backing memfd" in text
    assert "(r_dp0 8.0 GiB, r_dp1 8.0 GiB, r_dp2 8.0 GiB)" in text
    assert "19.0 GiB may be used, 5.0 GiB too much" in text
    assert "no stale file holds anything" in text


def test_what_the_pool_of_huge_pages_holds_asks_nothing_of_memory(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, 64 * GIB, 9 * GIB)
    with (proc / "meminfo").open("a") as meminfo:
        meminfo.write("HugePages_Free: 10240\nHugepagesize: 2048 kB\n")
    requests = [(f"r_dp{k}", 8 * GIB) for k in range(3)]
    (problem,) = check_node_space(requests, "memfd", proc_root=proc)
    assert "3 replicas" in str(problem)
    (problem,) = check_node_space(requests + requests, "memfd", huge_pages="try", proc_root=proc)
    assert "4 replicas on this node ask 32.1 GiB" in str(problem)
    assert check_node_space(requests[:2], "memfd", huge_pages="try", proc_root=proc) == []
    (problem,) = check_node_space(requests[:2], "shm", huge_pages="try", proc_root=proc)
    assert problem.resource == "memory"


def test_a_small_dev_shm_limits_shm_and_not_memfd(small_tmpfs: str) -> None:
    requests = [("r_dp0", 3 * MIB), ("r_dp1", 3 * MIB)]
    (problem,) = check_node_space(requests, "shm", directory=small_tmpfs)
    assert problem.resource == small_tmpfs
    assert (problem.asked_bytes, problem.free_bytes) == (6 * MIB, 4 * MIB)
    assert "backing memfd is not bound by the size" in str(problem)
    assert check_node_space(requests, "memfd", directory=small_tmpfs) == []


@pytest.mark.multiproc
def test_stale_files_are_named_with_what_they_hold(small_tmpfs: str) -> None:
    spec = make_spec(engine_id="crashed_dp0", backing="shm", rows=60)
    with child(lambda: Kept((None, Region.create(spec, directory=small_tmpfs)))) as engine:
        engine.kill()
    (problem,) = check_node_space([("r_dp0", 4 * MIB)], "shm", directory=small_tmpfs)
    assert problem.stale_bytes >= spec.nbytes
    assert f"stale files hold 1.2 MiB ({small_tmpfs}/kvquay_crashed_dp0 1.2 MiB)" in str(problem)


def test_a_missing_dev_shm_is_a_problem_of_shm_only() -> None:
    (problem,) = check_node_space([("r", MIB)], "shm", directory="/nonexistent")
    assert "mount a tmpfs there or use backing memfd" in str(problem)
    assert check_node_space([("r", MIB)], "memfd", directory="/nonexistent") == []


def test_many_replicas_are_listed_in_short(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, 64 * GIB, 2 * GIB)
    (problem,) = check_node_space([(f"r_dp{k}", GIB) for k in range(64)], "memfd", proc_root=proc)
    assert "64 replicas on this node ask 64.1 GiB" in str(problem)
    assert "r_dp7 1.0 GiB and 56 more" in str(problem)
    assert "r_dp8" not in str(problem)


def test_a_region_larger_than_memory_is_refused_before_anything_is_allocated() -> None:
    rows = machine.memory_available_bytes() // 8192 + 1
    spec = make_spec(rows=rows, slot_bytes=4096, local_world_size=1)
    with pytest.raises(RegionError, match="no room: memory"):
        Region.create(spec)


def test_memory_that_runs_short_during_the_reservation_stops_it(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, 64 * GIB, GIB + 32 * MIB)
    fd = os.memfd_create("short")
    with pytest.raises(RegionError, match=r"0 B of 256.0 MiB were.* has 1.0 GiB left"):
        reserve(fd, 256 * MIB, engine_id="r", backing="memfd", directory="/dev/shm", proc_root=proc)
    os.close(fd)


def test_a_file_size_limit_is_told() -> None:
    def limited() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        with pytest.raises(RegionError) as caught:
            Region.create(make_spec(rows=4096))
        return str(caught.value)

    assert "above the file size limit" in run_in_child(limited)


def test_an_address_space_limit_is_told() -> None:
    def limited() -> str:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MIB, used + 16 * MIB))
        with pytest.raises(RegionError) as caught:
            Region.create(make_spec(rows=4096))
        return str(caught.value)

    assert "cannot be mapped" in run_in_child(limited)


def test_too_many_open_files_is_told() -> None:
    def limited() -> str:
        spare = os.dup(1)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, spare))
        with pytest.raises(RegionError) as caught:
            Region.create(make_spec())
        return str(caught.value)

    assert "Too many open files" in run_in_child(limited)


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A real memory cgroup with a limit of 96 MiB, to put a child into."""
    candidates = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ]
    for root, limit_file in candidates:
        group = root / f"region-test-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_file).write_text(str(96 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.multiproc
def test_a_cgroups_limit_is_an_error_and_not_an_out_of_memory_kill(memory_cgroup: Path) -> None:
    def creates(rows: int) -> str:
        (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
        spec = make_spec(rows=rows, slot_bytes=1 << 20, local_world_size=1)
        try:
            with Region.create(spec) as region:
                for row in range(rows):
                    region.row_view(row)[:] = 1
                return "created"
        except RegionError as error:
            return str(error)

    told = run_in_child(lambda: creates(128))
    assert f"memory of cgroup {memory_cgroup}" in told
    assert "1 replica on this node ask 128.8 MiB" in told
    assert run_in_child(lambda: creates(16)) == "created"


@pytest.mark.multiproc
def test_without_the_check_the_same_reservation_is_killed(memory_cgroup: Path) -> None:
    """The hazard is real here, or the test above would prove nothing."""

    def allocates() -> None:
        (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
        fd = os.memfd_create("large")
        os.posix_fallocate(fd, 0, 128 * MIB)

    with pytest.raises(ChildFailed):
        run_in_child(allocates)


def test_headroom_is_a_twentieth_and_at_most_one_gib() -> None:
    assert headroom_bytes(100 * MIB) == 5 * MIB
    assert headroom_bytes(1 << 50) == GIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (8 * GIB, "8.0 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_bytes_read_as_people_write_them(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text
