"""A real server as a child of the tests: started, paused, killed, and surely gone at the end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.kit import REPO

START_S: Final = 60.0
_LOOK_S: Final = 0.02
# Below the range from which the kernel takes ports of outgoing connections: a server that is
# restarted on its port finds it free.
_PORTS: Final = range(20_000, 32_000)


class ServerFailed(RuntimeError):
    """A server cannot be started, or ended by itself."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nobody listens now."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
                if len(found) == count:
                    return found
    raise ServerFailed(f"no {count} ports are free between {_PORTS.start} and {_PORTS.stop}")


def find_program(name: str, package: str) -> Path:
    """A program of a development dependency. Raises ServerFailed where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerFailed(
            f"{name} is neither at {beside} nor on the PATH; install it with pip install {package}"
        )
    return Path(found)


class ServerProcess:
    """One server in a directory of its own; a context manager.

    `directory` and what stands in it stay over `kill` and `start`, and go with `close`, or with
    the test process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.leaves: list[Path] = []  # what it makes elsewhere and leaves when it is killed
        self.directory = Path(tempfile.mkdtemp(prefix=f"kvquay-{name}-"))
        self._supervisor: subprocess.Popen[str] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    def start(
        self,
        command: Sequence[str | Path],
        is_up: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run `command` and wait until `is_up`, which may raise OSError as long as it is not."""
        with open(self.log, "ab") as log:
            self._supervisor = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.servers.supervise"),
                    *(str(os.getpid()), *map(str, (self.directory, *self.leaves))),
                    *("--", *map(str, command)),
                ],
                cwd=REPO,
                # A test's credentials are for its clients: a server would take them for its own.
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        told = self._supervisor.stdout.readline()
        if not told:
            raise ServerFailed(f"{self.name} was not started\n{self.last_words()}")
        self._pid = int(told)
        until_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if is_up():
                    return
            if self._supervisor.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise ServerFailed(f"{self.name} does not come up\n{self.last_words()}")
            time.sleep(_LOOK_S)

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended; a paused one is running."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def pause(self) -> None:
        """From now on it answers nothing, and its connections stay open."""
        os.kill(self._pid, signal.SIGSTOP)
        while any(state not in "Tt" for state in self._thread_states()):
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        states = []
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. May be called again."""
        if self._supervisor is None:
            return
        # Unless the supervisor has waited for it, the pid is still this server's.
        if self._supervisor.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._supervisor.wait()
        assert self._supervisor.stdout is not None
        self._supervisor.stdout.close()
        self._supervisor = None
        for path in self.leaves:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def last_words(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-4000:]
        return ""


def accepts(port: int) -> bool:
    """Whether somebody listens. Raises OSError if not."""
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
