"""Facts about the machine: against real directory trees, and against the kernel itself."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from region_kit import child, run_in_child

from backends import machine

GIB = 1 << 30


class Tree:
    """A /proc and a cgroup hierarchy, as real directories."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mounts: list[str] = []
        self.meminfo(64 * GIB, 50 * GIB)

    def meminfo(self, total_bytes: int, available_bytes: int) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {total_bytes // 1024} kB\nMemFree:  1 kB\n"
            f"MemAvailable:   {available_bytes // 1024} kB\n"
        )

    def mount(self, kind: str, options: str = "rw", root: str = "/", point: str = "") -> None:
        where = str(self.cgroup / point).replace(" ", "\\040")
        self.mounts.append(f"31 23 0:28 {root} {where} rw shared:1 - {kind} {kind} {options}")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts))

    def member(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("\n".join(lines) + "\n")

    def group(self, path: str, **files: object) -> None:
        directory = self.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / f"memory.{name}").write_text(f"{value}\n")

    def available_gib(self) -> float:
        return machine.memory_available_bytes(self.proc) / GIB


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_cgroups_the_machine_decides(tree: Tree) -> None:
    assert tree.available_gib() == 50


def test_v2_counts_what_the_group_still_allows(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/job")
    tree.group("job", max=20 * GIB, current=5 * GIB)
    assert tree.available_gib() == 15
    assert machine.tightest_memory_limit(tree.proc).source == str(tree.cgroup / "job")


def test_v2_an_ancestors_limit_binds_its_descendants(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/a/b/c")
    tree.group("a", max=30 * GIB, current=28 * GIB)
    tree.group("a/b", max="max", current=1 * GIB)
    tree.group("a/b/c", max=20 * GIB, current=1 * GIB)
    assert tree.available_gib() == 2


def test_v2_high_bounds_like_max(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/job")
    tree.group("job", max="max", high=8 * GIB, current=5 * GIB)
    assert tree.available_gib() == 3


def test_v2_file_cache_can_be_dropped_and_shared_memory_cannot(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/job")
    stat = f"anon 1\nshmem {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {1 * GIB}\n"
    tree.group("job", max=10 * GIB, current=9 * GIB, stat=stat)
    assert tree.available_gib() == 4


def test_v2_no_limit_is_no_limit(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/")
    tree.group("", current=5 * GIB)
    tree.group("job", max="max", high="max", current=5 * GIB)
    assert tree.available_gib() == 50


def test_a_group_that_is_over_its_limit_allows_nothing(tree: Tree) -> None:
    tree.mount("cgroup2")
    tree.member("0::/job")
    tree.group("job", max=GIB, current=2 * GIB)
    assert tree.available_gib() == 0


def test_v1_counts_limit_usage_and_total_cache(tree: Tree) -> None:
    tree.mount("cgroup", "rw,memory", point="memory")
    tree.mount("cgroup", "rw,cpu,cpuacct", point="cpu")
    tree.member("9:cpu,cpuacct:/x", "4:memory:/docker/abc", "0::/")
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    tree.group("memory/docker/abc", limit_in_bytes=10 * GIB, usage_in_bytes=7 * GIB, stat=stat)
    tree.group("memory/docker", limit_in_bytes=2**63 - 4096, usage_in_bytes=60 * GIB)
    tree.group("cpu/x", limit_in_bytes=1, usage_in_bytes=0)
    assert tree.available_gib() == 5


def test_v1_an_ancestors_limit_binds_its_descendants(tree: Tree) -> None:
    tree.mount("cgroup", "rw,memory", point="memory")
    tree.member("4:memory:/a/b")
    tree.group("memory/a", limit_in_bytes=3 * GIB, usage_in_bytes=GIB)
    tree.group("memory/a/b", limit_in_bytes=20 * GIB, usage_in_bytes=GIB)
    assert tree.available_gib() == 2


def test_both_versions_mounted_both_count(tree: Tree) -> None:
    tree.mount("cgroup", "rw,memory", point="memory")
    tree.mount("cgroup2", point="unified")
    tree.member("4:memory:/a", "0::/b")
    tree.group("memory/a", limit_in_bytes=30 * GIB, usage_in_bytes=0)
    tree.group("unified/b", max=20 * GIB, current=0)
    assert tree.available_gib() == 20


@pytest.mark.parametrize(
    ("mount_root", "path"),
    [
        ("/docker/abc", "/docker/abc"),  # a bind mount of the container's own group
        ("/", "/../../other"),  # a cgroup namespace, seen from a sibling
        ("/docker/abc", "/elsewhere"),
    ],
)
def test_in_a_container_the_mount_point_is_the_group(
    tree: Tree, mount_root: str, path: str
) -> None:
    tree.mount("cgroup2", root=mount_root)
    tree.member(f"0::{path}")
    tree.group("", max=6 * GIB, current=GIB)
    assert tree.available_gib() == 5


def test_in_a_container_a_group_below_the_mount_is_found(tree: Tree) -> None:
    tree.mount("cgroup2", root="/docker/abc")
    tree.member("0::/docker/abc/worker")
    tree.group("", max=6 * GIB, current=GIB)
    tree.group("worker", max=3 * GIB, current=GIB)
    assert tree.available_gib() == 2


def test_a_mount_point_with_a_blank_is_understood(tree: Tree) -> None:
    tree.mount("cgroup2", point="with blank")
    tree.member("0::/job")
    tree.group("with blank/job", max=GIB, current=0)
    assert tree.available_gib() == 1


def test_the_real_machine_is_never_more_generous_than_the_kernel() -> None:
    available = machine.memory_available_bytes()
    assert 0 < available <= psutil.virtual_memory().total
    assert machine.memory_limits()[0].limit_bytes == psutil.virtual_memory().total


def test_out_of_descriptors_is_an_error_and_not_another_fact() -> None:
    def starved() -> bool:
        spare = os.dup(1)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, spare))
        try:
            machine.memory_available_bytes()
        except OSError as error:
            return error.errno == 24
        return False

    assert run_in_child(starved)


def test_shm_free_is_what_the_file_system_says(small_tmpfs: str) -> None:
    assert machine.shm_free_bytes(small_tmpfs) == 4 << 20
    Path(small_tmpfs, "x").write_bytes(bytes(1 << 20))
    assert machine.shm_free_bytes(small_tmpfs) == 3 << 20


def test_a_tmpfs_without_a_limit_is_unlimited(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=0,nr_blocks=0", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        assert machine.shm_free_bytes(tmp_path) == machine.UNLIMITED_BYTES
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_missing_path_raises() -> None:
    with pytest.raises(OSError, match="nonexistent"):
        machine.shm_free_bytes("/nonexistent")


def test_limits_of_this_process() -> None:
    def lowered() -> tuple[int, int]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, 77))
        return machine.memlock_limit_bytes(), machine.open_files_limit()

    assert run_in_child(lowered) == (8192, 77)


def test_start_time_names_a_process_and_is_close_to_now() -> None:
    started = machine.process_start_time(os.getpid())
    assert started is not None
    at = machine.process_started_at_s(started)
    assert at is not None
    assert abs(at - psutil.Process().create_time()) < 2
    with child(lambda: None) as other:
        assert machine.process_start_time(other.pid) != started


def test_start_time_of_a_dead_process_is_none() -> None:
    with child(lambda: None) as other:
        os.kill(other.pid, 9)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert machine.process_start_time(other.pid) is None  # a zombie
        other.wait()
        assert machine.process_start_time(other.pid) is None


def test_a_process_name_with_brackets_and_blanks_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b c"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([str(program), "30"]) as process:
        try:
            deadline = time.monotonic() + 10
            while "a) R" not in machine.process_command(process.pid):
                assert time.monotonic() < deadline
            started = machine.process_start_time(process.pid)
            assert started is not None
            at = machine.process_started_at_s(started)
            assert at is not None
            assert abs(at - psutil.Process(process.pid).create_time()) < 2
        finally:
            process.kill()


def test_command_of_a_process_is_one_printable_line() -> None:
    code = "import time; time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code, "a\nb\x1b[31m"]) as process:
        try:
            deadline = time.monotonic() + 10
            while "a?b" not in (line := machine.process_command(process.pid)):
                assert time.monotonic() < deadline
        finally:
            process.kill()
    assert line.endswith(f"{code} a?b?[31m")
    assert machine.process_command(2**22 + 1) == ""


def test_uid_of_a_process(as_root: None) -> None:
    with child(lambda: None, uid=65534) as other:
        assert machine.process_uid(other.pid) == 65534
    assert machine.process_uid(other.pid) is None


def test_host_identity_is_shared_by_processes_of_one_host() -> None:
    assert run_in_child(machine.host_identity) == machine.host_identity()
    assert machine.boot_id() in machine.host_identity()
    assert machine.boot_id()


def test_host_identity_differs_in_another_pid_namespace() -> None:
    code = "from backends import machine; print(machine.host_identity())"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        pytest.skip(f"no pid namespace can be made here: {done.stderr.strip()}")
    assert done.stdout.strip() != machine.host_identity()
    assert done.stdout.startswith(machine.boot_id())


def test_numa_nodes_are_read_with_cpus_and_memory(tmp_path: Path) -> None:
    for number, cpus, free_kib in ((0, "0-3,8", 1000), (1, "4-7", 2000), (10, "", 0)):
        directory = tmp_path / f"devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
        (directory / "meminfo").write_text(
            f"Node {number} MemTotal:  {free_kib * 4} kB\nNode {number} MemFree:  {free_kib} kB\n"
            f"Node {number} Active(file):  {free_kib // 2} kB\n"
        )
    (tmp_path / "devices/system/node/possible").write_text("0-1\n")
    nodes = machine.numa_nodes(tmp_path)
    assert nodes == (
        machine.NumaNode(0, (0, 1, 2, 3, 8), 4000 * 1024, 1500 * 1024),
        machine.NumaNode(1, (4, 5, 6, 7), 8000 * 1024, 3000 * 1024),
    )
    assert machine.numa_nodes(tmp_path / "nothing") == ()


def test_huge_pages_are_read_with_reservations_taken_off(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "HugePages_Total: 10\nHugePages_Free: 8\nHugePages_Rsvd: 3\nHugepagesize: 2048 kB\n"
    )
    thp = tmp_path / "kernel/mm/transparent_hugepage"
    thp.mkdir(parents=True)
    (thp / "enabled").write_text("always [madvise] never\n")
    (thp / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert machine.huge_pages(tmp_path, tmp_path) == machine.HugePages(
        2 << 20, 5 * (2 << 20), "madvise", "never"
    )


def test_a_kernel_without_huge_pages_offers_none(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    assert machine.huge_pages(tmp_path, tmp_path) == machine.HugePages(0, 0, "", "")


def test_granted_device_nodes_count_before_what_proc_shows(tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    for number in range(8):
        (proc / f"driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    assert machine.cuda_device_count(proc, dev) == 8
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (dev / name).touch()
    assert machine.cuda_device_count(proc, dev) == 8
    (dev / "nvidia2").touch()
    (dev / "nvidia10").touch()
    assert machine.cuda_device_count(proc, dev) == 2


def test_a_machine_without_devices_has_none(tmp_path: Path) -> None:
    assert machine.cuda_device_count(tmp_path, tmp_path) == 0
