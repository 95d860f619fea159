"""Removes what dead runs left: named regions in `/dev/shm` whose owner's lock is free."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from backends.region.reap import find_stale, reap
from orchestrator.units import format_size


def remove_named_regions(run_id: str) -> list[str]:
    """Remove what the dead processes of one run left; the paths that went."""
    ours = [file for file in find_stale() if file.run_id == run_id]
    return [result.path for result in reap(ours, apply=True) if result.removed]


def clean(console: Console, *, apply: bool) -> None:
    """`action=clean`: show every region file, remove the stale ones if `apply`."""
    files = find_stale()
    results = reap(files, apply=apply)
    if not files:
        console.print("nothing to clean: no kvquay_* file in /dev/shm")
        return
    table = Table("file", "size", "lock", "owner pid", "result", box=None, pad_edge=False)
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
