"""What this machine offers, against what the plan asks of it: memory, /dev/shm, huge pages,
page-locking, NUMA. Looks and changes nothing; needs no torch."""

from __future__ import annotations

import os
import re
from typing import Final

from backends import machine
from backends.errors import RegionError
from backends.region import hugepages, numa
from backends.region.reap import find_stale
from backends.region.space import SpaceProblem, check_node_space, headroom_bytes
from backends.region.spec import SHM_DIRECTORY
from backends.units import format_size
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import MachineFigures
from orchestrator.host import host_facts
from orchestrator.plan import Plan, ReplicaPlan

_CAP_IPC_LOCK: Final = 14
_WHAT_TO_DO: Final = ". What to do: "


def machine_figures() -> MachineFigures:
    facts, pages = host_facts(), machine.huge_pages()
    lock = machine.memlock_limit_bytes()
    try:
        shm = os.statvfs(SHM_DIRECTORY)
        shm_bytes, shm_free_bytes = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except OSError:
        shm_bytes = shm_free_bytes = 0
    return MachineFigures(
        host=facts["host"],
        system=facts["system"],
        architecture=facts["architecture"],
        cpu=facts["cpu"],
        cpus=facts["cpus"],
        memory_bytes=facts["memory_bytes"],
        memory_limit_bytes=facts["memory_limit_bytes"],
        memory_available_bytes=machine.memory_available_bytes(),
        numa_nodes=facts["numa_nodes"],
        cuda_devices=facts["cuda_devices"],
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        huge_page_bytes=pages.default_bytes,
        huge_pages_free_bytes=pages.free_bytes,
        page_lock_bytes=None if lock == machine.UNLIMITED_BYTES else lock,
    )


def check_host(plan: Plan, notes: Notes) -> None:
    """Checks `load`, `memory.room`, `shm.*`, `huge_pages`, `page_lock`, `numa`."""
    replicas = local_replicas(plan)
    _check_load(notes)
    notes.doing("looking at memory and /dev/shm")
    _check_room(plan, replicas, notes)
    _check_shm_leftovers(notes)
    _check_huge_pages(plan, notes)
    _check_page_lock(plan, notes)
    _check_numa(plan, replicas, notes)


def local_replicas(plan: Plan) -> list[ReplicaPlan]:
    """Those with workers on this node."""
    node = plan.settings.spawn.node_rank
    return [replica for replica in plan.replicas if node in replica.node_ranks]


def _check_load(notes: Notes) -> None:
    """Whether others use the machine while it is measured."""
    busy, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    found = f"{busy:.1f} programs wanted to run in the last minute, on {cpus} CPUs"
    if busy > cpus:
        notes.warn(
            "load",
            found,
            "an idle machine: these figures are lower than what it can do",
            "measure again when nothing else runs",
        )
    else:
        notes.ok("load", found)


def _check_room(plan: Plan, replicas: list[ReplicaPlan], notes: Notes) -> None:
    region = plan.settings.region
    requests = [(f"dp{each.data_parallel_index}", each.region_bytes) for each in replicas]
    problems = check_node_space(requests, region.backing, huge_pages=region.huge_pages)
    asked = sum(nbytes for _, nbytes in requests)
    count = "1 region of this node needs"
    if len(requests) != 1:
        count = f"{len(requests)} regions of this node need"
    need = f"{count} {format_size(asked)}"
    by_place = {problem.resource == SHM_DIRECTORY: problem for problem in problems}
    limit = machine.tightest_memory_limit()
    usable = max(0, limit.available_bytes - headroom_bytes(limit.limit_bytes))
    if short := by_place.get(False):
        _short("memory.room", short, notes)
    else:
        notes.ok("memory.room", f"{format_size(usable)} may be used; {need}")
    if short := by_place.get(True):
        _short("shm.size", short, notes)
        return
    if region.backing == "memfd":
        need = "not used: regions are memory files (region.backing=memfd)"
    try:
        free = machine.shm_free_bytes(SHM_DIRECTORY)
    except OSError as error:
        notes.ok("shm.size", f"{SHM_DIRECTORY} cannot be read ({error.strerror}); {need}")
        return
    told = "without a limit" if free == machine.UNLIMITED_BYTES else f"{format_size(free)} free"
    notes.ok("shm.size", f"{SHM_DIRECTORY} {told}; {need}")


