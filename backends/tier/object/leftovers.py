"""What writers that died in the middle have left in a directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from backends.tier import naming

# The client writes to `name#1`, and links the file to its name when it is whole.
_STAGED = re.compile(r"(.+)#[0-9]{1,10}")


def staged_files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Unfinished files of blocks below a directory: paths, and what they are. Raises OSError."""
    for namespace in _entries(root):
        if not namespace.is_dir(follow_symlinks=False) or not naming.is_namespace(namespace.name):
            continue
        for shard in _entries(namespace.path):
            if not shard.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(shard.path):
                match = _STAGED.fullmatch(entry.name)
                if (
                    match
                    and naming.parse_block_name(match[1])
                    and entry.is_file(follow_symlinks=False)
                ):
                    try:
                        yield entry.path, entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue


def sweep_directory(root: str, stale_s: float) -> int:
    """Remove unfinished files that nobody has written to for a while; how many.

    A writer that was only asleep finds that its file is gone, and writes it again.
    """
    before_s, swept = time.time() - stale_s, 0
    for path, found in staged_files(root):
        if found.st_mtime < before_s:
            Path(path).unlink(missing_ok=True)
            swept += 1
    return swept


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
