"""Process groups → who this worker is.

`Group` is the little that the engine needs of a process group. `TorchGroup` is the real one,
`ThreadGroup` joins threads of one process (`spawn=inline`). Nothing is pickled: objects travel as
JSON.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from backends.errors import KvquayError
from orchestrator.plan import Plan, WorkerPlan

Int64Array = npt.NDArray[np.int64]


class GroupError(KvquayError):
    """The process group does not agree with the plan."""


class Group(Protocol):
    """One replica's process group. Every call is collective: all ranks make it, in one order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def broadcast(self, values: Int64Array) -> None:
        """Rank 0's values into everybody's array, in place."""

    def all_reduce_min(self, values: Int64Array) -> None:
        """The smallest value over the ranks, element by element, in place."""

    def all_gather_json(self, value: Any) -> list[Any]:
        """Everybody's value (plain JSON types), by rank."""


class TorchGroup:
    """The default process group of `torch.distributed`, over gloo."""

    def __init__(self, timeout_s: float) -> None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def broadcast(self, values: Int64Array) -> None:
        dist.broadcast(torch.from_numpy(values), src=0)

    def all_reduce_min(self, values: Int64Array) -> None:
        dist.all_reduce(torch.from_numpy(values), op=dist.ReduceOp.MIN)

    def all_gather_json(self, value: Any) -> list[Any]:
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.size]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.size] = torch.from_numpy(data.copy())
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def close(self) -> None:
        dist.destroy_process_group()


class ThreadGroups:
    """Makes the groups of one replica whose workers are threads of this process."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._slots: list[Any] = [None] * size

    def member(self, rank: int) -> ThreadGroup:
        return ThreadGroup(rank, self)

    def exchange(self, rank: int, value: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Everybody puts a value, everybody reads all of them, nobody goes on before that."""
        self._slots[rank] = value
        self._barrier.wait()
        result = read(self._slots)
        self._barrier.wait()
        return result

    def abort(self) -> None:
        """Wake everybody who waits, with an error: a worker has failed."""
        self._barrier.abort()


class ThreadGroup:
    """One thread's place in a `ThreadGroups`."""

    def __init__(self, rank: int, groups: ThreadGroups) -> None:
        self.rank = rank
        self.size = groups.size
        self._groups = groups

    def broadcast(self, values: Int64Array) -> None:
        values[:] = self._groups.exchange(self.rank, values, lambda slots: slots[0].copy())

    def all_reduce_min(self, values: Int64Array) -> None:
        def smallest(slots: list[Any]) -> Any:
            return np.minimum.reduce(slots)

        values[:] = self._groups.exchange(self.rank, values, smallest)

    def all_gather_json(self, value: Any) -> list[Any]:
        return list(
            self._groups.exchange(
                self.rank, json.dumps(value), lambda slots: [json.loads(slot) for slot in slots]
            )
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker found itself to be, out of its process group alone."""

    rank: int
    local_rank: int
    local_world_size: int
    leader: bool


def find_identity(group: Group, host_identity: str) -> Identity:
    """Exchange host identities over the group; `local_rank` is the place among one's own host's.

    Neither a device ordinal nor an environment variable enters.
    """
    hosts = group.all_gather_json(host_identity)
    peers = [rank for rank, host in enumerate(hosts) if host == host_identity]
    return Identity(
        rank=group.rank,
        local_rank=peers.index(group.rank),
        local_world_size=len(peers),
        leader=group.rank == 0,
    )


def assert_planned(identity: Identity, group_size: int, plan: Plan, index: int) -> WorkerPlan:
    """The plan's entry for this worker, if the process group is what was planned.

    Raises GroupError that names what was found and what was planned.
    """
    topology = plan.topology
    found = (group_size, identity.local_world_size)
    expected = (topology.world_size, topology.local_world_size)
    if found != expected:
        raise GroupError(
            f"replica {index}: the process group has (world_size, local_world_size) = {found}, "
            f"the plan has {expected}; start exactly the planned number of workers on each node"
        )
    planned = plan.replicas[index].workers[identity.rank]
    if planned.local_rank != identity.local_rank:
        raise GroupError(
            f"replica {index}, rank {identity.rank}: is local_rank {identity.local_rank} in its "
            f"process group, the plan has local_rank {planned.local_rank}; start the ranks of one "
            "node next to each other"
        )
    return planned
