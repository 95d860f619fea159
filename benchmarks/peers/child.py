"""A way's process: started in the peer's environment, asked over pipes, surely gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.commands import clean_environment, last_line

ANSWER_S: Final = 180.0
_CLOSE_S: Final = 30.0


class WayFailed(RuntimeError):
    """A way cannot go on; the message is one line that says why."""


class Child:
    """Speaks what `peer_protocol` says. What its libraries print goes to `log`."""

    def __init__(
        self, python: Path, script: Path, directory: Path, log: Path, more: Mapping[str, str]
    ) -> None:
        """`directory` is where it may put what it keeps for itself; `more` are environment
        variables. Credentials of the caller's are not passed on."""
        self._log = log
        self._unread = b""
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                cwd=directory,
                env=clean_environment({"TMPDIR": str(directory), **more}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                # It ends when the driver says so, and takes what it has started with it.
                start_new_session=True,
            )

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **more: Any) -> dict[str, Any]:
        """Its answer. Raises WayFailed: it says that it cannot, says nothing, or is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(do, timeout_s))
        if "error" in answer:
            raise WayFailed(f"{do}: {answer['error']}")
        return answer

    def _line(self, do: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise WayFailed(f"{do}: no answer in {timeout_s:.0f} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise WayFailed(f"{do}: it ended; {self._last_words()}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return last_line(self._log.read_text(encoding="utf-8", errors="replace"))

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None and not self._ended()

    def close(self) -> None:
        """Let it end, or end it; also what it has started. May be called again."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(WayFailed, ValueError):
            self.ask("close", timeout_s=_CLOSE_S)
        until_s = time.monotonic() + 2
        while not self._ended() and time.monotonic() < until_s:
            time.sleep(0.01)
        self.kill()

    def _ended(self) -> bool:
        # Not waited for yet: until then its group's number is nobody else's.
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._process.pid, how) is not None

    def kill(self) -> None:
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
