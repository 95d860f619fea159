"""Another process that has the same storage open: it is told what to do, and may be killed.

A fresh interpreter, not a fork: threads and connections of the parent do not reach it, and a tier
is opened there as in any other engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

from backends.block import BlockKey
from backends.testing.bench import TierBench
from backends.testing.harness import Opener
from backends.testing.rows import RowBuffer, make_context
from backends.tier.base import Lookup, Outcome

_PR_SET_PDEATHSIG: Final = 1
_BOOT: Final = (
    "import sys, pickle; fd = int(sys.argv[1]); sys.path[:] = pickle.loads(bytes.fromhex("
    "sys.argv[2])); from backends.testing.peer import serve; serve(fd)"
)


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What the other process opens. `opener` is picklable."""

    opener: Opener
    rows: int
    row_bytes: int
    fingerprint: bytes
    patience_s: float
    data_parallel_index: int = 1
    data_parallel_size: int = 2


class PeerFailed(AssertionError):
    """The other process raised, or ended where it should not have."""


class Peer:
    """A handle on the other process. A context manager: it never outlives the test."""

    def __init__(self, setup: PeerSetup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), pickle.dumps(sys.path).hex()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._patience_s = setup.patience_s
        self._connection.send(setup)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def ready(self) -> Peer:
        """Wait until the tier is open there."""
        self._answer()
        return self

    def store(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        outcomes: list[Outcome] = self._ask("store", tuple(keys))
        return outcomes

    def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        outcomes: list[Outcome] = self._ask("load", tuple(keys))
        return outcomes

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        answers: list[Lookup] = self._ask("lookup", tuple(keys))
        return answers

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self._ask("counters")
        return counters

    def close(self) -> None:
        """Close the tier there in good order, and end."""
        self._ask("close")
        self._process.wait(self._patience_s)

    def begin(self, method: str, *arguments: object) -> None:
        """Start one of the above; `end` waits for its answer."""
        self._connection.send((method, arguments))

    def end(self) -> Any:
        return self._answer()

    def store_and_die(self, keys: Sequence[BlockKey], moment: float) -> list[BlockKey]:
        """Store a third of these, then the others, and be killed on the way; keys told DONE.

        `moment` is when: 0 as the others are submitted, 1 when they should be stored, by the time
        that the first third took. The process dies as by SIGKILL, of a timer's signal, because
        another process would often come too late to kill it.
        """
        self.begin("store_and_die", tuple(keys), moment)
        done: list[BlockKey] = []
        # The last message may have been cut off in the middle.
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while self._connection.poll(2 * self._patience_s + 30):
                kind, value = self._connection.recv()
                if kind == "error":
                    raise PeerFailed(value)
                done += value
        if self._process.wait(self._patience_s) != -signal.SIGALRM:
            raise PeerFailed(f"the other process ended with {self._process.returncode}")
        return done

    def kill(self) -> None:
        """SIGKILL, whatever it is doing. May be called again."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        self.begin(method, *arguments)
        return self._answer()

    def _answer(self) -> Any:
        # The bench over there loses patience first, and says with what.
        if not self._connection.poll(2 * self._patience_s + 30):
            raise PeerFailed("the other process does not answer")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            code = self._process.wait(self._patience_s)
            raise PeerFailed(f"the other process ended with exit status {code}") from None
        if kind == "error":
            raise PeerFailed(value)
        return value


def serve(fd: int) -> None:
    """The other process: opens the tier, does what it is told, ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = Connection(fd)
    try:
        setup: PeerSetup = connection.recv()
        rows = RowBuffer(setup.rows, setup.row_bytes, setup.fingerprint)
        context = make_context(
            rows,
            data_parallel_index=setup.data_parallel_index,
            data_parallel_size=setup.data_parallel_size,
        )
        bench = TierBench(setup.opener(context), rows, setup.patience_s)
        connection.send(("ready", None))
        while True:
            method, arguments = connection.recv()
            if method == "store_and_die":
                _store_and_die(connection, bench, *arguments)
            elif method == "counters":
                connection.send(("answer", bench.tier.counters()))
            else:
                connection.send(("answer", getattr(bench, method)(*arguments)))
            if method == "close":
                return
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:
        connection.send(("error", f"in the other process: {type(error).__name__}: {error}"))
        raise


def _store_and_die(
    connection: Connection, bench: TierBench, keys: Sequence[BlockKey], moment: float
) -> None:
    first = len(keys) // 3
    rows = bench.take(len(keys))
    for row, key in zip(rows, keys, strict=True):
        bench.rows.fill(row, key)
    job = bench.submit_rows(keys[:first], rows[:first])
    began_s = time.monotonic()
    outcomes = zip(keys[:first], bench.outcomes(job), strict=True)
    took_s = (time.monotonic() - began_s) * (len(keys) - first) / first
    connection.send(("answer", [key for key, outcome in outcomes if outcome is Outcome.DONE]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    job = bench.submit_rows(keys[first:], rows[first:])
    signal.setitimer(signal.ITIMER_REAL, max(moment * took_s, 1e-6))
    bench.wait(job)
    time.sleep(bench.patience_s)
    raise PeerFailed("a timer's signal did not end the process")
