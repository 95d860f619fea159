"""An environment for each peer, made with `python -m venv` and its pinned requirements.

A made environment carries a stamp of what it was made from, and is made anew when that changes. One
that was not made to its end is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.catalogue import HERE, Peer
from benchmarks.peers.commands import last_line, output_of

STAMP: Final = "kvquay-peer.txt"
CONSTRAINTS: Final = HERE.parents[1] / "constraints.txt"
INSTALL_S: Final = 3600


class EnvironmentFailed(RuntimeError):
    """A peer's environment cannot be had; the message is one line."""


def ensure(peer: Peer, root: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of the peer's environment under `root`, made where it is not there yet.

    Raises EnvironmentFailed; then nothing of it is left.
    """
    root.mkdir(parents=True, exist_ok=True)
    place = root / peer.name
    python = place / "bin" / "python"
    with _alone(root / f"{peer.name}.lock"):
        stamp = _stamp(peer)
        with contextlib.suppress(OSError):
            if (place / STAMP).read_text(encoding="utf-8") == stamp:
                return python
        shutil.rmtree(place, ignore_errors=True)
        say(f"{peer.name}: making an environment in {place}; this takes some minutes")
        try:
            for step in _steps(peer, place, python):
                _run(step)
            (place / STAMP).write_text(stamp, encoding="utf-8")
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    return python


def _steps(peer: Peer, place: Path, python: Path) -> list[Sequence[str]]:
    # This process's own pip works on the new environment, which so needs none.
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    pip += ["--quiet", "--disable-pip-version-check"]
    install = [*pip, "install"]
    steps: list[Sequence[str]] = [[sys.executable, "-m", "venv", "--without-pip", str(place)]]
    if peer.torch_first:
        steps.append([*install, "-r", str(CONSTRAINTS)])
    steps.append([*install, "-r", str(peer.requirements)])
    if peer.without:
        steps.append([*pip, "uninstall", "--yes", *peer.without])
    return steps


def _stamp(peer: Peer) -> str:
    made_from = hashlib.sha256(peer.requirements.read_bytes() + repr(peer.without).encode())
    if peer.torch_first:
        made_from.update(CONSTRAINTS.read_bytes())
    return f"{sys.version_info[:2]} {made_from.hexdigest()}\n"


def _run(command: Sequence[str]) -> None:
    try:
        status, told = output_of(command, INSTALL_S)
    except TimeoutError as error:
        raise EnvironmentFailed(f"not installed: {error}") from None
    if status:
        raise EnvironmentFailed(f"not installed: {_why(told)}")


def _why(told: str) -> str:
    """The line of pip's that says most."""
    errors = [line for line in told.splitlines() if line.startswith("ERROR:")]
    return last_line(errors[-1] if errors else told).removeprefix("ERROR:").strip()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
