"""How the workers of a replica come to share one region: one creates, all agree."""

from __future__ import annotations

from typing import Any

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.region import Region
from backends.region.spec import RegionSpec
from orchestrator.groups import Group, Identity


def open_region(group: Group, identity: Identity, host_identity: str, spec: RegionSpec) -> Region:
    """The first worker of each node creates the region, its peers attach; all agree or all fail.

    Both exchanges are made by every rank whatever happened to it, so that nobody is left waiting.
    Raises RegionError on every rank with the words of the rank that failed.
    """
    region: Region | None = None
    told: dict[str, Any] = {"host": host_identity, "handle": None, "error": None}
    if identity.local_rank == 0:
        try:
            region = Region.create(spec)
            told["handle"] = region.handle().to_dict()
        except RegionError as error:
            told["error"] = str(error)
    offers = group.all_gather_json(told)
    error_text = _first_error(offers)
    if error_text is None and region is None:
        offer = next(o for o in offers if o["host"] == host_identity and o["handle"])
        try:
            region = Region.attach(RegionHandle.from_dict(offer["handle"]), spec)
        except RegionError as error:
            error_text = str(error)
    answers = group.all_gather_json({"error": error_text})
    error_text = _first_error(answers)
    if error_text is not None or region is None:
        if region is not None:
            region.close()
        raise RegionError(error_text or "no worker offered a region")
    if identity.local_rank == 0 and not spec.persist_name:
        region.unlink()
    return region


def _first_error(answers: list[dict[str, Any]]) -> str | None:
    return next((f"rank {r}: {a['error']}" for r, a in enumerate(answers) if a["error"]), None)
