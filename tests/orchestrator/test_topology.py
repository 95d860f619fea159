"""Where every rank stands, whatever the sizes of the axes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.topology import MAX_WORKERS, Placement, Topology, check_topology

AXES = {
    "data_parallel_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "tp_size": 1,
    "dcp_size": 1,
    "nnodes": 1,
    "devices_per_node": None,
}


def made(**sizes: Any) -> Topology:
    topology, problems = check_topology(**(AXES | sizes))
    assert problems == []
    assert topology is not None
    return topology


def refused(**sizes: Any) -> dict[str, str]:
    """The texts of the problems, by key."""
    topology, problems = check_topology(**(AXES | sizes))
    assert topology is None
    assert problems
    return {problem.key: str(problem) for problem in problems}


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any deployment that is allowed: whole replicas on a node, or a replica over several."""
    size = st.integers(1, 4)
    dcp = draw(st.integers(1, 3))
    tp = dcp * draw(size)
    pp, pcp = draw(size), draw(size)
    world = pp * pcp * tp
    if draw(st.booleans()):
        nodes_per_replica = draw(st.sampled_from([n for n in range(1, world + 1) if not world % n]))
        replicas = draw(size)
        nnodes = replicas * nodes_per_replica
    else:
        nnodes = draw(size)
        replicas = nnodes * draw(size)
    return made(
        data_parallel_size=replicas,
        pp_size=pp,
        pcp_size=pcp,
        tp_size=tp,
        dcp_size=dcp,
        nnodes=nnodes,
    )


def workers(topology: Topology) -> list[Placement]:
    replicas = range(topology.data_parallel_size)
    return [placement for index in replicas for placement in topology.replica(index)]


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_rank_and_coordinates_are_a_bijection_with_tp_fastest(topology: Topology) -> None:
    placements = list(topology.replica(0))
    assert [p.rank for p in placements] == list(range(topology.world_size))
    coordinates = [(p.pp_rank, p.pcp_rank, p.tp_rank) for p in placements]
    expected = [
        (pp, pcp, tp)
        for pp in range(topology.pp_size)
        for pcp in range(topology.pcp_size)
        for tp in range(topology.tp_size)
    ]
    assert coordinates == expected


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_no_two_workers_of_a_replica_on_a_node_share_a_local_rank(topology: Topology) -> None:
    places = [(p.data_parallel_index, p.node_rank, p.local_rank) for p in workers(topology)]
    assert len(set(places)) == len(places)
    by_node: dict[tuple[int, int], list[int]] = {}
    for index, node, local_rank in places:
        by_node.setdefault((index, node), []).append(local_rank)
    for local_ranks in by_node.values():
        assert local_ranks == list(range(topology.local_world_size))


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_every_node_has_the_same_load_and_none_is_empty(topology: Topology) -> None:
    load = Counter(p.node_rank for p in workers(topology))
    assert set(load) == set(range(topology.nnodes))
    assert set(load.values()) == {topology.workers_per_node}


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_replicas_of_a_node_are_numbered_from_0(topology: Topology) -> None:
    by_node: dict[int, set[int]] = {}
    for p in workers(topology):
        by_node.setdefault(p.node_rank, set()).add(p.data_parallel_rank_local)
    for numbers in by_node.values():
        assert numbers == set(range(topology.data_parallel_size_local))


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_a_dcp_group_is_a_run_of_tp_ranks(topology: Topology) -> None:
    for p in topology.replica(0):
        assert p.dcp_rank == p.tp_rank % topology.dcp_size
        first = p.tp_rank - p.dcp_rank
        assert first % topology.dcp_size == 0
        assert first + topology.dcp_size <= topology.tp_size


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_a_replica_stands_on_consecutive_nodes_from_its_first(topology: Topology) -> None:
    for index in range(topology.data_parallel_size):
        nodes = sorted({p.node_rank for p in topology.replica(index)})
        first = topology.first_node(index)
        assert nodes == list(range(first, first + topology.nodes_per_replica))


def test_dp_is_never_in_a_rank_or_in_the_world_size() -> None:
    topology = made(data_parallel_size=3, tp_size=2)
    assert topology.world_size == 2
    assert [p.rank for p in topology.replica(2)] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_nodes_that_split_nothing_evenly_are_refused(replicas: int, nnodes: int) -> None:
    assume(replicas % nnodes and nnodes % replicas)
    assert "spawn.nnodes" in refused(data_parallel_size=replicas, nnodes=nnodes)


def test_a_replica_that_cannot_be_spread_evenly_over_its_nodes_is_refused() -> None:
    text = refused(tp_size=4, pp_size=2, nnodes=3)["spawn.nnodes"]
    assert "3" in text
    assert "world_size = PP x PCP x TP = 2 x 1 x 4 = 8" in text


def test_every_size_below_1_is_told_at_once() -> None:
    found = refused(data_parallel_size=0, pp_size=-1, tp_size=0, nnodes=0)
    assert set(found) == {
        "parallel.data_parallel_size",
        "parallel.pipeline_parallel_size",
        "parallel.tensor_parallel_size",
        "parallel.nodes",
    }


def test_a_dcp_size_that_does_not_divide_tp_is_told_with_those_that_do() -> None:
    text = refused(tp_size=6, dcp_size=4)["parallel.decode_context_parallel_size"]
    assert "parallel.tensor_parallel_size = 6" in text
    assert "choose one of 1, 2, 3, 6" in text


@pytest.mark.parametrize(("devices", "fits"), [(8, True), (7, False)])
def test_a_node_needs_a_device_for_each_of_its_workers(devices: int, fits: bool) -> None:
    sizes = {"data_parallel_size": 4, "tp_size": 4, "nnodes": 2, "devices_per_node": devices}
    if fits:
        assert made(**sizes).workers_per_node == 8
    else:
        assert "need 8 devices" in refused(**sizes)["spawn.devices_per_node"]


def test_more_workers_than_can_be_planned_are_refused_at_once() -> None:
    text = refused(data_parallel_size=2**20, tp_size=2**20)["parallel.data_parallel_size"]
    assert str(MAX_WORKERS) in text
