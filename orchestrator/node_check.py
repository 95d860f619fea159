"""What `region.scope: node` needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.config import KvGroup
from backends.region.space import check_node_space
from orchestrator.plan import node_index_spec
from orchestrator.problems import Problem
from orchestrator.schema import Config
from orchestrator.topology import Topology

KEY = "region.scope"
_FIX = "set region.scope=replica"


def check_scope(config: Config, topology: Topology) -> Iterator[Problem]:
    """Is there somebody to share with, and an engine that can?"""
    if config.region.scope != "node":
        return
    if topology.data_parallel_size_local == 1:
        nodes = "" if topology.nnodes == 1 else f" on {topology.nnodes} nodes"
        yield Problem(
            KEY,
            "node",
            f"needs several replicas on a node; parallel.data_parallel_size = "
            f"{topology.data_parallel_size}{nodes} puts one there",
            f"{_FIX}, or make parallel.data_parallel_size larger",
        )
    if config.engine.kind == "vllm":
        limit = "is not there yet with engine.kind=vllm: its workers read their own region alone"
        yield Problem(KEY, "node", limit, _FIX)
    if config.action == "simulate" and "stack" in config.simulate.parts:
        limit = "is not simulated: each replica is taken to have its region for itself"
        yield Problem(KEY, "node", limit, f"{_FIX}, or simulate.parts=[policies]")


def check_windows(config: Config, groups: Sequence[KvGroup]) -> Iterator[Problem]:
    """Windows keep rows for some entries and not for others, each replica its own."""
    windowed = [group.name for group in groups if group.sliding_window is not None]
    if config.region.scope == "node" and windowed:
        yield Problem(
            KEY,
            "node",
            f"is not there yet for models with a sliding window: {', '.join(windowed)}",
            f"{_FIX}, or choose a model whose groups all keep everything",
        )


def check_index_room(config: Config, topology: Topology, rows: int) -> Iterator[Problem]:
    """Does the node's index fit this machine's /dev/shm, whatever the regions' backing?"""
    if config.region.scope != "node":
        return
    nbytes = node_index_spec("run", topology, rows).nbytes
    for found in check_node_space([("node index", nbytes)], "shm"):
        message, _, _ = str(found).partition(". What to do: ")
        yield Problem(KEY, "node", message, f"{_FIX}, or make room there")
