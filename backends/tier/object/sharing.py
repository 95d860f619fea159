"""Tell other processes when blocks were used, and hear it from them, once in a while."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Final

import numpy as np

from backends.tier.health import Breaker
from backends.tier.index import Index
from backends.tier.object import recency
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Absent
from backends.tier.object.listing import Listing
from backends.tier.object.names import RECENCY
from backends.tier.object.recency import Uses
from backends.tier.object.requests import Requests

_SECOND_NS: Final = 1_000_000_000


class Sharing:
    """One process's. Methods raise StoreFault."""

    def __init__(
        self,
        client: ObjectClient,
        requests: Requests,
        breaker: Breaker,
        index: Index,
        listing: Listing,
        interval_s: float,
    ) -> None:
        self._client = client
        self._requests = requests
        self._breaker = breaker
        self._index = index
        self._listing = listing
        self._interval_s = interval_s
        self._next_s = 0.0

    def tick(self, now_s: float) -> None:
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.share()

    def share(self) -> None:
        """Hear of all namespaces; write what is known of the own one where it is news."""
        spaces = self._listing.namespaces
        for number in range(len(spaces)):
            name = f"{spaces[number].name}/{RECENCY}"
            columns = self._index.columns(number, 0)
            ours = Uses(columns.ids, (columns.used_ns // _SECOND_NS).astype(np.uint32))
            theirs = self._read(name) or Uses(ours.ids[:0], ours.used_s[:0])
            both = recency.merge(ours, theirs)
            later = both.used_s > ours.used_s
            times = (both.used_s[later].astype(np.int64) * _SECOND_NS).tolist()
            for block_id, used_ns in zip(both.ids[later].tolist(), times, strict=True):
                self._index.used_elsewhere(block_id, used_ns)
            if number == 0 and both.ids.size and not _same(both, theirs):
                data = recency.pack(both)
                self._requests.ask(partial(self._client.put, name, data), self._breaker)

    def _read(self, name: str) -> Uses | None:
        with contextlib.suppress(Absent):
            found = self._requests.ask(
                lambda: self._client.fetch(name, recency.BYTES_MAX), self._breaker
            )
            return recency.unpack(found.data.tobytes())
        return None


def _same(ours: Uses, theirs: Uses) -> bool:
    if ours.ids.size != theirs.ids.size:
        return False
    one, other = np.argsort(ours.ids), np.argsort(theirs.ids)
    return bool(
        np.array_equal(ours.ids[one], theirs.ids[other])
        and np.array_equal(ours.used_s[one], theirs.used_s[other])
    )
