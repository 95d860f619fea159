"""Ties a process's life to its parent's, so that a killed parent leaves no orphan.

`PR_SET_PDEATHSIG` alone has a hole: a parent that dies before the call is never noticed. Hence
the check of the parent's pid behind it.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel for `signum` when the parent dies; exit at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
