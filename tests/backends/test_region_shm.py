"""Backing shm: names, locks, stale files, and what stands in the way of a name."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from region_kit import NOBODY, ChildFailed, Kept, child, kill_other, make_spec, run_in_child

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.memory import Mapping
from backends.region.reap import find_stale, inspect
from backends.region.region import Region
from backends.region.reserve import reserve
from backends.region.spec import HEADER_BYTES, RegionSpec

pytestmark = pytest.mark.multiproc
SPEC = make_spec(engine_id=f"shm{os.getpid()}_dp0", backing="shm")
PERSISTENT = replace(SPEC, persist_name=True)


def path_in(directory: str, spec: RegionSpec = SPEC) -> str:
    return os.path.join(directory, spec.name)


def creates(directory: str, spec: RegionSpec = SPEC) -> Callable[[], Kept]:
    def create() -> Kept:
        region = Region.create(spec, directory=directory)
        region.row_view(0)[:] = 7
        return Kept((region.handle().to_dict(), region))

    return create


def leave_stale_file(directory: str, spec: RegionSpec = SPEC) -> int:
    """What an engine leaves that was killed before it unlinked; its pid."""
    with child(creates(directory, spec)) as engine:
        engine.kill()
        return engine.pid


def error_of(function: Callable[[], Any]) -> str:
    with pytest.raises(RegionError) as caught:
        function()
    return str(caught.value)


def create_here(directory: str, spec: RegionSpec = SPEC) -> Region:
    return Region.create(spec, directory=directory)


def test_the_file_is_named_after_the_engine_in_dev_shm_and_gone_after_close() -> None:
    path = Path("/dev/shm") / SPEC.name
    with Region.create(SPEC):
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == SPEC.nbytes
        assert status.st_blocks * 512 >= SPEC.nbytes
    assert not path.exists()


def test_a_peer_attaches_by_handle_and_by_name(shm_dir: str) -> None:
    def peer(handle: RegionHandle) -> tuple[int, int]:
        with (
            Region.attach(handle, SPEC, directory=shm_dir) as one,
            Region.attach_by_name(SPEC, directory=shm_dir) as other,
        ):
            one.slot_view(1)[3] = 42
            return int(one.slot_view(0)[3].min()), int(other.slot_view(1)[3].min())

    with create_here(shm_dir) as region:
        region.slot_view(0)[3] = 41
        handle = region.handle()
        assert run_in_child(lambda: peer(handle)) == (41, 42)


def test_after_unlink_the_name_is_gone_and_the_memory_stays(shm_dir: str) -> None:
    with create_here(shm_dir) as region:
        peer = Region.attach_by_name(SPEC, directory=shm_dir)
        region.unlink()
        region.unlink()
        assert os.listdir(shm_dir) == []
        region.slot_view(0)[:] = 5
        assert peer.slot_view(0).min() == 5
        peer.close()


def test_persist_name_keeps_the_name_until_close(shm_dir: str) -> None:
    with create_here(shm_dir, PERSISTENT) as region:
        region.unlink()
        late = run_in_child(lambda: Region.attach_by_name(PERSISTENT, directory=shm_dir).spec.rows)
        assert late == SPEC.rows
    assert os.listdir(shm_dir) == []


def test_a_process_that_forgets_to_close_leaves_no_name(shm_dir: str) -> None:
    code = f"""
        from backends.region.region import Region
        from backends.region.spec import RegionSpec
        region = Region.create(
            RegionSpec("forgetful", "r", "shm", 1, 64, 1, "0" * 16), directory={shm_dir!r}
        )
        raise SystemExit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert done.returncode == 3
    assert os.listdir(shm_dir) == []


def test_a_forked_child_that_closes_takes_neither_name_nor_lock_from_its_parent(
    shm_dir: str,
) -> None:
    with create_here(shm_dir) as region:
        run_in_child(region.close)
        file = inspect(path_in(shm_dir))
        assert file is not None
        assert file.lock == "held"


@pytest.mark.parametrize("verb", ["unlink", "handle"])
def test_only_the_creating_process_may_unlink_or_hand_over(shm_dir: str, verb: str) -> None:
    with create_here(shm_dir) as region:
        told = run_in_child(lambda: error_of(getattr(region, verb)))
        assert f"{verb} is for the process that created it (pid {os.getpid()})" in told
        assert os.listdir(shm_dir) == [SPEC.name]


