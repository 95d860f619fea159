"""Give a memory file all its pages before anything maps it, or say why that cannot be.

After this no access can fail for want of space: pages of a tmpfs or memory file that exist are
never taken away from it, whatever other programs do.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from backends import machine
from backends.errors import RegionError
from backends.region.space import (
    check_node_space,
    headroom_bytes,
    human_bytes,
    stale_summary,
)

# Small enough that a process with a profiler's timer signal finishes a piece between two signals.
PIECE_BYTES = 64 << 20
# How often free memory is asked after, while several regions are perhaps being made at once.
CHECK_EVERY_BYTES = 256 << 20


def check_room(
    engine_id: str,
    file_bytes: int,
    backing: str,
    directory: str,
    proc_root: Path = machine.PROC,
) -> None:
    """Raise RegionError with every resource that is too small for this one region."""
    problems = check_node_space(
        [(engine_id, file_bytes)], backing, directory=directory, proc_root=proc_root
    )
    if problems:
        raise RegionError(
            f"region of {engine_id}: no room: {' | '.join(str(problem) for problem in problems)}"
        )


def reserve(
    fd: int,
    file_bytes: int,
    *,
    engine_id: str,
    backing: str,
    directory: str,
    from_pool: bool = False,
    proc_root: Path = machine.PROC,
) -> None:
    """Set the size of `fd` and allocate every page of it. Raises RegionError.

    `from_pool` says that its pages come from a pool of huge pages, which is no free memory. Closing
    `fd` after an error gives back what was allocated.
    """
    try:
        os.ftruncate(fd, file_bytes)
        for offset in range(0, file_bytes, PIECE_BYTES):
            if not from_pool and offset % CHECK_EVERY_BYTES == 0:
                _check_memory(engine_id, file_bytes, offset, proc_root)
            os.posix_fallocate(fd, offset, min(PIECE_BYTES, file_bytes - offset))
    except OSError as error:
        raise RegionError(_message(error, engine_id, file_bytes, backing, directory)) from error


def _check_memory(engine_id: str, file_bytes: int, offset: int, proc_root: Path) -> None:
    """Between pieces: others may be taking the memory that was free when this began."""
    limit = machine.tightest_memory_limit(proc_root)
    left = min(CHECK_EVERY_BYTES, file_bytes - offset)
    if left > limit.available_bytes - headroom_bytes(limit.limit_bytes):
        raise RegionError(
            f"region of {engine_id}: memory ran short while it was being reserved: "
            f"{human_bytes(offset)} of {human_bytes(file_bytes)} were, and {limit.source} has "
            f"{human_bytes(limit.available_bytes)} left, of which "
            f"{human_bytes(headroom_bytes(limit.limit_bytes))} are kept free. Other programs took "
            "it meanwhile; make the region smaller or end them"
        )


def _message(error: OSError, engine_id: str, file_bytes: int, backing: str, directory: str) -> str:
    what = f"region of {engine_id}: {human_bytes(file_bytes)} cannot be reserved"
    _, stale = stale_summary(directory)
    if error.errno == errno.ENOSPC and backing == "shm":
        free = human_bytes(machine.shm_free_bytes(directory))
        return (
            f"{what}: {directory} is full: {free} are free; {stale}. Make the region smaller, "
            "reap stale files, or use backing memfd"
        )
    if error.errno == errno.EFBIG:
        return f"{what}: it is above the file size limit; raise it (ulimit -f)"
    free = human_bytes(machine.memory_available_bytes())
    return f"{what}: {error.strerror}; {free} of memory are available; {stale}"
