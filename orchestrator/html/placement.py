"""The placement map: nodes, replicas, and for each slot its rank and its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.html import figures
from orchestrator.html.markup import Html, tag
from orchestrator.plan import Plan, ReplicaPlan, WorkerPlan

WORKERS_SHOWN: Final = 256


def placement(plan: Plan, failures: Sequence[Mapping[str, Any]]) -> list[Html]:
    """A box for each replica and in it one for each slot of its region."""
    failed = {(failure["replica"], failure["rank"]) for failure in failures}
    shown = max(1, WORKERS_SHOWN // plan.topology.world_size)
    boxes = [_replica(plan, replica, failed) for replica in plan.replicas[:shown]]
    more = len(plan.replicas) - shown
    if more > 0:
        boxes.append(tag("p", f"... and {more} more replicas in plan.json", class_="note"))
    return boxes


def _replica(plan: Plan, replica: ReplicaPlan, failed: set[tuple[Any, Any]]) -> Html:
    index = replica.data_parallel_index
    nodes = ", ".join(map(str, replica.node_ranks))
    memory = plan.region.numa_nodes[replica.data_parallel_rank_local]
    where = f"node {nodes}" + ("" if memory is None else f", memory of NUMA node {memory}")
    workers = sorted(replica.workers, key=lambda worker: (worker.node_rank, worker.slot))
    return tag(
        "div",
        tag("h3", f"Replica {index}"),
        tag(
            "p",
            f"{where}; region ",
            tag("span", replica.region_name, class_="mono"),
            f", {figures.size(replica.region_bytes)}",
        ),
        tag("div", [_slot(plan, w, (index, w.rank) in failed) for w in workers], class_="slots"),
        class_="replica",
    )


def _slot(plan: Plan, worker: WorkerPlan, failed: bool) -> Html:
    topology = plan.topology
    axes = [
        f"{name} {at}"
        for name, at, of in (
            ("PP", worker.pp_rank, topology.pp_size),
            ("PCP", worker.pcp_rank, topology.pcp_size),
            ("TP", worker.tp_rank, topology.tp_size),
            ("DCP", worker.dcp_rank, topology.dcp_size),
        )
        if of > 1
    ]
    return tag(
        "div",
        tag("b", f"slot {worker.slot}", " (failed)" if failed else ""),
        tag("div", f"rank {worker.rank}", f" · {' '.join(axes)}" if axes else ""),
        tag("div", f"{worker.device}:{worker.device_index}", class_="soft"),
        class_="slot failed" if failed else "slot",
    )
