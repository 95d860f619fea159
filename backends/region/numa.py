"""Memory of one NUMA node for a region: asked for while its pages are being allocated.

Pages of a memory file are placed once, by the policy of the thread that allocates them, so the
policy is set around the reservation and put back afterwards. libnuma is not needed for that.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends import machine
from backends.region import memory
from backends.region.space import headroom_bytes

_MPOL_DEFAULT = 0
_MPOL_PREFERRED = 1
_MPOL_BIND = 2
_MASK_BITS = 1024
# (get_mempolicy, set_mempolicy)
_SYSCALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}


@dataclass(frozen=True, slots=True)
class NumaReport:
    """`asked` is a node or None; `got` is off, single node, bind, preferred or unsupported."""

    asked: int | None
    got: str
    reason: str


def plan(asked: int | None, nbytes: int, nodes: tuple[machine.NumaNode, ...]) -> NumaReport:
    """Which policy suits: bind where the node has room, else prefer it and overflow to others.

    A bind to a node without room would call the OOM killer.
    """
    if asked is None:
        return NumaReport(None, "off", "no node was asked for")
    if len(nodes) < 2:
        return NumaReport(asked, "single node", "this machine has one memory node")
    by_number = {node.node: node for node in nodes}
    if asked not in by_number:
        have = ", ".join(str(number) for number in by_number)
        return NumaReport(asked, "unsupported", f"no such memory node; this machine has {have}")
    if platform.machine() not in _SYSCALLS:
        return NumaReport(asked, "unsupported", f"not known for {platform.machine()}")
    node = by_number[asked]
    if nbytes > node.available_bytes - headroom_bytes(node.total_bytes):
        return NumaReport(asked, "preferred", f"node {asked} has not enough free memory for all")
    return NumaReport(asked, "bind", "")


def replica_node(
    data_parallel_rank_local: int,
    data_parallel_size_local: int,
    nodes: tuple[machine.NumaNode, ...],
) -> int | None:
    """Memory node of a replica: neighbours share one, all get about as many; None for one node."""
    if len(nodes) < 2:
        return None
    return nodes[data_parallel_rank_local * len(nodes) // data_parallel_size_local].node


@contextmanager
def allocating_on(report: NumaReport) -> Iterator[None]:
    """This thread's new pages go where `report` says, inside the block. Raises OSError."""
    if report.got not in ("bind", "preferred") or report.asked is None:
        yield
        return
    mode_before, mask_before = _get_policy()
    _set_policy(_MPOL_BIND if report.got == "bind" else _MPOL_PREFERRED, _mask(report.asked))
    try:
        yield
    finally:
        _set_policy(mode_before, mask_before)


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // bits))()
    mask[node // bits] = 1 << node % bits
    return mask


def _get_policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]]:
    mode = ctypes.c_int()
    mask = _mask(0)
    number, _ = _SYSCALLS[platform.machine()]
    memory.syscall(
        number,
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_void_p(None),
        ctypes.c_ulong(0),
    )
    return mode.value, mask


def _set_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> None:
    _, number = _SYSCALLS[platform.machine()]
    # The default policy wants no mask; the kernel reads one bit less than it is told.
    argument = ctypes.c_void_p(None) if mode == _MPOL_DEFAULT else mask
    memory.syscall(number, ctypes.c_int(mode), argument, ctypes.c_ulong(_MASK_BITS))
