"""Removes what dead processes left: named regions in `/dev/shm` whose owner's lock is free, files
that were not written to their end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from backends.region.reap import find_stale, reap
from backends.units import format_size
from orchestrator.rundir import RunDir

_REAP_LOOKS = 100
_REAP_LOOK_S = 0.01
_SWEEP_S = 2.0


def remove_leftovers(run_dir: RunDir, run_id: str, disks: Sequence[str]) -> None:
    """Remove what the dead processes of one run left beside its results, and unfinished blocks on
    the `disks` of its filesystem tier."""
    remove_named_regions(run_id)
    _sweep(disks)
    shutil.rmtree(run_dir.temporary(run_id), ignore_errors=True)
    for path in run_dir.half_written():
        path.unlink(missing_ok=True)


def remove_named_regions(run_id: str) -> None:
    """Remove the named regions of a run whose processes are all dead."""
    # Another launcher that looks through /dev/shm holds a file's lock for a moment.
    for _ in range(_REAP_LOOKS):
        ours = [file for file in find_stale() if file.run_id == run_id]
        if all(result.removed for result in reap(ours, apply=True)):
            return
        time.sleep(_REAP_LOOK_S)


def _sweep(disks: Sequence[str]) -> None:
    """A disk that hangs must not keep a run from its end: the next one sweeps it."""
    if not disks:
        return
    from backends.tier.filesystem.sweep import sweep

    thread = threading.Thread(target=sweep, args=(disks,), daemon=True)
    thread.start()
    thread.join(_SWEEP_S)


def clean(console: Console, *, apply: bool) -> None:
    """`action=clean`: show every region file, remove the stale ones if `apply`."""
    files = find_stale()
    results = reap(files, apply=apply)
    if not files:
        console.print("nothing to clean: no kvquay_* file in /dev/shm")
        return
    columns = ("size", "lock", "owner pid", "result")
    table = Table(Column("file", overflow="fold"), *columns, box=None, pad_edge=False)
    for file, result in zip(files, results, strict=True):
        table.add_row(
            file.path,
            format_size(file.size_bytes),
            file.lock,
            str(file.owner_pid or "-"),
            "removed" if result.removed else result.reason,
        )
    console.print(table)
    stale = [file for file in files if file.reapable]
    if stale and not apply:
        total = format_size(sum(file.allocated_bytes for file in stale))
        console.print(
            f"dry run: {len(stale)} stale file(s), {total}; "
            "remove with: python launch.py action=clean clean.apply=true"
        )
