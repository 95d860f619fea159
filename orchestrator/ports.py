"""Which TCP ports a run takes: each kind has one for each replica, from a first one on."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from orchestrator.problems import Problem
from orchestrator.schema import Config
from orchestrator.topology import Topology

_LARGEST: Final = 65535
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports of one kind. `off` says what to set to take none."""

    key: str
    first: int
    count: int
    host: str
    off: str

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def shares_with(self, other: PortRange) -> bool:
        return self.first <= other.last and other.first <= self.last


def port_of(first: int, data_parallel_index: int) -> int:
    """A replica's own port of a kind; 0 where the kind is off."""
    return first + data_parallel_index if first else 0


def port_ranges(config: Config, replicas: int) -> list[PortRange]:
    """Every kind that is on and in range by itself."""
    metrics, events = config.metrics, config.events
    found = [
        ("spawn.rdzv_port", config.spawn.rdzv_port, _LOOPBACK, "let the system choose free ones"),
        ("metrics.port", metrics.port, metrics.host, "have no metrics"),
        ("events.port", events.port, events.host, "have no events"),
    ]
    if events.port:
        found.append(
            ("events.replay_port", events.replay_port, events.host, "have no events sent again")
        )
    return [
        PortRange(key, first, replicas, host, f"set {key}=0 and {off}")
        for key, first, host, off in found
        if 1 <= first <= _LARGEST
    ]


def check_ports(config: Config, topology: Topology) -> Iterator[Problem]:
    """Ranges that do not fit, or share a port, whatever the machine."""
    ranges = port_ranges(config, topology.data_parallel_size)
    for each in ranges:
        if each.last > _LARGEST:
            yield Problem(
                each.key,
                each.first,
                f"each replica takes one port: {each.first} to {each.last} must lie in 1 to "
                f"{_LARGEST}",
                each.off,
            )
    for one, other in combinations(ranges, 2):
        if one.shares_with(other):
            apart = max(one.last, other.last) + 1
            yield Problem(
                other.key,
                other.first,
                f"each replica takes one port: {other.first} to {other.last} and those of "
                f"{one.key}, {one.first} to {one.last}, are the same in part",
                f"set {other.key}={apart}" if apart + other.count <= _LARGEST else other.off,
            )


def check_replay(config: Config) -> Iterator[Problem]:
    """Who asks for events again has to have missed some."""
    if config.events.replay_port and not config.events.port:
        yield Problem(
            "events.replay_port",
            config.events.replay_port,
            "is where events are asked for again, and events.port=0 has none",
            "set events.port, or events.replay_port=0",
        )


def check_free(config: Config, topology: Topology) -> Iterator[Problem]:
    """Ports of this node's replicas that somebody has on this machine, or addresses that it has
    not."""
    local = topology.data_parallel_size_local
    skip = config.spawn.node_rank * local
    for each in port_ranges(config, topology.data_parallel_size):
        ports = range(each.first + skip, each.first + skip + local)
        if ports.stop > _LARGEST + 1:
            continue
        if each.host != _LOOPBACK and not _can_bind(each.host, 0):
            key = each.key.partition(".")[0] + ".host"
            limit = "is not an address of this machine"
            yield Problem(key, each.host, limit, f"set {key}={_LOOPBACK}, or 0.0.0.0 for all")
            continue
        busy = [port for port in ports if not _can_bind(each.host, port)]
        if busy:
            yield Problem(
                each.key,
                each.first,
                f"ports in use on this machine: {_listed(busy)}",
                f"choose other ports, or {each.off}",
            )


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        return False
    return True


def _listed(ports: Iterable[int]) -> str:
    return ", ".join(map(str, ports))
