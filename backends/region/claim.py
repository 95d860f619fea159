"""One living engine per engine_id and user, also after its shm file has lost its name.

The claim is a listening socket in the kernel's abstract namespace: no file, only one process can
bind it, the kernel says which one did, and it is gone when that process (and what it forked) is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import time

from backends import machine
from backends.errors import RegionError

_BACKLOG = 4096
# A dead engine's workers end after it, and who looks at its descriptors keeps them for a moment.
_LOOKS = 20
_LOOK_S = 0.05
_PEER_CREDENTIALS = struct.Struct("3i")


def claim(engine_id: str) -> socket.socket:
    """Hold `engine_id` until the socket is closed. Raises RegionError with who holds it.

    A living holder is told at once; one that is dead or cannot be asked has a second to let go.
    """
    holder = ""
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_S)
        held = _bound(engine_id)
        if held is not None:
            return held
        holder, alive = _holder(engine_id)
        if alive:
            break
    raise RegionError(
        f"engine_id {engine_id!r} is in use: another engine with it runs: {holder}. Two engines "
        "never share a region; end that one or choose another engine_id"
    )


def _bound(engine_id: str) -> socket.socket | None:
    """The claim's socket; None where another has its address. Raises RegionError."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(_address(engine_id))
        held.listen(_BACKLOG)
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RegionError(
            f"engine_id {engine_id!r} cannot be claimed: {error.strerror}; backing shm needs Unix "
            "sockets, use backing memfd"
        ) from error
    return held


def describe_process(pid: int) -> str:
    """Pid, start time and command of a process, as far as they can be seen."""
    parts = [f"pid {pid}"]
    ticks = machine.process_start_time(pid)
    started = None if ticks is None else machine.process_started_at_s(ticks)
    if started is not None:
        parts.append(f"started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(started))}")
    command = machine.process_command(pid)
    if command:
        parts.append(f"command {command[:200]!r}")
    return ", ".join(parts)


def _address(engine_id: str) -> bytes:
    """Hashed, since the kernel takes 107 bytes; per user, so that nobody can squat another's."""
    digest = hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()
    return f"\0kvquay.engine.{os.geteuid()}.{digest}".encode()


def _holder(engine_id: str) -> tuple[str, bool]:
    """Who holds the claim, and whether it is known to live."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_address(engine_id))
            size = _PEER_CREDENTIALS.size
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        except OSError:
            return "it starts or ends just now", False
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    if pid == 0:
        return f"a process of uid {uid} in another container", True
    if machine.process_start_time(pid) is None:
        return f"pid {pid} (dead) held it and a child that it forked still does", False
    return describe_process(pid), True
