"""The child's side of the peers' benchmark: commands come in, answers go out, a JSON object a line.

It runs in every peer's own environment, so it needs nothing but numpy. A module `peer_*.py` makes a
`Way`, and `serve` does the rest: it fills blocks, times what a way does, and compares every byte of
what came back, outside of the time.

    {"do": "open", "work": {...}}      -> {"versions": {...}, "notes": [...]}
    {"do": "store", "label": "..."}    -> {"seconds": s, "cpu_s": s}
    {"do": "settle"}                   -> {}
    {"do": "load", "label": "..."}     -> {"seconds": s, "cpu_s": s, "came": n, "wrong": n}
    {"do": "close"}                    -> {}

What was open before is closed by `open`. An answer with "error" says why there is none. Whatever a
library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
STAMP_BYTES = 4096
_WORD = 8
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: `count` blocks of `block_bytes` in a step, `depth` of them at a time.

    `capacity_blocks` are all blocks that are kept at a time. `directory` is the way's own.
    """

    way: str
    directory: str
    block_bytes: int
    count: int
    depth: int
    capacity_blocks: int
    options: dict[str, Any] = field(default_factory=dict)


class Blocks:
    """What every block holds: random bytes, and a stamp of label and row in each page."""

    def __init__(self, count: int, block_bytes: int) -> None:
        random = np.random.default_rng(0)
        self._bytes = random.integers(0, 256, (count, block_bytes), np.uint8)

    def write(self, label: str, row: int, into: Bytes) -> None:
        into[:] = self._bytes[row]
        into.reshape(-1, STAMP_BYTES)[:, :_WORD] = _stamp(label, row)

    def matches(self, label: str, row: int, found: Bytes) -> bool:
        if found.size != self._bytes.shape[1]:
            return False
        pages = found.reshape(-1, STAMP_BYTES)
        meant = self._bytes[row].reshape(-1, STAMP_BYTES)
        return bool(
            (pages[:, :_WORD] == _stamp(label, row)).all()
            and np.array_equal(pages[:, _WORD:], meant[:, _WORD:])
        )


def _stamp(label: str, row: int) -> Bytes:
    return np.frombuffer(hashlib.sha256(f"{label} {row}".encode()).digest()[:_WORD], np.uint8)


def keys_of(label: str, count: int) -> list[str]:
    """64 hexadecimal digits for each row."""
    return [hashlib.sha256(f"key {label} {row}".encode()).hexdigest() for row in range(count)]


def aligned(count: int, row_bytes: int) -> Bytes:
    """Touched memory for `count` rows that begins at a page, uint8 [count, row_bytes]."""
    flat = np.frombuffer(mmap.mmap(-1, count * row_bytes), np.uint8)
    flat[::STAMP_BYTES] = 1
    return flat.reshape(count, row_bytes)


class Way(ABC):
    """One way to keep blocks. `source` and `target`, uint8 [count, block_bytes], are the caller's
    memory; a way that has to use its own overrides `fill` and `loaded`."""

    packages: Sequence[str] = ()  # whose versions are told
    notes: Sequence[str] = ()

    def __init__(self, work: Work) -> None:
        self.work = work
        self.source = aligned(work.count, work.block_bytes)
        self.target = aligned(work.count, work.block_bytes)

    def fill(self, keys: Sequence[str], write: Callable[[int, Bytes], None]) -> None:
        """Put the blocks where the next `store` takes them from, with `write(row, into)`."""
        for row in range(len(keys)):
            write(row, self.source[row])

    @abstractmethod
    def store(self, keys: Sequence[str]) -> None:
        """Returns when the peer says that all is stored; raises where it says that it is not."""

    def settle(self) -> None:  # noqa: B027 - most keep nothing back
        """Write out what waits in this process, so that the next `load` cannot come from there."""

    def forget(self) -> None:
        """Make what is in the caller's memory wrong, so that only a load can make it right."""
        self.target[:, ::STAMP_BYTES] = 0xEE

    @abstractmethod
    def load(self, keys: Sequence[str]) -> None:
        """Returns when all blocks are in the caller's memory, or known not to come."""

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        """What the last `load` brought, None for what it said it did not bring."""
        return list(self.target[: len(keys)])

    def done_with(self, keys: Sequence[str]) -> None:  # noqa: B027 - most need nothing
        """What was loaded has been looked at."""

    def cpu_s(self) -> float:
        """Processor time spent so far by all that the way runs."""
        return time.process_time()

    def close(self) -> None:  # noqa: B027 - the process ends next
        """Let go of what would outlive the process."""


def serve(make: Callable[[Work], Way]) -> None:
    """Answer commands until `close` or the end of stdin."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to end
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = _Server(make)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = server.do(command)
            except Exception as error:
                traceback.print_exc()
                first = str(error).strip().partition("\n")[0]
                answer = {"error": f"{type(error).__name__}: {first}"[:300]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if command["do"] == "close":
                break
    finally:
        server.close()
        sys.stderr.flush()
        # Some libraries' threads do not end by themselves.
        os._exit(0)


class _Server:
    def __init__(self, make: Callable[[Work], Way]) -> None:
        self._make = make
        self._opened: tuple[Way, Blocks] | None = None

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        what = command["do"]
        if what == "open":
            return self._open(Work(**command["work"]))
        if what == "close":
            self.close()
            return {}
        if self._opened is None:
            raise RuntimeError(f"{what} before open")
        way, blocks = self._opened
        if what == "settle":
            way.settle()
            return {}
        label = command["label"]
        keys = keys_of(label, command.get("count", way.work.count))
        return {"store": _store, "load": _load}[what](way, blocks, label, keys)

    def _open(self, work: Work) -> dict[str, Any]:
        self.close()
        way = self._make(work)
        self._opened = (way, Blocks(work.count, work.block_bytes))
        versions = {name: version(name) for name in way.packages}
        return {"versions": versions, "notes": list(way.notes)}

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()


def _store(way: Way, blocks: Blocks, label: str, keys: list[str]) -> dict[str, Any]:
    way.fill(keys, lambda row, into: blocks.write(label, row, into))
    return _timed(way, way.store, keys)


def _load(way: Way, blocks: Blocks, label: str, keys: list[str]) -> dict[str, Any]:
    way.forget()
    answer = _timed(way, way.load, keys)
    came = [(row, found) for row, found in enumerate(way.loaded(keys)) if found is not None]
    answer["came"] = len(came)
    answer["wrong"] = sum(not blocks.matches(label, row, found) for row, found in came)
    # What looks into a peer's memory goes before that does.
    del came
    way.done_with(keys)
    return answer


def _timed(way: Way, call: Callable[[Sequence[str]], None], keys: Sequence[str]) -> dict[str, Any]:
    cpu_s, start_s = way.cpu_s(), time.perf_counter()
    call(keys)
    seconds = time.perf_counter() - start_s
    return {"seconds": seconds, "cpu_s": way.cpu_s() - cpu_s}


def die_with_parent() -> None:
    """From now on this process, and what it executes, is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def child(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that ends with this one; what it prints goes to stderr."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with_parent,
    )


def cpu_s_of(pid: int) -> float:
    """Processor time of a process, its threads included."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
