"""How an engine's processes come to share a region: over their group, or through a file.

The workers of a replica tell each other over their group; on each node one of them makes that
node's region. A process outside the group, as an engine's scheduler is, finds the creator's handle
in a file. That file names a process and its memory file and holds neither, so a stale one is
refused and a kill leaves nothing to clean up.
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


def share_region(
    all_gather: AllGather, host: str, local_rank: int, spec: RegionSpec, path: Path | None = None
) -> Region:
    """The first worker of each `host` creates the region and writes its handle to `path`, if one is
    given; its peers attach; all agree or all fail.

    Both exchanges are made by every rank whatever happened to it, so that nobody is left waiting.
    Raises RegionError on every rank with the words of the rank that failed.
    """
    region: Region | None = None
    told: dict[str, Any] = {"host": host, "handle": None, "error": None}
    if local_rank == 0:
        try:
            region = Region.create(spec)
            told["handle"] = region.handle().to_dict()
            if path is not None:
                write_json(path, told["handle"])
        except (RegionError, OSError) as error:
            told["error"] = str(error)
    offers = all_gather(told)
    wrong = _first_error([offer["error"] for offer in offers])
    if wrong is None and region is None:
        try:
            handle = next(o["handle"] for o in offers if o["host"] == host and o["handle"])
            region = Region.attach(RegionHandle.from_dict(handle), spec)
        except RegionError as error:
            wrong = str(error)
    wrong = _first_error(all_gather(wrong))
    if wrong is not None or region is None:
        if region is not None:
            region.close()
        raise RegionError(wrong or "no worker offered a region")
    return region


def _first_error(answers: list[str | None]) -> str | None:
    return next((f"rank {rank}: {error}" for rank, error in enumerate(answers) if error), None)


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
