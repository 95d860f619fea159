"""`region.scope: node`, as the plan has it: what a leader, and each worker, opens of the node's
index. With `region.scope: replica` there is none, and nothing of it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.region.region import Region
from orchestrator.plan import Plan

if TYPE_CHECKING:
    from backends.region.node.reader import NodeReader
    from backends.stack.node import NodeRows


def open_rows(plan: Plan, index: int, region: Region) -> NodeRows | None:
    """The leader's part of the index; its stack closes it. Raises RegionError."""
    spec = plan.node_index(index)
    if spec is None:
        return None
    from backends.region.node.file import NodeFile
    from backends.stack.node import NodeRows

    file = NodeFile.join(spec, writable=True)
    try:
        return NodeRows(file, plan.replicas[index].data_parallel_rank_local, region.handle())
    except BaseException:
        file.close()
        raise


def open_reader(plan: Plan, index: int, slot: int) -> NodeReader | None:
    """A worker's way to the rows of the other replicas of its node. Raises RegionError."""
    spec = plan.node_index(index)
    if spec is None:
        return None
    from backends.region.node.file import NodeFile
    from backends.region.node.reader import NodeReader

    local = plan.replicas[index].data_parallel_rank_local
    specs = [plan.region_spec(index - local + other) for other in range(spec.replicas)]
    file = NodeFile.join(spec, writable=False)
    return NodeReader(file, specs, local, slot, bytes.fromhex(plan.fingerprint))
