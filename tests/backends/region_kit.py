"""What the region's tests share: specs, and real child processes that report back."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from backends.region.spec import RegionSpec

NOBODY = 65534
DIGEST = "0123456789abcdef"
_PR_SET_DUMPABLE = 4


def make_spec(**changes: Any) -> RegionSpec:
    values: dict[str, Any] = {
        "engine_id": f"test{os.getpid()}_dp0",
        "run_id": f"test{os.getpid()}",
        "backing": "memfd",
        "rows": 8,
        "slot_bytes": 8192,
        "local_world_size": 2,
        "geometry_digest": DIGEST,
    }
    return RegionSpec(**(values | changes))


@dataclass
class Child:
    """A forked process that has called its function and now waits to be let go."""

    pid: int
    result: Any
    _release_fd: int
    _ended: bool = False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def let_go(self) -> int:
        """End it in good order; its wait status."""
        # A byte and not the end of the pipe: siblings forked later hold copies of it.
        os.write(self._release_fd, b"x")
        return self.wait()

    def wait(self) -> int:
        if self._ended:
            return 0
        self._ended = True
        return os.waitpid(self.pid, 0)[1]

    def clean_up(self) -> None:
        if not self._ended:
            self.kill()
        os.close(self._release_fd)


def kill_other(pid: int) -> None:
    """Kill a process that is no child of ours; when this returns, all that it held is free."""
    ended = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        if not select.select([ended], [], [], 60)[0]:
            raise TimeoutError(f"process {pid} was killed and has not ended for 60 s")
    finally:
        os.close(ended)


@contextmanager
def child(function: Callable[[], Any], uid: int | None = None) -> Iterator[Child]:
    """Fork; the child calls `function`, sends its result, and lives until let go or killed.

    What the function made stays alive in the child. An exception there is raised here as
    ChildFailed. `uid` is taken on first.
    """
    result_read, result_write = os.pipe()
    release_read, release_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(result_read)
        os.close(release_write)
        _serve(function, uid, result_write, release_read)
    os.close(result_write)
    os.close(release_read)
    started = Child(pid, None, release_write)
    try:
        with os.fdopen(result_read, "rb") as stream:
            if not select.select([stream], [], [], 60)[0]:
                raise TimeoutError(f"child {pid} said nothing for 60 s")
            size = int.from_bytes(stream.read(8))
            raw = stream.read(size)
        if not raw:
            raise ChildFailed(f"child {pid} died: wait status {started.wait()}")
        kind, value = pickle.loads(raw)
        if kind == "error":
            raise ChildFailed(value)
        started.result = value
        yield started
    finally:
        started.clean_up()


class ChildFailed(Exception):
    """The function of a child raised; holds its traceback as text."""


def run_in_child(function: Callable[[], Any], uid: int | None = None) -> Any:
    """The function's result in a process of its own, which has ended when this returns."""
    with child(function, uid) as started:
        status = started.let_go()
        if status:
            raise ChildFailed(f"child ended with wait status {status}")
        return started.result


def _serve(function: Callable[[], Any], uid: int | None, result_fd: int, release_fd: int) -> None:
    keep: Any = None
    try:
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            # A process that changed its user hides its files; a program started anew does not.
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        keep = function()
        value = keep[0] if isinstance(keep, Kept) else keep
        message = pickle.dumps(("value", value))
    except BaseException:
        message = pickle.dumps(("error", traceback.format_exc()))
    with os.fdopen(result_fd, "wb") as stream:
        # With its length, so that the reader waits for no process forked by the function.
        stream.write(len(message).to_bytes(8) + message)
    os.read(release_fd, 1)
    os._exit(0)


class Kept(tuple[Any, ...]):
    """(result, things to keep alive): returned by a child's function that must not lose them."""
