"""Objects that were found wrong are kept for inspection, out of the way, the newest ones only."""

from __future__ import annotations

import threading

from backends.tier.counters import Counters
from backends.tier.object.client import Listed, ObjectClient
from backends.tier.object.faults import Absent
from backends.tier.object.names import QUARANTINE, quarantine_path


class Quarantine:
    """One tier's view of the quarantine that all share. Methods raise StoreFault."""

    def __init__(self, client: ObjectClient, limit_bytes: int, counters: Counters) -> None:
        """`limit_bytes` 0: what is wrong is deleted."""
        self._client = client
        self._limit_bytes = limit_bytes
        self._counters = counters
        # Wrong objects are rare. One at a time keeps the limit, and costs nobody else anything.
        self._one = threading.Lock()

    def put(self, name: str) -> None:
        """Take an object out of the way; copied inside the store first, where there is room."""
        with self._one:
            try:
                size = self._client.size(name) if self._limit_bytes else 0
                if 0 < size <= self._limit_bytes:
                    self._make_room(size)
                    self._client.copy(name, quarantine_path(name))
                    self._counters.add("quarantined")
                self._client.delete([name])
            except Absent:
                return

    def _make_room(self, need_bytes: int) -> None:
        kept: list[Listed] = [found for page in self._client.pages(QUARANTINE) for found in page]
        over_bytes = sum(found.size for found in kept) + need_bytes - self._limit_bytes
        gone = []
        # Names begin with the time of their arrival.
        for found in sorted(kept):
            if over_bytes <= 0:
                break
            gone.append(found.name)
            over_bytes -= found.size
        if gone:
            self._client.delete(gone)
