"""How the workers of a replica come to share one region: one creates, all agree."""

from __future__ import annotations

from backends.region.region import Region
from backends.region.share import share_region
from backends.region.spec import RegionSpec
from orchestrator.groups import Group, Identity


def open_region(group: Group, identity: Identity, host_identity: str, spec: RegionSpec) -> Region:
    """The region of this node. Raises RegionError on every rank where one of them cannot."""
    region = share_region(group.all_gather_json, host_identity, identity.local_rank, spec)
    if identity.local_rank == 0 and not spec.persist_name:
        region.unlink()
    return region
