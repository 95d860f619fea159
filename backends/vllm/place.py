"""Who a vLLM worker is, and the region that the processes of its replica share.

A worker's replica are those of its process group that have its engine_id, its slot comes from its
place among them, and neither from anything else.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch.distributed as dist

from backends.deployment import Deployment
from backends.errors import ConfigError
from backends.machine import host_identity
from backends.region.region import Region
from backends.region.share import find_region, share_region

HANDLE_FILE: Final = "region.json"


class Place(NamedTuple):
    """A worker's region, and its ranks in its replica."""

    region: Region
    rank: int
    local_rank: int


def open_as_worker(deployment: Deployment) -> Place:
    """This replica's region, made by its first worker.

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

    told = all_gather((deployment.engine_id, host_identity()))
    # Under an external launcher the replicas of vLLM's own data parallelism are in one group.
    members = [at for at, (engine_id, _) in enumerate(told) if engine_id == deployment.engine_id]
    hosts, rank = [told[at][1] for at in members], members.index(group.rank_in_group)
    planned = deployment.offload_config(0).parallel
    if (len(members), len(set(hosts))) != (planned.world_size, 1):
        raise ConfigError(
            f"vLLM has {len(members)} workers on {len(set(hosts))} nodes for this replica, the "
            f"plan has {planned.world_size} on one; give vLLM the sizes of the plan, and each "
            "replica one node"
        )

    def of_replica(value: Any) -> list[Any]:
        gathered = all_gather(value)
        return [gathered[at] for at in members]

    local_rank = hosts[:rank].count(hosts[rank])
    path = deployment.directory / HANDLE_FILE
    region = share_region(of_replica, hosts[rank], local_rank, deployment.region_spec(), path)
    return Place(region, rank, local_rank)


def open_as_scheduler(deployment: Deployment) -> Region:
    """The region that this replica's workers share.

    Raises ConfigError where there is a scheduler in each of several workers, RegionError.
    """
    workers = deployment.plan.topology.world_size
    if workers > 1 and dist.is_initialized():
        raise ConfigError(
            f"this scheduler is in the process of one of its replica's {workers} workers, as with "
            "distributed_executor_backend=external_launcher: each of them would give away the rows "
            "of one region; start the replica with --distributed-executor-backend mp, or plan "
            "replicas of one worker"
        )
    return find_region(deployment.region_spec(), deployment.directory / HANDLE_FILE)