def test_a_file_is_never_seen_before_it_is_finished(shm_dir: str) -> None:
    spec = replace(SPEC, rows=64)
    seen, wrong = 0, []
    ended = threading.Event()

    def make_many() -> None:
        while not ended.wait(0.002):
            with create_here(shm_dir, spec):
                ended.wait(0.002)

    maker = threading.Thread(target=make_many)
    maker.start()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for file in find_stale(shm_dir):
            seen += 1
            whole = file.size_bytes == spec.nbytes and file.allocated_bytes >= spec.nbytes
            if not whole or (file.lock == "held" and file.engine_id != spec.engine_id):
                wrong.append(file)
    ended.set()
    maker.join()
    assert seen > 10
    assert wrong == []


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stale_file_is_replaced_and_its_bytes_are_never_seen(
    shm_dir: str, persistent: bool
) -> None:
    leave_stale_file(shm_dir)
    old = os.stat(path_in(shm_dir)).st_ino
    with create_here(shm_dir, replace(SPEC, persist_name=persistent)) as region:
        assert os.stat(path_in(shm_dir)).st_ino != old
        assert region.row_view(0).max() == 0


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, SPEC.nbytes, SPEC.nbytes * 2])
def test_a_stale_file_of_any_size_and_content_is_replaced(shm_dir: str, size: int) -> None:
    Path(path_in(shm_dir)).write_bytes(b"\xaa" * size)
    with create_here(shm_dir) as region:
        assert region.row_view(0).max() == 0
        assert os.stat(path_in(shm_dir)).st_size == SPEC.nbytes


def _symlink(path: str, victim: str) -> None:
    os.symlink(victim, path)


def _directory(path: str, victim: str) -> None:
    os.mkdir(path)


def _fifo(path: str, victim: str) -> None:
    os.mkfifo(path)


def _file_of_another_user(path: str, victim: str) -> None:
    Path(path).write_bytes(b"theirs")
    os.chown(path, NOBODY, NOBODY)


OBSTACLES = [
    (_symlink, "it is a symlink"),
    (_directory, "it is a directory"),
    (_fifo, "it is a special file"),
    (_file_of_another_user, f"it belongs to uid {NOBODY}"),
]


@pytest.mark.parametrize(("put", "told"), OBSTACLES)
def test_what_is_not_a_file_of_ours_is_refused_and_left_alone(
    shm_dir: str, tmp_path: Path, put: Callable[[str, str], None], told: str
) -> None:
    if put is _file_of_another_user and os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    put(path_in(shm_dir), str(victim))
    before = os.lstat(path_in(shm_dir))
    message = error_of(lambda: create_here(shm_dir))
    assert told in message
    assert "nothing is removed" in message
    assert error_of(lambda: Region.attach_by_name(SPEC, directory=shm_dir))
    after = os.lstat(path_in(shm_dir))
    assert (after.st_ino, after.st_uid, after.st_mode) == (
        before.st_ino,
        before.st_uid,
        before.st_mode,
    )
    assert victim.read_bytes() == b"precious"


def test_a_second_engine_is_refused_and_told_who_holds_the_first(shm_dir: str) -> None:
    with child(creates(shm_dir)) as first:
        told = error_of(lambda: create_here(shm_dir))
        assert f"'{SPEC.engine_id}' is in use" in told
        assert f"pid {first.pid}, started 20" in told
        command = Path(f"/proc/{first.pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        assert command[-20:] in told
        assert "choose another engine_id" in told
        file = inspect(path_in(shm_dir))
        assert file is not None
        assert file.owner_pid == first.pid


def test_a_second_engine_is_refused_also_after_the_first_has_unlinked(shm_dir: str) -> None:
    def creates_and_unlinks() -> Kept:
        region = create_here(shm_dir)
        region.unlink()
        return Kept((None, region))

    with child(creates_and_unlinks) as first:
        assert f"pid {first.pid}" in error_of(lambda: create_here(shm_dir))
        first.kill()
        create_here(shm_dir).close()


def test_an_engine_of_another_user_is_refused_and_told(shm_dir: str, as_root: None) -> None:
    os.chmod(shm_dir, 0o1777)
    with child(creates(shm_dir)) as first:
        told = run_in_child(lambda: error_of(lambda: create_here(shm_dir)), uid=NOBODY)
        assert "it belongs to uid 0" in told
        os.kill(first.pid, 0)
    # Stale now, but not ours to remove.
    leave_stale_file(shm_dir)
    told = run_in_child(lambda: error_of(lambda: create_here(shm_dir)), uid=NOBODY)
    assert "it belongs to uid 0" in told
    assert os.listdir(shm_dir) == [SPEC.name]


def test_a_lock_held_from_another_container_is_told_with_the_files_owner(shm_dir: str) -> None:
    leave_stale_file(shm_dir)
    # Only the lock reaches across network and pid namespaces, not the claim.
    fd = os.open(path_in(shm_dir), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        told = error_of(lambda: create_here(shm_dir))
    finally:
        os.close(fd)
    assert f"another engine with this engine_id runs: engine_id {SPEC.engine_id}, run test" in told


def creates_and_forks(directory: str, lives_s: float) -> Callable[[], Kept]:
    """As `creates`, and the engine has a child that inherits all of it and ends after it."""

    def create() -> Kept:
        region = create_here(directory)
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(lives_s)
            os._exit(0)
        return Kept((grandchild, region))

    return create


def test_a_child_that_outlives_its_engine_keeps_the_name_taken(shm_dir: str) -> None:
    with child(creates_and_forks(shm_dir, lives_s=60)) as engine:
        engine.kill()
        try:
            told = error_of(lambda: create_here(shm_dir))
            file = inspect(path_in(shm_dir))
        finally:
            kill_other(engine.result)
        assert f"pid {engine.pid} (dead) held it" in told
        assert file is not None
        assert (file.lock, file.owner_alive, file.reapable) == ("held", False, False)


def test_a_child_that_ends_just_after_its_engine_is_waited_for(shm_dir: str) -> None:
    """As workers do that the kernel kills when their parent dies."""
    with child(creates_and_forks(shm_dir, lives_s=0.4)) as engine:
        engine.kill()
        create_here(shm_dir).close()


def test_attaching_to_a_dead_engines_file_is_refused(shm_dir: str) -> None:
    with child(creates(shm_dir)) as engine:
        handle = RegionHandle.from_dict(engine.result)
        engine.kill()
        by_handle = error_of(lambda: Region.attach(handle, SPEC, directory=shm_dir))
        by_name = error_of(lambda: Region.attach_by_name(SPEC, directory=shm_dir))
    assert "its lock is free, so the engine that made it is gone" in by_handle
    assert by_handle == by_name


def test_attaching_with_the_handle_of_an_earlier_engine_is_refused(shm_dir: str) -> None:
    with create_here(shm_dir) as region:
        old = region.handle()
    with create_here(shm_dir):
        told = error_of(lambda: Region.attach(old, SPEC, directory=shm_dir))
    assert "generation found" in told
    assert "another region has been made since" in told


def test_attaching_to_no_file_says_so(shm_dir: str) -> None:
    assert "no such region" in error_of(lambda: Region.attach_by_name(SPEC, directory=shm_dir))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": 9}, "expected"),
        ({"geometry_digest": "ee" * 8}, "geometry_digest found"),
        ({"run_id": "other"}, "run_id found"),
    ],
)
def test_attaching_by_name_with_another_plan_is_refused(
    shm_dir: str, changes: dict[str, Any], told: str
) -> None:
    with create_here(shm_dir):
        other = replace(SPEC, **changes)
        assert told in error_of(lambda: Region.attach_by_name(other, directory=shm_dir))


