"""Parallel topology: which rank stands where. Pure Python, checked once, before anything starts.

Rank order within a replica is TP fastest, then PCP, then PP; data parallelism is never in a rank.
A node holds whole replicas (`data_parallel_size` divisible by `nnodes`) or an equal part of one
replica (`nnodes` divisible by `data_parallel_size`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.problems import Problem

MAX_WORKERS = 2**18


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker stands, and its coordinates on every axis."""

    data_parallel_index: int
    data_parallel_rank_local: int
    rank: int
    tp_rank: int
    pcp_rank: int
    pp_rank: int
    dcp_rank: int
    node_rank: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of all axes. Build it with `check_topology` having found nothing."""

    data_parallel_size: int
    pp_size: int
    pcp_size: int
    tp_size: int
    dcp_size: int
    nnodes: int

    @property
    def world_size(self) -> int:
        """Workers of ONE replica."""
        return self.pp_size * self.pcp_size * self.tp_size

    @property
    def nodes_per_replica(self) -> int:
        return max(1, self.nnodes // self.data_parallel_size)

    @property
    def data_parallel_size_local(self) -> int:
        """Replicas with workers on one node."""
        return max(1, self.data_parallel_size // self.nnodes)

    @property
    def local_world_size(self) -> int:
        """Workers of one replica on one node."""
        return self.world_size // self.nodes_per_replica

    @property
    def workers_per_node(self) -> int:
        return self.local_world_size * self.data_parallel_size_local

    def first_node(self, data_parallel_index: int) -> int:
        if self.nodes_per_replica > 1:
            return data_parallel_index * self.nodes_per_replica
        return data_parallel_index // self.data_parallel_size_local

    def placement(self, data_parallel_index: int, rank: int) -> Placement:
        tp_rank = rank % self.tp_size
        return Placement(
            data_parallel_index=data_parallel_index,
            data_parallel_rank_local=data_parallel_index % self.data_parallel_size_local,
            rank=rank,
            tp_rank=tp_rank,
            pcp_rank=rank // self.tp_size % self.pcp_size,
            pp_rank=rank // (self.tp_size * self.pcp_size),
            dcp_rank=tp_rank % self.dcp_size,
            node_rank=self.first_node(data_parallel_index) + rank // self.local_world_size,
            local_rank=rank % self.local_world_size,
        )

    def replica(self, data_parallel_index: int) -> Iterator[Placement]:
        """The workers of one replica, in rank order."""
        return (self.placement(data_parallel_index, rank) for rank in range(self.world_size))


def check_topology(
    *,
    data_parallel_size: int,
    pp_size: int,
    pcp_size: int,
    tp_size: int,
    dcp_size: int,
    nnodes: int,
    devices_per_node: int | None,
) -> tuple[Topology | None, list[Problem]]:
    """The topology, or every reason why there is none.

    `devices_per_node` is None where workers share the CPUs of a node and any number fits.
    """
    sizes = {
        "parallel.data_parallel_size": data_parallel_size,
        "parallel.pipeline_parallel_size": pp_size,
        "parallel.prefill_context_parallel_size": pcp_size,
        "parallel.tensor_parallel_size": tp_size,
        "parallel.decode_context_parallel_size": dcp_size,
        "parallel.nodes": nnodes,
    }
    problems = [
        Problem(key, size, "must be at least 1", f"set {key}=1 to leave this axis unused")
        for key, size in sizes.items()
        if size < 1
    ]
    if problems:
        return None, problems
    topology = Topology(data_parallel_size, pp_size, pcp_size, tp_size, dcp_size, nnodes)
    workers = data_parallel_size * topology.world_size
    if workers > MAX_WORKERS:
        return None, [
            Problem(
                "parallel.data_parallel_size",
                data_parallel_size,
                f"DP x PP x PCP x TP = {data_parallel_size} x {pp_size} x {pcp_size} x {tp_size} = "
                f"{workers} workers; at most {MAX_WORKERS} are planned",
                "make an axis smaller",
            )
        ]
    if tp_size % dcp_size:
        problems.append(
            Problem(
                "parallel.decode_context_parallel_size",
                dcp_size,
                f"must divide parallel.tensor_parallel_size = {tp_size}",
                "choose one of "
                + ", ".join(str(d) for d in range(1, tp_size + 1) if not tp_size % d),
            )
        )
    if data_parallel_size % nnodes and nnodes % data_parallel_size:
        problems.append(
            Problem(
                "spawn.nnodes",
                nnodes,
                f"must divide parallel.data_parallel_size = {data_parallel_size} (whole replicas "
                "on each node) or be a multiple of it (each replica over several nodes)",
                "change spawn.nnodes or parallel.data_parallel_size",
            )
        )
    elif topology.world_size % topology.nodes_per_replica:
        problems.append(
            Problem(
                "spawn.nnodes",
                nnodes,
                f"gives each replica {topology.nodes_per_replica} nodes, which do not divide its "
                f"world_size = PP x PCP x TP = {pp_size} x {pcp_size} x {tp_size} = "
                f"{topology.world_size}",
                "change spawn.nnodes, or an axis",
            )
        )
    elif devices_per_node is not None and topology.workers_per_node > devices_per_node:
        problems.append(
            Problem(
                "spawn.devices_per_node",
                devices_per_node,
                f"{topology.data_parallel_size_local} replicas x {topology.local_world_size} "
                f"workers on a node need {topology.workers_per_node} devices",
                "use more nodes (spawn.nnodes) or smaller axes",
            )
        )
    return (None if problems else topology), problems
