"""Every place in the tier that calls the filesystem, in turn: the call fails, or is the last one.

The places are not listed here but found, by watching one life of a tier, from its opening to its
end, on a directory where there is something from before. In memory, for it flushes all the time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from filesystem_kit import (
    ERRNOS,
    ROW_BYTES,
    Bench,
    HookedIo,
    Sites,
    assert_counted_right,
    block_files,
    block_path,
    files_below,
    leftovers,
    make_settings,
    oserror,
)

from backends.errors import TierError
from backends.testing import FINGERPRINT, make_keys, stored_block
from backends.tier.base import Outcome
from backends.tier.filesystem import FilesystemSettings, naming

DONE, SHED, FAILED = Outcome.DONE, Outcome.SHED, Outcome.FAILED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
BLOCKS = 8
KEYS = make_keys("life", 12)
DAMAGED = KEYS[5]


def settings_of(disk: Path) -> FilesystemSettings:
    return make_settings(
        disk,
        capacity=BLOCKS * ROW_BYTES,
        quarantine_limit_bytes=2 * ROW_BYTES,
        durability="full",
        threads=2,
        touch_interval_s=0.0,
        retry_s=0.02,
        retry_most_s=0.1,
    )


def live(bench: Bench, disk: Path) -> None:
    """Some of everything. A key may end as one whose disk fails may, and not otherwise."""

    def store(first: int, end: int) -> None:
        assert set(bench.store(KEYS[first:end])) <= {DONE, SHED, FAILED}

    def load(first: int, end: int) -> None:
        keys = KEYS[first:end]
        for key, outcome in zip(keys, bench.load(keys), strict=True):
            assert outcome in {DONE, MISSING, SHED, FAILED} or (outcome, key) == (CORRUPT, DAMAGED)

    bench.fs.wait_until_known(0.3, scanned=True)
    store(0, 6)
    load(0, 6)
    with (
        contextlib.suppress(FileNotFoundError),
        (disk / block_path(FINGERPRINT, DAMAGED)).open("r+b") as file,
    ):
        file.seek(9000)
        file.write(b"damage")
    load(4, 6)
    bench.lookup(KEYS)
    store(4, 12)
    load(8, 12)


def make_past(disk: Path) -> None:
    """Blocks, a snapshot, something in quarantine."""
    with Bench(settings_of(disk)) as bench:
        bench.ready()
        live(bench, disk)


# Between others the files are as they were before, so that to be killed there shows nothing new.
CHANGES = (
    *("fallocate", "fsync", "mkdir", "publish", "pwritev", "replace", "rmdir", "unlink", "utime"),
    *("finish", "write_all"),
)


def find_sites(root: Path) -> list[tuple[bool, str]]:
    """Places, each with whether it is reached on a directory with a past, or on an empty one."""
    make_past(root / "past")
    shutil.copytree(root / "past", root / "again")
    found: dict[str, bool] = {}
    for has_past, disk in ((False, root / "new"), (True, root / "again")):
        sites = Sites({})
        with Bench(settings_of(disk), io=HookedIo(sites)) as bench:
            bench.ready()
            live(bench, disk)
        found |= dict.fromkeys(sites.seen, has_past)
    assert len(found) > 100
    return [(has_past, site) for site, has_past in sorted(found.items())]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_call_that_fails_anywhere_costs_no_more_than_what_it_was_for(shm_dir: str) -> None:
    """Up to four of them in one life. What one life leaves the next one finds."""
    root = Path(shm_dir)
    sites = find_sites(root)
    never = 0
    for has_past in (False, True):
        left = [site for past, site in sites if past == has_past]
        while left:
            disk = root / "disk"
            if has_past and not disk.exists():
                shutil.copytree(root / "past", disk)
            step = -(-len(left) // 4)
            numbers = {site: ERRNOS[(len(left) + n) % 6] for n, site in enumerate(left[::step])}
            try:
                fired = fail_at(disk, numbers)
            except BaseException as error:
                for site, number in numbers.items():
                    error.add_note(f"{errno.errorcode[number]} at {site}")
                raise
            # What could not be taken away at the end stays as long as this process.
            if not has_past or leftovers(disk):
                shutil.rmtree(disk)
            if not fired:
                never += len(numbers)
                fired = list(numbers)
            left = [site for site in left if site not in fired]
    assert never < 0.1 * len(sites)
    with Bench(settings_of(disk)) as bench:
        bench.ready()
        works_again(bench, disk)


def fail_at(disk: Path, numbers: Mapping[str, int]) -> list[str]:
    """One life with failures; where there were some."""

    def fail(number: int) -> None:
        raise oserror(number)

    fds, threads = open_fds(), threading.active_count()
    sites = Sites({site: partial(fail, number) for site, number in numbers.items()})
    try:
        with Bench(settings_of(disk), io=HookedIo(sites)) as bench:
            live(bench, disk)
            works_again(bench, disk)
    except TierError:
        # It cannot be opened: whoever asked is told so, and may ask again.
        assert sites.fired
    assert (open_fds(), threading.active_count()) == (fds, threads)
    return sites.fired


def works_again(bench: Bench, disk: Path) -> None:
    keys = KEYS[2:5]
    bench.until(lambda: bench.store(keys) == [DONE] * 3, "stores do not go on")
    bench.until(lambda: bench.load(keys) == [DONE] * 3, "loads do not go on")
    bench.until(lambda: not leftovers(disk), "something unfinished stays")
    assert_counted_right(bench, disk)
    assert_right_and_within_capacity(disk)


def assert_right_and_within_capacity(disk: Path) -> None:
    """By the files alone."""
    for file in block_files(disk):
        key = naming.parse_block_name(file.name)
        assert key is not None
        if key != DAMAGED:
            assert file.read_bytes() == stored_block(key, FINGERPRINT, ROW_BYTES).tobytes()
    sizes = [f.stat().st_size for f in files_below(disk) if f.parent.name != FINGERPRINT.hex()]
    assert sum(size for size in sizes if size == ROW_BYTES) <= BLOCKS * ROW_BYTES


def die_everywhere(directory: str) -> None:
    """In a process without threads: fork a tier for each place, which is killed there, all on one
    directory. What one leaves the next one finds."""
    root = Path(directory)
    sites = [found for found in find_sites(root) if found[1].startswith(CHANGES)]
    died = 0
    for has_past, site in sites:
        disk = root / "past"
        if not has_past:
            shutil.rmtree(root / "new")
            disk = root / "new"
        status = die_at(disk, site)
        assert status in (0, -signal.SIGKILL), f"it ended with {status}, not killed at {site}"
        died += status != 0
        assert_right_and_within_capacity(disk)
    assert died > 0.9 * len(sites), f"{died} of {len(sites)} were killed"
    for disk in (root / "past", root / "new"):
        with Bench(settings_of(disk)) as bench:
            bench.ready()
            bench.until(lambda disk=disk: not leftovers(disk), "what the dead were writing stays")
            works_again(bench, disk)
            hits = [key for key in KEYS if bench.is_hit(key)]
            assert set(bench.load(hits)) <= {DONE, CORRUPT}
            assert len(os.listdir(disk / naming.WRITERS)) == 1


def die_at(disk: Path, site: str) -> int:
    pid = os.fork()
    if not pid:
        try:
            sites = Sites({site: lambda: os.kill(os.getpid(), signal.SIGKILL)})
            with Bench(settings_of(disk), io=HookedIo(sites)) as bench:
                live(bench, disk)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.multiproc
def test_a_process_that_is_killed_anywhere_leaves_whole_blocks_and_a_right_count(
    shm_dir: str,
) -> None:
    script = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "import test_filesystem_sites as t; t.die_everywhere(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, shm_dir], check=True, timeout=200)
