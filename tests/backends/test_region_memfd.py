"""Backing memfd: hand-over between real processes, and every wrong hand-over refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from region_kit import NOBODY, Kept, child, make_spec, run_in_child

from backends.errors import RegionError
from backends.region import memfile
from backends.region.handle import RegionHandle
from backends.region.region import Region

pytestmark = pytest.mark.multiproc
SPEC = make_spec(engine_id=f"memfd{os.getpid()}_dp0")


def create_and_keep() -> Kept:
    region = Region.create(SPEC)
    region.slot_view(1)[:] = 7
    return Kept((region.handle().to_dict(), region))


def error_of(function: Callable[[], Any]) -> str:
    with pytest.raises(RegionError) as caught:
        function()
    return str(caught.value)


def test_a_peer_sees_what_the_creator_wrote_and_the_other_way_round() -> None:
    with Region.create(SPEC) as region:
        told = json.dumps(region.handle().to_dict())
        region.slot_view(0)[:] = np.arange(8, dtype=np.uint8)[:, None]

        def peer() -> bool:
            with Region.attach(RegionHandle.from_dict(json.loads(told)), SPEC) as attached:
                seen = attached.slot_view(0)
                attached.slot_view(1)[5] = 99
                attached.row_headers()[2, :4] = 1, 2, 3, 4
                return bool((seen == np.arange(8, dtype=np.uint8)[:, None]).all())

        assert run_in_child(peer)
        assert region.slot_view(1)[5].min() == 99
        assert region.slot_view(1)[[0, 1, 2, 3, 4, 6, 7]].max() == 0
        assert list(region.row_view(2)[:5]) == [1, 2, 3, 4, 0]


def test_a_region_leaves_no_name_in_dev_shm() -> None:
    with Region.create(SPEC):
        assert not os.path.exists(f"/dev/shm/{SPEC.name}")


def test_the_memory_lives_on_with_a_peer_when_the_creator_is_killed() -> None:
    with child(create_and_keep) as creator:
        peer = Region.attach(RegionHandle.from_dict(creator.result), SPEC)
        creator.kill()
        assert peer.slot_view(1).min() == 7
        peer.close()


def test_a_dead_creator_is_told() -> None:
    with child(create_and_keep) as creator:
        handle = RegionHandle.from_dict(creator.result)
        creator.kill()
        told = error_of(lambda: Region.attach(handle, SPEC))
    assert f"pid {handle.creator_pid}) is gone" in told
    assert "start the replica anew" in told


def test_a_creator_that_is_a_zombie_counts_as_gone() -> None:
    with child(create_and_keep) as creator:
        handle = RegionHandle.from_dict(creator.result)
        os.kill(creator.pid, 9)
        os.waitid(os.P_PID, creator.pid, os.WEXITED | os.WNOWAIT)
        assert "is gone" in error_of(lambda: Region.attach(handle, SPEC))


def test_a_pid_that_is_another_process_by_now_is_told() -> None:
    with child(create_and_keep) as dead, child(create_and_keep) as reuser:
        dead.kill()
        handle = RegionHandle.from_dict(dead.result)
        # What a peer meets when the kernel gave the dead creator's pid to a younger process.
        reused = replace(
            handle, creator_pid=reuser.pid, creator_start_time=handle.creator_start_time - 1
        )
        assert "is another process now" in error_of(lambda: Region.attach(reused, SPEC))


def test_a_peer_of_another_user_is_refused(as_root: None) -> None:
    with child(create_and_keep) as creator:
        handle = RegionHandle.from_dict(creator.result)
        told = run_in_child(lambda: error_of(lambda: Region.attach(handle, SPEC)), uid=NOBODY)
    assert f"belongs to uid 0, this process is uid {NOBODY}" in told


def test_a_creator_of_another_user_is_refused(as_root: None) -> None:
    with child(create_and_keep, uid=NOBODY) as creator:
        handle = RegionHandle.from_dict(creator.result)
        assert handle.uid == NOBODY
        assert f"belongs to uid {NOBODY}" in error_of(lambda: Region.attach(handle, SPEC))
        forged = replace(handle, uid=0)
        assert f"runs as uid {NOBODY}" in error_of(lambda: Region.attach(forged, SPEC))


def test_two_processes_of_one_unprivileged_user_share_a_region(as_root: None) -> None:
    def peer(handle: RegionHandle) -> int:
        with Region.attach(handle, SPEC) as region:
            return int(region.slot_view(1).min())

    with child(create_and_keep, uid=NOBODY) as creator:
        handle = RegionHandle.from_dict(creator.result)
        assert run_in_child(lambda: peer(handle), uid=NOBODY) == 7


def _socket() -> int:
    return os.pipe()[0]


def _file() -> int:
    return os.open(__file__, os.O_RDONLY)


def _other_memfd() -> int:
    fd = memfile.make("other")
    os.ftruncate(fd, SPEC.nbytes)
    memfile.seal(fd)
    return fd


def _unsealed_memfd() -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, SPEC.nbytes)
    return fd


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (_socket, "found 'pipe:"),
        (_file, "expected the file of region"),
        (_other_memfd, "inode found"),
        (_unsealed_memfd, "size sealed found False"),
    ],
)
def test_a_descriptor_that_became_another_file_is_refused(
    other: Callable[[], int], told: str
) -> None:
    def closes_and_opens_another() -> dict[str, Any]:
        region = Region.create(SPEC)
        handle = region.handle()
        region.close()
        fd = other()
        os.dup2(fd, handle.fd)
        return handle.to_dict()

    with child(closes_and_opens_another) as creator:
        handle = RegionHandle.from_dict(creator.result)
        assert told in error_of(lambda: Region.attach(handle, SPEC))


def test_a_region_that_its_creator_has_closed_is_told() -> None:
    def closes() -> dict[str, Any]:
        with Region.create(SPEC) as region:
            return region.handle().to_dict()

    with child(closes) as creator:
        handle = RegionHandle.from_dict(creator.result)
        assert "its creator has closed it" in error_of(lambda: Region.attach(handle, SPEC))


def test_a_handle_of_another_machine_or_container_is_refused() -> None:
    with Region.create(SPEC) as region:
        handle = replace(region.handle(), host="boot-of-another:1:elsewhere")
        assert "another machine, boot or container" in error_of(lambda: Region.attach(handle, SPEC))


def test_a_handle_of_an_earlier_generation_is_refused() -> None:
    with Region.create(SPEC) as region:
        handle = replace(region.handle(), generation=1)
        assert "generation found" in error_of(lambda: Region.attach(handle, SPEC))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"geometry_digest": "ff" * 8}, "geometry_digest found"),
        ({"run_id": "another"}, "run_id found"),
        ({"engine_id": "memfd_test_dp1"}, "its creator says name"),
        ({"rows": 9}, "its creator says nbytes"),
        ({"slot_bytes": 4096, "local_world_size": 4}, "local_world_size found 2 expected 4"),
        ({"backing": "shm"}, "its creator says backing"),
    ],
)
def test_a_worker_with_another_plan_is_refused(changes: dict[str, Any], told: str) -> None:
    with Region.create(SPEC) as region:
        handle = region.handle()
        assert told in error_of(lambda: Region.attach(handle, replace(SPEC, **changes)))


def test_a_damaged_header_is_refused() -> None:
    with Region.create(SPEC) as region:
        os.pwrite(region.handle().fd, b"\xff", 200)
        assert "checksum of page 0" in error_of(lambda: Region.attach(region.handle(), SPEC))


@pytest.mark.parametrize("size", [0, 4096, SPEC.nbytes + 4096])
def test_nobody_can_shorten_or_lengthen_the_file_under_the_others(size: int) -> None:
    with Region.create(SPEC) as region:
        fd = memfile.open_peer(region.handle())
        try:
            with pytest.raises(OSError, match="not permitted") as caught:
                os.ftruncate(fd, size)
        finally:
            os.close(fd)
        assert caught.value.errno == errno.EPERM


def test_many_peers_attach_at_once_and_each_writes_its_own_slot() -> None:
    spec = make_spec(engine_id="memfd_many", rows=3, slot_bytes=64, local_world_size=12)

    def peer(handle: RegionHandle, local_rank: int) -> None:
        with Region.attach(handle, spec) as attached:
            attached.slot_view(local_rank)[:] = local_rank + 1

    with Region.create(spec) as region, ExitStack() as stack:
        handle = region.handle()
        peers = [
            stack.enter_context(child(partial(peer, handle, local_rank)))
            for local_rank in range(12)
        ]
        assert all(started.let_go() == 0 for started in peers)
        for local_rank in range(12):
            assert set(region.slot_view(local_rank).ravel()) == {local_rank + 1}
        assert region.row_headers().max() == 0
        assert region.row_view(0)[4096 + 12 * 64 :].max() == 0
