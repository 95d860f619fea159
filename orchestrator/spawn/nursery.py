"""The launcher's end of a process that imports torch once and forks a zygote for each of many runs.

A sweep in one process saves the import for every job but the first. What is forked is the zygote of
one run as it would have been started on its own: same arguments, same pipes, a session of its own.
It dies with the process that forked it, which dies with the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, Protocol

_MESSAGE_BYTES: Final = 4096
_END_S: Final = 0.5


class ReadEnd(Protocol):
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class WriteEnd(Protocol):
    def write(self, data: bytes, /) -> int | None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Process(Protocol):
    """What of `subprocess.Popen` a zygote needs."""

    @property
    def stdin(self) -> WriteEnd | None: ...
    @property
    def stdout(self) -> ReadEnd | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Nursery:
    """Starts its process when the first run needs it, and again where it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.temporary = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def bear(
        self, arguments: Sequence[str], environment: dict[str, str], temporary: str, log: int
    ) -> BornZygote:
        """A zygote with `arguments`, TMPDIR `temporary`, and its errors in the open file `log`.

        `environment` is the same for all runs. The kernel shows that of the first for each
        process that is forked, so that one is told from others by `self.temporary`.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start(environment, temporary, log)
        assert self._process is not None
        assert self._socket is not None
        commands_read, commands = os.pipe()
        answers, answers_write = os.pipe()
        try:
            message = json.dumps({"arguments": [*arguments], "temporary": temporary}).encode()
            # Where it has just died, the pipes' other ends are closed with nobody behind them.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [message], [commands_read, answers_write, log])
        finally:
            os.close(commands_read)
            os.close(answers_write)
        return BornZygote(self._process, self._socket, commands, answers)

    def _start(self, environment: dict[str, str], temporary: str, log: int) -> None:
        self.temporary = temporary
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "orchestrator.spawn.zygote"),
                    *("--launcher-pid", str(os.getpid())),
                    *("--nursery", str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment | {"TMPDIR": temporary},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours

    def close(self) -> None:
        """End it; it may be used again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class BornZygote:
    """One run's zygote, as if it had been started by `subprocess.Popen`.

    Only who forked it can wait for it, and tells of its pid and of its end over the socket.
    """

    def __init__(
        self,
        nursery: subprocess.Popen[bytes],
        messages: socket.socket,
        commands: int,
        answers: int,
    ) -> None:
        self._nursery = nursery
        self._messages = messages
        self._handle: int | None = None
        self._code: int | None = None
        self.stdin: WriteEnd | None = os.fdopen(commands, "wb")
        self.stdout: ReadEnd | None = os.fdopen(answers, "rb", buffering=0)

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        while self._code is None:
            self._messages.settimeout(timeout or (None if timeout is None else 0.0))
            try:
                data = self._messages.recv(_MESSAGE_BYTES)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0) from None
            except ConnectionResetError:
                data = b""
            self._hear(data)
        return self._code

    def _hear(self, data: bytes) -> None:
        if not data:
            self._end(self._nursery.wait() or 1)
            return
        told = json.loads(data)
        if "exit" in told:
            self._end(told["exit"])
        else:
            # It may have ended already, and somebody else may have its pid soon.
            with contextlib.suppress(ProcessLookupError):
                self._handle = os.pidfd_open(told["pid"])

    def _end(self, code: int) -> None:
        self._code = code
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self.poll() is not None:
            return
        if self._handle is None:
            # torch is still being imported, and nothing stands beneath.
            self._nursery.send_signal(signum)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signum)
