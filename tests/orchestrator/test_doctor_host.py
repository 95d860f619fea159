"""What a doctor finds out about a machine: each limit made low on purpose, in a child."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
from pathlib import Path

import pytest

from backends import machine
from backends.region import reap
from orchestrator.doctor import host
from orchestrator.doctor.host import check_host, machine_figures
from orchestrator.doctor.network import check_network
from orchestrator.doctor.notes import Notes
from tests.orchestrator.doctor_kit import host_checks, of, small_plan, stop, verdicts
from tests.servers.process import free_ports

CAP_IPC_LOCK = 14
PR_CAPBSET_DROP = 24
IN_SMALL_SHM = (
    *("unshare", "-m", "sh", "-c"),
    *('mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"),
)


def test_a_shm_too_small_for_the_plan_is_found_and_explained(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, region__backing="shm")
    done = subprocess.run([*IN_SMALL_SHM, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"/dev/shm cannot be another one here: {done.stderr.strip()}")
    checks = host_checks(plan, *IN_SMALL_SHM)
    small = checks["shm.size"]
    assert small["verdict"] == "fail"
    assert small["found"] == "/dev/shm: 1 MiB may be used"
    assert "for the regions of this node" in small["expected"]
    for way in ("region.backing=memfd", "remount,size=1G", "--shm-size=1g"):
        assert way in small["fix"]
    assert checks["memory.room"]["verdict"] == "ok"


def test_a_small_shm_is_no_trouble_for_regions_without_a_name(tmp_path: Path) -> None:
    notes = Notes()
    check_host(small_plan(tmp_path), notes)
    assert "not used: regions are memory files" in of(notes, "shm.size").found


def low_limit(*, may_exceed: bool) -> None:
    """In a child before it becomes the program."""
    if not may_exceed:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def test_a_low_page_lock_limit_is_found_and_explained(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, engine__device="cuda")
    check = host_checks(plan, before=lambda: low_limit(may_exceed=False))["page_lock"]
    assert check["verdict"] == "warn"
    assert check["found"] == "limit 64 KiB (ulimit -l)"
    assert "each of its workers locks" in check["expected"]
    for way in ("ulimit -l unlimited", "limits.conf", "LimitMEMLOCK", "--ulimit memlock=-1"):
        assert way in check["fix"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lock more than the limit")
def test_a_low_page_lock_limit_that_does_not_bind_is_none(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, engine__device="cuda")
    check = host_checks(plan, before=lambda: low_limit(may_exceed=True))["page_lock"]
    assert check["verdict"] == "ok"
    assert "does not bind this user" in check["found"]


def test_the_page_lock_limit_is_no_matter_where_nothing_is_locked(tmp_path: Path) -> None:
    notes = Notes()
    check_host(small_plan(tmp_path), notes)
    assert "nothing is locked with engine.device=cpu" in of(notes, "page_lock").found


def test_regions_of_dead_runs_are_told_with_the_command_that_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    (shm / "kvquay_20261130-000000-abcdef_dp0").write_bytes(bytes(8192))
    monkeypatch.setattr(host, "find_stale", lambda: reap.find_stale(str(shm)))
    notes = Notes()
    check_host(small_plan(tmp_path / "run"), notes)
    check = of(notes, "shm.leftovers")
    assert check.verdict == "warn"
    assert "clean.apply=true" in check.fix


def test_huge_pages_that_cannot_be_had_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = machine.HugePages(2 << 20, 0, "never", "deny")
    monkeypatch.setattr(machine, "huge_pages", lambda *_: none)
    for asked, verdict in (("off", "ok"), ("try", "warn"), ("require", "fail")):
        plan = small_plan(tmp_path / asked, region__huge_pages=asked)
        notes = Notes()
        check_host(plan, notes)
        check = of(notes, "huge_pages")
        assert check.verdict == verdict
        if asked != "off":
            assert "sysctl vm.nr_hugepages=" in check.fix
            assert "the pool has 0 free bytes" in check.found


def test_regions_larger_than_their_memory_node_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, verdict in ((1 << 10, "warn"), (1 << 40, "ok")):
        nodes = tuple(machine.NumaNode(n, (n,), 1 << 40, free) for n in range(2))
        monkeypatch.setattr(machine, "numa_nodes", lambda nodes=nodes: nodes)
        notes = Notes()
        check_host(small_plan(tmp_path / verdict), notes)
        assert of(notes, "numa").verdict == verdict


def test_ports_that_are_taken_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        port = taken.getsockname()[1]
        plan = small_plan(tmp_path, metrics__port=port - 1, metrics__host="0.0.0.0")
        notes = Notes()
        check_network(plan, notes, stop())
    check = of(notes, "ports")
    assert check.verdict == "fail"
    # Whoever else is on this machine may be at the port before it.
    named = check.found.replace(f": {port - 1}, {port} of", f": {port} of")
    assert named == f"metrics.port: {port} of 0.0.0.0: somebody listens there"
    assert "set metrics.port=0" in check.fix
    assert of(notes, "rendezvous").verdict == "ok"


def one_at(port: int) -> dict[str, int]:
    """One replica that meets there."""
    return {"parallel__data_parallel_size": 1, "spawn__rdzv_port": port}


def test_free_ports_are_reached(tmp_path: Path) -> None:
    [port] = free_ports(1)
    notes = Notes()
    check_network(small_plan(tmp_path, **one_at(port)), notes, stop())
    assert verdicts(notes) == {"rendezvous": "ok", "ports": "ok"}
    assert of(notes, "rendezvous").found == f"workers meet at localhost:{port}"


def test_a_taken_rendezvous_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        port = taken.getsockname()[1]
        plan = small_plan(tmp_path, **one_at(port))
        notes = Notes()
        check_network(plan, notes, stop())
    assert of(notes, "rendezvous").verdict == "fail"
    assert "spawn.rdzv_port=0" in of(notes, "rendezvous").fix


def test_a_rendezvous_on_a_node_that_nobody_knows_is_told(tmp_path: Path) -> None:
    nodes = {"spawn__nnodes": 2, "parallel__nodes": 2}
    plan = small_plan(tmp_path, parallel__data_parallel_size=1, **nodes)
    notes = Notes()
    check_network(plan, notes, stop())
    assert "node0" in of(notes, "rendezvous").found
    assert of(notes, "rendezvous").verdict == "fail"


def test_the_machine_is_described() -> None:
    found = machine_figures()
    assert found.cpus >= 1
    assert 0 < found.memory_available_bytes <= found.memory_limit_bytes
    assert found.shm_bytes >= found.shm_free_bytes


def test_a_machine_that_others_use_is_told_because_its_figures_are_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(tmp_path)
    for load, verdict in ((0.0, "ok"), (4096.0, "warn")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        notes = Notes()
        check_host(plan, notes)
        assert of(notes, "load").verdict == verdict