def _short(name: str, problem: SpaceProblem, notes: Notes) -> None:
    _, _, hint = problem.message.partition(_WHAT_TO_DO)
    stale = f", {format_size(problem.stale_bytes)} held by dead runs" if problem.stale_bytes else ""
    fix = hint or "make region.size or parallel.data_parallel_size smaller"
    if problem.resource == SHM_DIRECTORY:
        gib = -(-problem.asked_bytes // 2**30)
        fix = (
            f"set region.backing=memfd, which {SHM_DIRECTORY} does not limit; or make it larger: "
            f"mount -o remount,size={gib}G {SHM_DIRECTORY} (docker: --shm-size={gib}g); or make "
            "region.size smaller"
        )
        if problem.stale_bytes:
            fix = f"remove what dead runs hold: action=clean clean.apply=true; or {fix}"
    notes.fail(
        name,
        f"{problem.resource}: {format_size(problem.free_bytes)} may be used{stale}",
        f"{format_size(problem.asked_bytes)} for the regions of this node",
        fix,
    )


def _check_shm_leftovers(notes: Notes) -> None:
    try:
        stale = [file for file in find_stale() if file.stale]
    except OSError as error:
        notes.ok("shm.leftovers", f"{SHM_DIRECTORY} cannot be read: {error.strerror}")
        return
    if not stale:
        notes.ok("shm.leftovers", "no region of a dead run")
        return
    held = format_size(sum(file.allocated_bytes for file in stale))
    others = [file for file in stale if not file.reapable]
    notes.warn(
        "shm.leftovers",
        f"{len(stale)} region files of dead runs hold {held}",
        "none",
        "python launch.py action=clean clean.apply=true"
        + (f"; {len(others)} are of other users, who have to do it" if others else ""),
    )


def _check_huge_pages(plan: Plan, notes: Notes) -> None:
    asked, region = plan.settings.region.huge_pages, plan.replicas[0].region_bytes
    offer = machine.huge_pages()
    told = (
        f"{format_size(offer.free_bytes)} free in the pool of {format_size(offer.default_bytes)} "
        f"pages, transparent ones for shared memory: {offer.shmem_thp or 'absent'}"
    )
    if asked == "off":
        notes.ok("huge_pages", f"not asked for (region.huge_pages=off); {told}")
        return
    nbytes = region * len(local_replicas(plan))
    pages = -(-nbytes // (offer.default_bytes or 1))
    fix = f"fill the pool: sysctl vm.nr_hugepages={pages}"
    expected = f"huge pages for {format_size(nbytes)} (region.huge_pages={asked})"
    try:
        report = hugepages.plan(asked, nbytes, plan.settings.region.backing, offer)
    except RegionError as error:
        reason = str(error).partition(". ")[0].partition("granted: ")[2]
        notes.fail("huge_pages", reason, expected, f"{fix}, or set region.huge_pages=try")
        return
    if report.got == "none":
        notes.warn("huge_pages", report.reason, expected, f"{fix}, or set region.huge_pages=off")
    else:
        how = "collapsing small ones" if report.got == "collapse" else "the pool"
        notes.ok("huge_pages", f"by {how}; {told}")


def _check_page_lock(plan: Plan, notes: Notes) -> None:
    """A worker locks all rows of its replica's region, so that a device copies by itself."""
    limit, nbytes = machine.memlock_limit_bytes(), plan.replicas[0].region_bytes
    told = "no limit" if limit == machine.UNLIMITED_BYTES else f"limit {format_size(limit)}"
    if plan.settings.engine.device != "cuda":
        notes.ok("page_lock", f"{told}; nothing is locked with engine.device=cpu")
    elif plan.settings.region.pin == "off":
        notes.ok("page_lock", f"{told}; nothing is locked with region.pin=off")
    elif limit >= nbytes:
        notes.ok("page_lock", f"{told}; a worker locks {format_size(nbytes)}")
    elif _may_lock_more():
        notes.ok("page_lock", f"{told}, which does not bind this user (CAP_IPC_LOCK)")
    else:
        notes.warn(
            "page_lock",
            f"{told} (ulimit -l)",
            f"{format_size(nbytes)}, the region of a replica, which each of its workers locks; "
            "rows beyond the limit are copied unlocked and more slowly",
            "ulimit -l unlimited before the start, or for good: memlock in "
            "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, "
            "docker --ulimit memlock=-1",
        )


def _may_lock_more() -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", _status(), re.MULTILINE)
    return bool(match and int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def _status() -> str:
    try:
        return (machine.PROC / "self/status").read_text()
    except OSError:
        return ""


def _check_numa(plan: Plan, replicas: list[ReplicaPlan], notes: Notes) -> None:
    nodes = machine.numa_nodes()
    if len(nodes) < 2:
        notes.ok("numa", "one memory node")
        return
    if plan.settings.region.numa == "off":
        notes.ok("numa", f"{len(nodes)} memory nodes; regions are bound to none (region.numa=off)")
        return
    asked: dict[int, int] = {}
    local = plan.topology.data_parallel_size_local
    for replica in replicas:
        node = numa.replica_node(replica.data_parallel_rank_local, local, nodes)
        if node is not None:
            asked[node] = asked.get(node, 0) + replica.region_bytes
    reports = [numa.plan(node, nbytes, nodes) for node, nbytes in asked.items()]
    wrong = [report for report in reports if report.got != "bind"]
    spread = ", ".join(f"node {node}: {format_size(nbytes)}" for node, nbytes in asked.items())
    if wrong:
        notes.warn(
            "numa",
            "; ".join(report.reason for report in wrong),
            f"room for every region on its own node ({spread})",
            "make region.size smaller, free memory there, or set region.numa=off",
        )
    else:
        notes.ok("numa", f"{len(nodes)} memory nodes; regions on {spread}")
