"""How a worker tells its launcher where it stands: one JSON object a line, appended to a file.

A file outlives both ends, needs no port, and works the same for a forked worker, for one that
`torchrun` started by hand, and for a thread. An event has `t` (seconds since the epoch), `phase`
(see PHASES) and fields of its own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

PHASES = ("started", "group", "region", "ready", "progress", "done")


class EventWriter:
    """Appends events to one file; each line is written by one call, so it is never torn."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, phase: str, **fields: Any) -> None:
        line = json.dumps({"t": time.time(), "phase": phase, **fields}, separators=(",", ":"))
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


class EventTail:
    """Reads what has been added to an event file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            if self._path.stat().st_size == self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [json.loads(line) for line in data[:end].splitlines()]
