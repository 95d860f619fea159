"""Who a vLLM worker is, and the region that the processes of its replica share.

A worker's slot comes from its place in vLLM's own process group and from nothing else.
"""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from backends.deployment import Deployment
from backends.errors import ConfigError
from backends.machine import host_identity
from backends.region.region import Region
from backends.region.share import find_region, share_region

HANDLE_FILE: Final = "region.json"


def open_as_worker(deployment: Deployment) -> tuple[Region, int]:
    """This replica's region, made by its first worker, and this worker's local rank.

    Raises ConfigError where vLLM has other workers than the plan, RegionError.
    """
    from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group

    try:
        group = get_inner_dp_world_group()
    except AssertionError:  # vLLM makes it only where it does data parallelism itself
        group = get_world_group()

    def all_gather(value: Any) -> list[Any]:
        gathered = [None] * group.world_size
        dist.all_gather_object(gathered, value, group=group.cpu_group)
        return gathered

    hosts = all_gather(host_identity())
    local_rank = hosts[: group.rank_in_group].count(hosts[group.rank_in_group])
    planned = deployment.offload_config(0).parallel
    if (group.world_size, len(set(hosts))) != (planned.world_size, 1):
        raise ConfigError(
            f"vLLM has {group.world_size} workers on {len(set(hosts))} nodes for this replica, the "
            f"plan has {planned.world_size} on one; give vLLM the sizes of the plan, and each "
            "replica one node"
        )
    path = deployment.directory / HANDLE_FILE
    return share_region(all_gather, local_rank, deployment.region_spec(), path), local_rank


def open_as_scheduler(deployment: Deployment) -> Region:
    """The region that this replica's workers share. Raises RegionError."""
    return find_region(deployment.region_spec(), deployment.directory / HANDLE_FILE)
