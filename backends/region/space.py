"""Is there room on this node for all its replicas' regions? Asked before anything is made.

tmpfs and memfd pages are memory like any other, and cannot be dropped: a region must fit the
machine's memory and every cgroup above this process, and with backing `shm` also what is free in
/dev/shm. What does not fit is told here, instead of by a SIGBUS or the OOM killer later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends import machine
from backends.region.reap import RegionFile, find_stale
from backends.region.spec import SHM_DIRECTORY, round_up

_LISTED = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# A process that maps the whole region needs an 8-byte entry for each 4 KiB page.
_PAGE_TABLE_DIVISOR = 512


@dataclass(frozen=True, slots=True)
class SpaceProblem:
    """One resource that is too small for what a node's replicas ask of it together.

    `asked_bytes` includes page tables where the resource is memory; `free_bytes` is what may be
    used, headroom already taken off.
    """

    resource: str
    asked_bytes: int
    free_bytes: int
    stale_bytes: int
    message: str

    def __str__(self) -> str:
        return self.message


def check_node_space(
    requests: Sequence[tuple[str, int]],
    backing: str,
    *,
    huge_pages: str = "off",
    directory: str = SHM_DIRECTORY,
    proc_root: Path = machine.PROC,
) -> list[SpaceProblem]:
    """Problems, none if all fits. `requests` holds (engine_id, nbytes) of every replica here.

    Regions that the pool of huge pages will hold take nothing of what is asked here.
    """
    if huge_pages != "off" and backing == "memfd":
        requests = _outside_pool(requests, machine.huge_pages(proc_root))
    asked = sum(nbytes for _, nbytes in requests)
    shortages: list[tuple[str, int, int]] = []
    if backing == "shm":
        try:
            free = machine.shm_free_bytes(directory)
        except OSError as error:
            message = (
                f"backing shm needs {directory}, which cannot be read: {error.strerror}; "
                "mount a tmpfs there or use backing memfd"
            )
            return [SpaceProblem(directory, asked, 0, 0, message)]
        if asked > free:
            shortages.append((directory, asked, free))
    limit = machine.tightest_memory_limit(proc_root)
    with_tables = asked + asked // _PAGE_TABLE_DIVISOR
    usable = max(0, limit.available_bytes - headroom_bytes(limit.limit_bytes))
    if with_tables > usable:
        shortages.append((_memory_name(limit), with_tables, usable))
    return [
        _problem(name, requests, total, free, backing, directory) for name, total, free in shortages
    ]


def _outside_pool(
    requests: Sequence[tuple[str, int]], offer: machine.HugePages
) -> list[tuple[str, int]]:
    left = offer.free_bytes
    outside = []
    for engine_id, nbytes in requests:
        needed = round_up(nbytes, offer.default_bytes) if offer.default_bytes else left + 1
        if needed <= left:
            left -= needed
        else:
            outside.append((engine_id, nbytes))
    return outside


def headroom_bytes(limit_bytes: int) -> int:
    """Memory that regions never take: 1/20 of the limit, 1 GiB at most.

    The processes that map a region need memory for themselves, and between a check and the
    reservation others may take some.
    """
    return min(1 << 30, limit_bytes // 20)


def human_bytes(nbytes: int) -> str:
    """`8.0 GiB`, `512 B`: short, for messages."""
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def stale_summary(directory: str) -> tuple[int, str]:
    """Bytes held by files of dead owners in `directory`, and a sentence that names them."""
    try:
        stale = [file for file in find_stale(directory) if file.stale]
    except OSError:
        stale = []
    if not stale:
        return 0, "no stale file holds anything"
    held = sum(file.allocated_bytes for file in stale)
    names = ", ".join(_stale_name(file) for file in stale[:_LISTED])
    more = f" and {len(stale) - _LISTED} more" if len(stale) > _LISTED else ""
    return held, f"stale files hold {human_bytes(held)} ({names}{more})"


def _stale_name(file: RegionFile) -> str:
    other = "" if file.reapable else f" of uid {file.uid}"
    return f"{file.path}{other} {human_bytes(file.allocated_bytes)}"


def _memory_name(limit: machine.MemoryLimit) -> str:
    return "memory" if limit.source == "machine" else f"memory of cgroup {limit.source}"


def _problem(
    resource: str,
    requests: Sequence[tuple[str, int]],
    asked: int,
    free: int,
    backing: str,
    directory: str,
) -> SpaceProblem:
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in requests[:_LISTED])
    if len(requests) > _LISTED:
        listed += f" and {len(requests) - _LISTED} more"
    stale_bytes, stale = stale_summary(directory)
    count = "1 replica" if len(requests) == 1 else f"{len(requests)} replicas"
    hint = "make the regions smaller, run fewer replicas on this node, or reap stale files"
    if resource == directory:
        hint += f"; backing memfd is not bound by the size of {directory}"
    message = (
        f"{resource}: {count} on this node ask {human_bytes(asked)} with backing {backing} "
        f"({listed}), {human_bytes(free)} may be used, {human_bytes(max(0, asked - free))} too "
        f"much; {stale}. What to do: {hint}"
    )
    return SpaceProblem(resource, asked, free, stale_bytes, message)
