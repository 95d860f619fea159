"""Finding and removing the files of dead engines, and nothing else."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from region_kit import NOBODY, Kept, child, make_spec, run_in_child

from backends.region.reap import find_stale, inspect, reap
from backends.region.region import Region
from backends.region.spec import RegionSpec

pytestmark = pytest.mark.multiproc
SPEC = make_spec(engine_id=f"reap{os.getpid()}_dp0", backing="shm")


def leave_stale_file(directory: str, spec: RegionSpec = SPEC) -> int:
    with child(lambda: Kept((None, Region.create(spec, directory=directory)))) as engine:
        engine.kill()
        return engine.pid


def test_every_kind_of_entry_is_listed_with_what_is_known_of_it(shm_dir: str) -> None:
    dead = leave_stale_file(shm_dir)
    Path(shm_dir, "kvquay_empty").touch()
    os.symlink("/etc/passwd", f"{shm_dir}/kvquay_link")
    os.mkdir(f"{shm_dir}/kvquay_dir")
    Path(shm_dir, "unrelated").touch()
    with Region.create(replace(SPEC, engine_id="live"), directory=shm_dir):
        files = {os.path.basename(file.path): file for file in find_stale(shm_dir)}
    assert list(files) == [
        "kvquay_dir",
        "kvquay_empty",
        "kvquay_link",
        "kvquay_live",
        SPEC.name,
    ]
    assert [file.reapable for file in files.values()] == [False, True, False, False, True]
    stale = files[SPEC.name]
    assert (stale.engine_id, stale.run_id, stale.owner_pid) == (SPEC.engine_id, SPEC.run_id, dead)
    assert (stale.lock, stale.owner_alive, stale.uid) == ("free", False, os.geteuid())
    assert stale.size_bytes == SPEC.nbytes
    assert stale.allocated_bytes >= SPEC.nbytes
    assert stale.reason == f"its lock is free: owner pid {dead} of run {SPEC.run_id} is gone"
    live = files["kvquay_live"]
    assert (live.lock, live.owner_alive, live.owner_pid) == ("held", True, os.getpid())
    assert files["kvquay_empty"].reason == "its lock is free and it holds no region header"


def test_a_dry_run_removes_nothing_and_says_what_it_would(shm_dir: str) -> None:
    leave_stale_file(shm_dir)
    (result,) = reap(find_stale(shm_dir), apply=False)
    assert not result.removed
    assert result.reason.startswith("would be removed: its lock is free")
    assert os.listdir(shm_dir) == [SPEC.name]


def test_only_the_stale_are_removed(shm_dir: str) -> None:
    leave_stale_file(shm_dir)
    os.symlink("/etc/passwd", f"{shm_dir}/kvquay_link")
    os.mkdir(f"{shm_dir}/kvquay_dir")
    with Region.create(replace(SPEC, engine_id="live"), directory=shm_dir):
        results = {os.path.basename(r.path): r for r in reap(find_stale(shm_dir), apply=True)}
        assert sorted(os.listdir(shm_dir)) == ["kvquay_dir", "kvquay_link", "kvquay_live"]
    assert results[SPEC.name].removed
    assert not results["kvquay_live"].removed
    assert results["kvquay_live"].reason == "its owner lives: the lock is held"


def test_a_file_of_another_user_is_never_removed_even_by_root(shm_dir: str, as_root: None) -> None:
    os.chmod(shm_dir, 0o1777)
    with child(lambda: Kept((None, Region.create(SPEC, directory=shm_dir))), uid=NOBODY) as engine:
        engine.kill()
    (file,) = find_stale(shm_dir)
    assert (file.stale, file.reapable) == (True, False)
    (result,) = reap([replace(file, reapable=True)], apply=True)
    assert (result.removed, result.reason) == (False, "it is not a file of ours any more")
    assert os.listdir(shm_dir) == [SPEC.name]
    assert run_in_child(lambda: reap(find_stale(shm_dir), apply=True)[0].removed, uid=NOBODY)


def test_a_file_that_may_not_be_opened_has_an_unknown_lock(shm_dir: str, as_root: None) -> None:
    os.chmod(shm_dir, 0o1777)
    leave_stale_file(shm_dir)
    (file,) = run_in_child(lambda: find_stale(shm_dir), uid=NOBODY)
    assert (file.lock, file.engine_id, file.reapable) == ("unknown", None, False)


def test_a_name_that_a_new_engine_took_meanwhile_is_kept(shm_dir: str) -> None:
    leave_stale_file(shm_dir)
    found = find_stale(shm_dir)
    with Region.create(SPEC, directory=shm_dir):
        (result,) = reap(found, apply=True)
        assert (result.removed, result.reason) == (False, "another file has its name now")
        assert os.listdir(shm_dir) == [SPEC.name]


def test_a_file_that_was_locked_meanwhile_is_kept(shm_dir: str) -> None:
    path = Path(shm_dir, "kvquay_x")
    path.touch()
    found = find_stale(shm_dir)
    with path.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        (result,) = reap(found, apply=True)
    assert (result.removed, result.reason) == (False, "its lock is held now")


def test_a_symlink_put_in_place_of_a_stale_file_is_not_followed(
    shm_dir: str, tmp_path: Path
) -> None:
    leave_stale_file(shm_dir)
    found = find_stale(shm_dir)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.unlink(found[0].path)
    os.symlink(victim, found[0].path)
    (result,) = reap(found, apply=True)
    assert not result.removed
    assert os.path.islink(found[0].path)
    assert victim.read_bytes() == b"precious"


def test_a_file_that_is_gone_by_then_is_no_error(shm_dir: str) -> None:
    leave_stale_file(shm_dir)
    found = find_stale(shm_dir)
    shutil.rmtree(shm_dir)
    (result,) = reap(found, apply=True)
    os.mkdir(shm_dir)
    assert (result.removed, result.reason) == (False, "it is gone already")


def test_nothing_under_a_name_is_none(shm_dir: str) -> None:
    assert inspect(f"{shm_dir}/kvquay_nothing") is None


def test_reapers_and_engines_at_once_remove_no_living_engines_file(
    shm_dir: str, tmp_path: Path
) -> None:
    """An engine that holds its region must find its name still there, however often others reap."""

    stop = tmp_path / "stop"

    def reaps() -> int:
        removed = 0
        while not stop.exists():
            removed += sum(result.removed for result in reap(find_stale(shm_dir), apply=True))
        return removed

    def runs(number: int) -> int:
        missing = 0
        for turn in range(20):
            spec = replace(SPEC, engine_id=f"e{number}_{turn % 3}")
            leave_stale_file(shm_dir, spec)
            with Region.create(spec, directory=shm_dir) as region:
                inode = os.fstat(region.handle().fd).st_ino
                time.sleep(0.001)
                file = inspect(f"{shm_dir}/{spec.name}")
                missing += file is None or file.inode != inode
        return missing

    with ThreadPoolExecutor(4) as pool:
        reapers = [pool.submit(run_in_child, reaps) for _ in range(2)]
        engines = [pool.submit(run_in_child, partial(runs, number)) for number in range(2)]
        try:
            assert [engine.result() for engine in engines] == [0, 0]
        finally:
            stop.touch()
        assert sum(reaper.result() for reaper in reapers) > 0
    assert os.listdir(shm_dir) == []
