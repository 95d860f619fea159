"""Facts about this machine: free memory, limits, NUMA nodes, process identity, accelerators.

Read from the kernel's own files, with nothing but the standard library, so that planning can ask
without loading numpy or torch. Every function that reads a tree takes its root as an argument.
Nothing is cached: each call answers for now.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")
DEV = Path("/dev")
UNLIMITED_BYTES = 2**63 - 1
# cgroup v1 writes "no limit" as the largest multiple of the page size that fits in 63 bits.
_CGROUP_V1_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One thing that bounds memory. `available_bytes` is what it still allows, never negative."""

    source: str
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node. `available_bytes` is free memory plus file cache that can be dropped."""

    node: int
    cpus: tuple[int, ...]
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class HugePages:
    """What this kernel offers. `shmem_thp` is the chosen word of shmem_enabled, "" if absent."""

    default_bytes: int
    free_bytes: int
    thp: str
    shmem_thp: str


def shm_free_bytes(path: str | os.PathLike[str] = "/dev/shm") -> int:
    """Bytes that an unprivileged process can still put under `path`.

    A tmpfs mounted without a size limit reports no blocks at all; that reads as UNLIMITED_BYTES,
    since memory is then the only bound. Raises OSError where the path does not exist.
    """
    fs = os.statvfs(path)
    return fs.f_bavail * fs.f_frsize if fs.f_blocks else UNLIMITED_BYTES


def memory_available_bytes(proc_root: Path = PROC) -> int:
    """Bytes that can still be allocated: the least of the machine's and every cgroup's."""
    return min(limit.available_bytes for limit in memory_limits(proc_root))


def tightest_memory_limit(proc_root: Path = PROC) -> MemoryLimit:
    """The bound that memory_available_bytes comes from, so that an error can name it."""
    return min(memory_limits(proc_root), key=lambda limit: limit.available_bytes)


def memory_limits(proc_root: Path = PROC) -> tuple[MemoryLimit, ...]:
    """The machine's memory first, then each memory cgroup (v1 and v2) that this process is in.

    A cgroup's limit binds all its descendants, so every ancestor counts. File cache of a group is
    counted as available because the kernel drops it before it kills; shared memory is not, because
    the kernel cannot. For v2, `memory.high` bounds like `memory.max`: above it allocation stalls.
    """
    meminfo = _key_values(proc_root / "meminfo")
    limits = [
        MemoryLimit(
            "machine",
            meminfo.get("MemTotal", 0) * 1024,
            meminfo.get("MemAvailable", meminfo.get("MemFree", 0)) * 1024,
        )
    ]
    for directory, version in _memory_cgroups(proc_root):
        limit = _cgroup_limit(directory, version)
        if limit is not None:
            limits.append(limit)
    return tuple(limits)


def memlock_limit_bytes() -> int:
    """Soft RLIMIT_MEMLOCK, or UNLIMITED_BYTES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft


def open_files_limit() -> int:
    """Soft RLIMIT_NOFILE: file descriptors this process may hold."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft


def numa_nodes(sys_root: Path = SYS) -> tuple[NumaNode, ...]:
    """Nodes that have memory, by number. Empty where the kernel tells of none."""
    nodes = []
    root = sys_root / "devices/system/node"
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return ()
    for name in names:
        number = name.removeprefix("node")
        if not (name.startswith("node") and number.isdigit()):
            continue
        directory = root / name
        values = _key_values(directory / "meminfo", prefix=f"Node {number} ")
        total = values.get("MemTotal", 0) * 1024
        if not total:
            continue
        cache = values.get("Active(file)", 0) + values.get("Inactive(file)", 0)
        nodes.append(
            NumaNode(
                node=int(number),
                cpus=_cpu_list(_text(directory / "cpulist")),
                total_bytes=total,
                available_bytes=(values.get("MemFree", 0) + cache) * 1024,
            )
        )
    return tuple(sorted(nodes, key=lambda n: n.node))


def huge_pages(proc_root: Path = PROC, sys_root: Path = SYS) -> HugePages:
    """Pool of reserved huge pages of the default size, and the transparent ones' settings."""
    meminfo = _key_values(proc_root / "meminfo")
    size = meminfo.get("Hugepagesize", 0) * 1024
    unreserved = meminfo.get("HugePages_Free", 0) - meminfo.get("HugePages_Rsvd", 0)
    thp = sys_root / "kernel/mm/transparent_hugepage"
    return HugePages(
        default_bytes=size,
        free_bytes=max(0, unreserved) * size,
        thp=_chosen_word(_text(thp / "enabled")),
        shmem_thp=_chosen_word(_text(thp / "shmem_enabled")),
    )


def process_start_time(pid: int, proc_root: Path = PROC) -> int | None:
    """Clock ticks after boot at which `pid` started (proc(5), stat, field 22); None if gone.

    With the pid it names one process for as long as the machine is up: a reused pid differs. A
    zombie counts as gone, since it holds neither memory nor files any more.
    """
    fields = _stat_fields(pid, proc_root)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def process_uid(pid: int, proc_root: Path = PROC) -> int | None:
    """Effective user id of `pid`, None if it is gone."""
    match = re.search(r"^Uid:\s+\d+\s+(\d+)", _text(proc_root / str(pid) / "status"), re.MULTILINE)
    return int(match[1]) if match else None


