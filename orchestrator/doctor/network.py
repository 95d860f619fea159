"""Can the processes of a replica find each other, and are the ports of a run free and reachable?"""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import closing
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.host import local_replicas
from orchestrator.doctor.notes import Notes
from orchestrator.plan import Plan
from orchestrator.ports import port_ranges

_TIMEOUT_S: Final = 3.0
_MOST_PORTS: Final = 64
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_network(plan: Plan, notes: Notes, stop: Stop) -> None:
    """Checks `rendezvous` and `ports`."""
    _check_rendezvous(plan, notes)
    _check_ports(plan, notes, stop)


def _check_rendezvous(plan: Plan, notes: Notes) -> None:
    """Make the store by which torchrun's agents meet, and write and read a key."""
    host, _, port = local_replicas(plan)[0].rdzv_endpoint.rpartition(":")
    notes.doing(f"resolving {host}")
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        notes.fail(
            "rendezvous",
            f"the name {host} is not known here: {error.strerror}",
            "the address at which the agents of a replica meet",
            f"give {host} an address, in /etc/hosts or in the DNS",
        )
        return
    if plan.topology.nodes_per_replica > 1:
        notes.ok("rendezvous", f"{host} is {address}; whether it is reached, a run will tell")
        return
    notes.doing(f"meeting at {host}")
    timeout = timedelta(seconds=_TIMEOUT_S)
    word = secrets.token_hex(8)
    try:
        server = TCPStore(host, int(port), is_master=True, timeout=timeout, wait_for_workers=False)
        client = TCPStore(host, server.port, is_master=False, timeout=timeout)
        client.set("kvquay", word)
        found = server.get("kvquay").decode()
    # torch's errors are of many kinds, and none is documented.
    except Exception as error:
        notes.fail(
            "rendezvous",
            f"no store at {host}:{port}: {str(error).splitlines()[0]}",
            "a store by which the workers of a replica find each other",
            f"let {host} be 127.0.0.1 in /etc/hosts, let the firewall pass the loopback, and set "
            "spawn.rdzv_port=0 to have a free port chosen",
        )
        return
    if found != word:
        notes.fail(
            "rendezvous",
            f"somebody else answers at {host}:{port}",
            "the store that was just made",
            "set spawn.rdzv_port=0",
        )
        return
    where = f"{host}:{port}" if int(port) else f"{host}, at ports that the system chooses"
    notes.ok("rendezvous", f"workers meet at {where}")


def _check_ports(plan: Plan, notes: Notes, stop: Stop) -> None:
    """Listen at every port of this node's replicas, and connect to it from here."""
    ranges = port_ranges(plan.settings, plan.topology.data_parallel_size)
    if not ranges:
        notes.ok("ports", "none is asked for; the system chooses those of the rendezvous")
        return
    indices = [replica.data_parallel_index for replica in local_replicas(plan)]
    for each in ranges:
        numbers = [each.first + index for index in indices][:_MOST_PORTS]
        notes.doing(f"trying the ports of {each.key}")
        wrong: dict[str, list[int]] = {}
        for number in numbers:
            if stop.asked():
                return
            if (why := _why_not(each.host, number)) is not None:
                wrong.setdefault(why, []).append(number)
        told = f"{each.key}: {each.host}, ports {numbers[0]} to {numbers[-1]}"
        if not wrong:
            notes.ok("ports", f"{told} are free and reached")
        for why, ports in wrong.items():
            notes.fail(
                "ports",
                f"{each.key}: {', '.join(map(str, ports))} of {each.host}: {why}",
                "ports that are free and can be reached",
                f"choose other ports, or {each.off}",
            )


def _why_not(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "somebody listens there"
        return f"cannot be listened at: {error.strerror}"
    with closing(listener):
        try:
            socket.create_connection((_ANY.get(host, host), port), _TIMEOUT_S).close()
        except OSError as error:
            return f"cannot be reached from this machine: {error.strerror or 'no answer'}"
    return None
