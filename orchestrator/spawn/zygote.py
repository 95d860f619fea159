"""A process that imports torch once and forks every replica's agent from itself.

Importing torch takes seconds; forking takes milliseconds. The zygote never makes a CUDA context,
starts no thread and no process group, so its forks are clean. It is driven by one line a command
on standard input (`stop`, `kill`; end of file means that the launcher is gone) and answers one JSON
object a line on standard output (`{"replica", "pid"}` and `{"replica", "exit"}`).

When the launcher dies in any way, the zygote kills every agent, which takes their workers along,
and removes what the run left outside its results: nothing outlives the launcher by more than an
instant. When an agent dies, its workers become children of the zygote, which ends those that the
kernel has not ended with their agent.

For a sweep the process that has imported torch is kept (`Nursery`), and forks the zygote of each
run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

from orchestrator.rundir import RunDir
from orchestrator.spawn.lifeline import (
    adopt_orphans,
    bury_orphans,
    default_signals,
    die_with_parent,
)

TRACKER_WAIT_S = 1.0
_REQUEST_BYTES: Final = 1 << 20


class Zygote:
    """Forks agents, passes signals on to them, tells of their ends."""

    def __init__(self, plan_path: Path, start_method: str, replicas: list[int]) -> None:
        self._plan_path = plan_path
        self._start_method = start_method
        self._waiting = replicas
        self._agents: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        for replica in self._waiting:
            self._fork_agent(replica)
        while self._agents:
            for key, _ in selector.select(timeout=0.5):
                if key.fd == 0:
                    self._obey(os.read(0, 4096))
                else:
                    woken = os.read(self._wake_read, 4096)
                    if signal.SIGTERM in woken or signal.SIGINT in woken:
                        self._signal_agents(signal.SIGKILL)
            self._reap()

    def _obey(self, commands: bytes) -> None:
        if not commands:  # the launcher is gone
            self._signal_agents(signal.SIGKILL)
            while self._agents:
                self._agents.pop(os.wait()[0], None)
        elif b"kill" in commands:
            self._signal_agents(signal.SIGKILL)
        elif b"stop" in commands:
            self._signal_agents(signal.SIGTERM)

    def _signal_agents(self, signum: int) -> None:
        for pid in self._agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _reap(self) -> None:
        ended = []
        while self._agents:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            replica = self._agents.pop(pid, None)
            if replica is not None:
                ended.append({"replica": replica, "exit": os.waitstatus_to_exitcode(status)})
        if ended:
            bury_orphans(lambda child: child.pid not in self._agents, TRACKER_WAIT_S)
        for message in ended:
            _say(message)

    def _fork_agent(self, replica: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become_agent(parent, replica)
                code = self._run_agent(replica)
            except BaseException as error:
                traceback.print_exc()
                self._tell_failure(replica, error)
            finally:
                sys.stderr.flush()
                os._exit(code)
        self._agents[pid] = replica
        _say({"replica": replica, "pid": pid})

    def _become_agent(self, parent: int, replica: int) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        default_signals()
        die_with_parent(parent)
        os.close(self._wake_read)
        os.close(self._wake_write)
        # The launcher's pipes must not be held open by anything but the zygote.
        null = os.open(os.devnull, os.O_RDONLY)
        log = RunDir(self._plan_path.parent).replica(replica).agent_log
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)

    def _run_agent(self, replica: int) -> int:
        from orchestrator.plan import read_plan
        from orchestrator.spawn.agent import run_agent

        return run_agent(read_plan(self._plan_path), replica, self._start_method)

    def _tell_failure(self, replica: int, error: BaseException) -> None:
        from orchestrator.spawn.agent import write_agent_failure

        with contextlib.suppress(OSError):
            write_agent_failure(RunDir(self._plan_path.parent).replica(replica), error)


def _say(message: dict[str, int]) -> None:
    # The launcher may be gone; then there is nobody to tell, and end of file will say so.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


class Nursery:
    """Forks a zygote for each run that the launcher asks for over a socket.

    A request is one message with the zygote's standard input, output and error as descriptors; it
    is answered with `{"pid"}`, and with `{"pid", "exit"}` when that zygote has ended. End of file
    means that the launcher needs no more.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                    continue
                data, streams, _, _ = socket.recv_fds(self._socket, _REQUEST_BYTES, 3)
                if not data:
                    return
                self._fork(json.loads(data), streams)

    def _fork(self, request: dict[str, Any], streams: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become_zygote(parent, request["temporary"], streams)
                _run(_parser().parse_args(request["arguments"]))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        for descriptor in streams:
            os.close(descriptor)
        self._tell({"pid": pid})

    def _become_zygote(self, parent: int, temporary: str, streams: list[int]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        default_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        die_with_parent(parent, signal.SIGTERM)
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ["TMPDIR"] = temporary

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._tell({"pid": pid, "exit": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps(message).encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher-pid", type=int, required=True)
    parser.add_argument("--nursery", type=int, help="a socket over which runs are asked for")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--run-id")
    parser.add_argument("--start-method", choices=("fork", "spawn"))
    parser.add_argument("--replicas", help="comma-separated data_parallel_index")
    parser.add_argument("--disk", action="append", default=[], help="of the filesystem tier")
    return parser


def main() -> None:
    args = _parser().parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    die_with_parent(args.launcher_pid, signal.SIGTERM)

    # Heavy imports happen here, once, before any fork.
    import orchestrator.spawn.agent  # noqa: F401

    if args.nursery is None:
        _run(args)
    else:
        Nursery(args.nursery).run()


def _run(args: argparse.Namespace) -> None:
    """Be the zygote of one run, to its end."""
    from orchestrator.clean import remove_leftovers

    replicas = [int(index) for index in args.replicas.split(",")]
    run_dir = RunDir(args.plan.parent)
    adopt_orphans()
    try:
        # TMPDIR; not made before there is somebody to remove it.
        run_dir.temporary(args.run_id).mkdir(mode=0o700)
        tempfile.tempdir = None
        Zygote(args.plan, args.start_method, replicas).run()
    finally:
        bury_orphans(lambda _: True, TRACKER_WAIT_S)
        remove_leftovers(run_dir, args.run_id, args.disk)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Taking a process apart that has torch in it takes longer than a second; there is nothing to
    # save.
    os._exit(0)
