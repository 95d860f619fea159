"""Who a worker is comes from its process group alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.errors import RegionError
from backends.machine import host_identity
from backends.region.region import Region
from backends.region.spec import RegionSpec
from orchestrator.groups import Group, GroupError, ThreadGroups, assert_planned, find_identity
from orchestrator.regions import open_region
from tests.kit import REPO, plan_for


def on_threads(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returned, or raised, on each rank."""
    groups, results = ThreadGroups(size, timeout_s=30), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups.member(rank))
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_local_rank_is_the_place_among_the_ranks_of_ones_own_host() -> None:
    hosts = ["a", "b", "a", "b", "b", "a"]
    found = on_threads(6, lambda group: find_identity(group, hosts[group.rank]))
    assert [identity.local_rank for identity in found] == [0, 0, 1, 1, 2, 2]
    assert [identity.local_world_size for identity in found] == [3] * 6
    assert [identity.leader for identity in found] == [True] + [False] * 5


def test_a_group_of_another_size_than_planned_is_refused(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "profile=ci", "parallel=dp1_tp2")

    def work(group: Group) -> None:
        assert_planned(find_identity(group, "a"), group.size, plan, 0)

    for error in on_threads(3, work):
        assert isinstance(error, GroupError)
        assert "(3, 3), the plan has (2, 2)" in str(error)


def test_ranks_on_other_hosts_than_planned_are_refused(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "profile=ci", "parallel=dp1_tp2")

    def work(group: Group) -> None:
        assert_planned(find_identity(group, f"host{group.rank}"), group.size, plan, 0)

    for error in on_threads(2, work):
        assert "(world_size, local_world_size) = (2, 1), the plan has (2, 2)" in str(error)


def region_spec(name: str, **changes: Any) -> RegionSpec:
    values = {
        "engine_id": f"groups-test-{name}",
        "run_id": "groups-test",
        "backing": "memfd",
        "rows": 4,
        "slot_bytes": 64,
        "local_world_size": 2,
        "geometry_digest": "0" * 64,
    }
    return RegionSpec(**(values | changes))


def test_what_one_worker_writes_its_peer_reads_and_slots_are_distinct() -> None:
    spec = region_spec("share")

    def work(group: Group) -> list[int]:
        identity = find_identity(group, "a")
        with contextlib.closing(open_region(group, identity, host_identity(), spec)) as region:
            region.slot_view(identity.local_rank)[:] = identity.rank + 1
            group.all_gather_json(None)
            seen = [int(region.slot_view(local)[3, 63]) for local in (0, 1)]
            group.all_gather_json(None)
            return seen

    assert on_threads(2, work) == [[1, 2], [1, 2]]


def test_when_the_region_cannot_be_made_every_rank_is_told_why() -> None:
    spec = region_spec("huge", rows=1 << 40)

    def work(group: Group) -> None:
        open_region(group, find_identity(group, "a"), host_identity(), spec)

    errors = on_threads(2, work)
    assert all(isinstance(error, RegionError) for error in errors), errors
    assert all(str(error).startswith("rank 0: ") for error in errors)


def test_when_one_rank_cannot_attach_all_of_them_give_up() -> None:
    right, wrong = region_spec("digest"), region_spec("digest", geometry_digest="1" * 64)

    def work(group: Group) -> Region:
        identity = find_identity(group, "a")
        return open_region(group, identity, host_identity(), right if group.rank == 0 else wrong)

    errors = on_threads(2, work)
    assert all(isinstance(error, RegionError) for error in errors), errors
    assert all(str(error).startswith("rank 1: ") for error in errors)


SCRIPT = """
import json, os, sys
import numpy as np
from orchestrator.groups import TorchGroup, find_identity
group = TorchGroup(60)
values = np.array([group.rank, 10 - group.rank, 7], dtype=np.int64)
group.all_reduce_min(values)
sent = np.full(5, group.rank + 3, dtype=np.int64)
group.broadcast(sent)
texts = group.all_gather_json({"rank": group.rank, "text": "é" * group.rank})
identity = find_identity(group, "odd" if group.rank % 2 else "even")
with open(f"{sys.argv[1]}/{group.rank}.json", "w") as file:
    json.dump([values.tolist(), sent.tolist(), texts, identity.local_rank], file)
group.close()
"""


@pytest.mark.multiproc
def test_collectives_of_real_processes_agree(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
        *("--virtual-local-rank", str(script), str(tmp_path)),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    texts = [{"rank": rank, "text": "é" * rank} for rank in range(3)]
    for rank, local_rank in enumerate([0, 0, 1]):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[0, 8, 7], [3] * 5, texts, local_rank]


def test_threads_reduce_and_broadcast_as_processes_do() -> None:
    def work(group: Group) -> list[list[int]]:
        values = np.array([group.rank, 10 - group.rank, 7], dtype=np.int64)
        group.all_reduce_min(values)
        sent = np.full(5, group.rank + 3, dtype=np.int64)
        group.broadcast(sent)
        return [values.tolist(), sent.tolist()]

    assert on_threads(3, work) == [[[0, 8, 7], [3] * 5]] * 3