def process_command(pid: int, proc_root: Path = PROC) -> str:
    """Command line of `pid` in one printable line, "" if it is gone or hidden."""
    try:
        raw = (proc_root / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    line = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in line)


def process_started_at_s(start_time: int, proc_root: Path = PROC) -> float | None:
    """Unix time of a process_start_time value, None where the boot time is not told."""
    match = re.search(r"^btime (\d+)$", _text(proc_root / "stat"), re.MULTILINE)
    return int(match[1]) + start_time / os.sysconf("SC_CLK_TCK") if match else None


def pid_namespace(proc_root: Path = PROC) -> int:
    """Inode of this process's pid namespace, 0 where it is not told. Pids compare only within."""
    try:
        return os.stat(proc_root / "self/ns/pid").st_ino
    except OSError:
        return 0


def boot_id(proc_root: Path = PROC) -> str:
    """Random id that the kernel draws at each boot, "" where it is not told."""
    return _text(proc_root / "sys/kernel/random/boot_id").strip()


def host_identity(proc_root: Path = PROC) -> str:
    """Equal for two processes exactly if they can map each other's memory files through /proc.

    Boot id tells machines apart even where host names are equal; the pid namespace tells apart
    containers of one machine, which cannot see each other's /proc entries.
    """
    return f"{boot_id(proc_root)}:{pid_namespace(proc_root)}:{socket.gethostname()}"


def cuda_device_count(proc_root: Path = PROC, dev_root: Path = DEV) -> int:
    """NVIDIA devices that this process could open, without loading a driver library.

    Device nodes come first: in a container they are what was granted, while /proc shows the whole
    machine. On bare metal the nodes may not be made before first use, so /proc is asked then.
    """
    try:
        granted = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(dev_root))
    except OSError:
        granted = 0
    if granted:
        return granted
    try:
        return len(os.listdir(proc_root / "driver/nvidia/gpus"))
    except OSError:
        return 0


def _text(path: Path) -> str:
    """Contents, "" where there are none to be had.

    Being out of descriptors or memory says nothing about the machine, so that is raised: a fact
    must not turn into another one because it could not be read.
    """
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return ""


def _stat_fields(pid: int, proc_root: Path) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state (field 3) on.

    The command in field 2 may hold blanks and brackets, so the line is cut at its LAST bracket.
    """
    line = _text(proc_root / str(pid) / "stat")
    fields = line[line.rfind(")") + 1 :].split()
    return fields if len(fields) >= 20 else None


def _key_values(path: Path, prefix: str = "") -> dict[str, int]:
    values = {}
    for line in _text(path).splitlines():
        parts = line.removeprefix(prefix).replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdigit():
            values[parts[0]] = int(parts[1])
    return values


def _chosen_word(text: str) -> str:
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _cpu_list(text: str) -> tuple[int, ...]:
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _memory_cgroups(proc_root: Path) -> Iterator[tuple[Path, int]]:
    """Directories, with cgroup version, whose memory limits bind this process, leaf first."""
    mounts = list(_cgroup_mounts(proc_root))
    for line in _text(proc_root / "self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if hierarchy == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount_version, mount_root, mount_point in mounts:
            if mount_version == version:
                for directory in _ancestors(path, mount_root, mount_point):
                    yield directory, version


def _cgroup_mounts(proc_root: Path) -> Iterator[tuple[int, str, Path]]:
    """(version, part of the hierarchy that is mounted, mount point), from proc(5) mountinfo."""
    for line in _text(proc_root / "self/mountinfo").splitlines():
        head, separator, tail = line.partition(" - ")
        fields, fs = head.split(), tail.split()
        if not separator or len(fields) < 5 or len(fs) < 3:
            continue
        root, point = _unescape(fields[3]), Path(_unescape(fields[4]))
        if fs[0] == "cgroup2":
            yield 2, root, point
        elif fs[0] == "cgroup" and "memory" in fs[2].split(","):
            yield 1, root, point


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field)


def _ancestors(path: str, mount_root: str, mount_point: Path) -> Iterator[Path]:
    """The group's own directory and all above it, as far as they can be seen from here.

    A container may see its own group as the mount's root while /proc names it from the host's
    root, or, in a cgroup namespace, with leading "..": then only the mount point is known.
    """
    relative = path
    if mount_root != "/":
        inside = path == mount_root or path.startswith(mount_root.rstrip("/") + "/")
        relative = path[len(mount_root) :] if inside else ""
    parts = [part for part in relative.split("/") if part]
    if ".." in parts:
        parts = []
    for length in range(len(parts), -1, -1):
        directory = mount_point.joinpath(*parts[:length])
        if directory.is_dir():
            yield directory


def _cgroup_limit(directory: Path, version: int) -> MemoryLimit | None:
    if version == 2:
        bounds = [_number(directory / name) for name in ("memory.max", "memory.high")]
        used = _number(directory / "memory.current")
        cache_keys = ("inactive_file", "active_file")
    else:
        bounds = [_number(directory / "memory.limit_in_bytes")]
        used = _number(directory / "memory.usage_in_bytes")
        cache_keys = ("total_inactive_file", "total_active_file")
    finite = [b for b in bounds if b is not None and b < _CGROUP_V1_NO_LIMIT_BYTES]
    if not finite or used is None:
        return None
    stat = _key_values(directory / "memory.stat")
    cache = sum(stat.get(key, 0) for key in cache_keys)
    limit = min(finite)
    return MemoryLimit(str(directory), limit, max(0, limit - max(0, used - cache)))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
