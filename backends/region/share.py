"""How an engine's processes come to share a region: over their group, or through a file.

The workers of a node tell each other over a group of their own. A process outside that group, as an
engine's scheduler is, finds the creator's handle in a file. That file names a process and its
memory file and holds neither, so a stale one is refused and a kill leaves nothing to clean up.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.region import Region
from backends.region.spec import RegionSpec

AllGather = Callable[[Any], list[Any]]


def share_region(all_gather: AllGather, local_rank: int, spec: RegionSpec, path: Path) -> Region:
    """The first worker of a node creates the region and writes its handle to `path`, its peers
    attach; all agree or all fail.

    Both exchanges are made by every rank whatever happened to it. Raises RegionError on every rank
    with the words of the rank that failed.
    """
    region: Region | None = None
    told: dict[str, Any] = {"handle": None, "error": None}
    if local_rank == 0:
        try:
            region = Region.create(spec)
            told["handle"] = region.handle().to_dict()
            write_json(path, told["handle"])
        except (RegionError, OSError) as error:
            told["error"] = str(error)
    [offer] = [o for o in all_gather(told) if o["handle"] or o["error"]]
    wrong = offer["error"]
    if wrong is None and region is None:
        try:
            region = Region.attach(RegionHandle.from_dict(offer["handle"]), spec)
        except RegionError as error:
            wrong = str(error)
    wrong = next(filter(None, all_gather(wrong)), None)
    if wrong is not None or region is None:
        if region is not None:
            region.close()
        raise RegionError(wrong or "no worker offered a region")
    return region


def find_region(spec: RegionSpec, path: Path) -> Region:
    """The region whose creator wrote `path`. Raises RegionError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            handle = RegionHandle.from_dict(json.loads(file.read()))
    except (OSError, ValueError) as error:
        raise RegionError(
            f"{path}: the workers' region cannot be found: {error}; workers and scheduler of a "
            "replica must read one plan on one node"
        ) from error
    return Region.attach(handle, spec)


def write_json(path: Path, value: Any) -> None:
    """Write a file, mode 0600, that is seen whole or not at all, in a directory of our own."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "w") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