def test_a_memfd_region_cannot_be_attached_by_name() -> None:
    spec = replace(SPEC, backing="memfd")
    assert "has no name to attach by" in error_of(lambda: Region.attach_by_name(spec))


def test_a_region_larger_than_its_tmpfs_is_refused_with_all_sizes(small_tmpfs: str) -> None:
    stale = replace(SPEC, engine_id="crashed", rows=60)
    leave_stale_file(small_tmpfs, stale)
    message = error_of(lambda: create_here(small_tmpfs, replace(SPEC, rows=200)))
    assert "ask 3.9 MiB" in message
    assert "2.8 MiB may be used" in message
    assert "stale files hold 1.2 MiB" in message
    assert f"{small_tmpfs}/kvquay_crashed 1.2 MiB" in message
    assert os.listdir(small_tmpfs) == ["kvquay_crashed"]


def test_room_taken_after_the_check_is_an_error_and_gives_all_back(small_tmpfs: str) -> None:
    fd = os.open(small_tmpfs, os.O_TMPFILE | os.O_RDWR)
    os.posix_fallocate(fd, 0, 3 << 20)
    file = os.open(small_tmpfs, os.O_TMPFILE | os.O_RDWR)
    told = error_of(
        lambda: reserve(file, 2 << 20, engine_id="a_dp0", backing="shm", directory=small_tmpfs)
    )
    os.close(file)
    assert f"region of a_dp0: 2.0 MiB cannot be reserved: {small_tmpfs} is full" in told
    free = os.statvfs(small_tmpfs)
    assert free.f_bavail * free.f_frsize >= (1 << 20) - (64 << 10)
    os.close(fd)


def test_no_byte_of_a_region_faults_when_others_fill_dev_shm_meanwhile(small_tmpfs: str) -> None:
    spec = replace(SPEC, rows=100)

    def fills_then_writes() -> tuple[int, int]:
        region = create_here(small_tmpfs, spec)
        filler = os.open(f"{small_tmpfs}/filler", os.O_CREAT | os.O_RDWR)
        with suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        free = os.statvfs(small_tmpfs).f_bavail
        for row in range(spec.rows):
            region.row_view(row)[:] = 9
        return free, int(region.slot_view(1).min())

    assert run_in_child(fills_then_writes) == (0, 9)


def test_the_same_write_without_a_reservation_is_a_sigbus(small_tmpfs: str) -> None:
    """The hazard is real here, or the test above would prove nothing."""

    def fills_then_writes() -> None:
        fd = os.open(f"{small_tmpfs}/sparse", os.O_CREAT | os.O_RDWR)
        os.ftruncate(fd, 1 << 20)
        mapping = Mapping(fd, 1 << 20)
        filler = os.open(f"{small_tmpfs}/filler", os.O_CREAT | os.O_RDWR)
        with suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        faulthandler.disable()
        np.asarray(mapping)[:] = 9

    with pytest.raises(ChildFailed, match=f"wait status {signal.SIGBUS.value}"):
        run_in_child(fills_then_writes)


@pytest.mark.parametrize("directory", ["/nonexistent", "/proc"])
def test_a_directory_that_takes_no_files_is_told(directory: str) -> None:
    told = error_of(lambda: create_here(directory))
    assert directory in told
    assert "use backing memfd" in told
