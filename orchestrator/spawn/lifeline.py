"""Ties a process's life to its parent's, so that a killed parent leaves no orphan.

`PR_SET_PDEATHSIG` alone has two holes. A parent that dies before the call is never noticed, hence
the check of the parent's pid behind it. And a child that is still starting has not made the call
yet, hence `adopt_orphans`: the kernel hands what a dead descendant leaves to the process that asked
for it, which ends it with `bury_orphans`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.01
_UNKILLABLE_S = 2.0

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel for `signum` when the parent dies; exit at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, "PR_SET_PDEATHSIG", signum)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans(wanted: bool = True) -> None:
    """Become, or cease to be, the parent of whatever a dead descendant leaves behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, "PR_SET_CHILD_SUBREAPER", int(wanted))


def bury_orphans(is_orphan: Callable[[psutil.Process], bool], timeout_s: float) -> None:
    """Kill and reap every child of this process of which `is_orphan` says so.

    A resource tracker of multiprocessing is given `timeout_s` to end by itself: it removes the
    semaphores of the dead when it sees that they are dead. What the kernel cannot kill, because it
    waits for a device, is left after a while: there is nothing else to be done about it.
    """
    until_s = time.monotonic() + timeout_s
    known: set[int] = set()  # a dead one tells nothing about itself any more
    while time.monotonic() < until_s + _UNKILLABLE_S:
        children = psutil.Process().children()
        orphans = [child for child in children if child.pid in known or is_orphan(child)]
        if not orphans:
            return
        for child in orphans:
            known.add(child.pid)
            if time.monotonic() >= until_s or not _is_resource_tracker(child):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(_LOOK_S)


def default_signals() -> None:
    """Undo handlers that a fork inherited: one written in Python waits until a call into a
    library is over, and a worker that waits for its peers would not end when it is told to."""
    for signum in (*TERMINATION_SIGNALS, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _prctl(option: int, name: str, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({name}): {os.strerror(error)}")
