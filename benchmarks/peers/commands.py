"""Commands that run to their end, or are ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_LET_END_S: Final = 15.0
# They would lead a peer's interpreter to this one's packages.
_NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without credentials and paths of packages, and with `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_PASSED_ON and not name.startswith("AWS_")
    }
    return kept | dict(more or {})


def output_of(command: Sequence[str], timeout_s: float, cwd: Path | None = None) -> tuple[int, str]:
    """Its exit status, and all that it printed. Raises TimeoutError."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Ctrl-C is for the driver, which ends this.
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not finished after {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            _end(process)
    return process.returncode, told


def last_line(told: str) -> str:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it does not say why"


def _end(process: subprocess.Popen[str]) -> None:
    for number, wait_s in ((signal.SIGTERM, _LET_END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=wait_s)
            return
