"""What stands in the store, page by page, into the index. Names are the store's word: parsed, and
believed only as far as a load will check them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from backends.tier.health import Breaker
from backends.tier.index import Index
from backends.tier.object.client import Listed, ObjectClient
from backends.tier.object.names import Place, block_path, parse_block_path
from backends.tier.object.requests import Requests
from backends.tier.spaces import Namespaces

# Some 150 bytes of memory each. What is beyond is found by probes.
_KNOWN_MAX: Final = 4_000_000


class Totals(NamedTuple):
    """Of a whole listing."""

    bytes: int
    blocks: int


class Listing:
    """Lists one namespace, or with `everything` all that is below the url, and tells the index."""

    def __init__(
        self,
        client: ObjectClient,
        requests: Requests,
        breaker: Breaker,
        index: Index,
        namespaces: Namespaces,
        row_bytes: int,
        *,
        everything: bool,
    ) -> None:
        self._client = client
        self._requests = requests
        self._breaker = breaker
        self._index = index
        self._row_bytes = row_bytes
        self._everything = everything
        self._one = threading.Lock()
        self._odd_bytes: dict[int, int] = {}
        self.namespaces = namespaces

    def list_own(self) -> set[int] | None:
        """Ids of all blocks of the own namespace; None where there are too many to know.

        Raises StoreFault.
        """
        there: set[int] = set()
        own = self.namespaces[0]
        for found, place in self._blocks(own.name):
            block_id = own.block_id(place.key)
            if found.size != self._row_bytes or found.name != block_path(own, place.key, block_id):
                continue
            there.add(block_id)
            if not self._index.mark_seen(block_id, 0):
                if len(self._index) >= _KNOWN_MAX:
                    return None
                self._index.add(block_id, place.key, 0, 0, found.modified_ns)
        return there

    def scan(self, stopped: Callable[[], bool]) -> Totals | None:
        """Enter all there is, and forget what there is no more; None if it was stopped.

        Raises StoreFault.
        """
        with self._one:
            return self._scan(stopped)

    def bytes_of(self, block_id: int) -> int:
        """Size of a block, of whatever namespace, as it was listed."""
        return self._odd_bytes.get(block_id, self._row_bytes)

    def _scan(self, stopped: Callable[[], bool]) -> Totals | None:
        index, odd_bytes = self._index, {}
        index.generation += 1
        nbytes = blocks = 0
        complete = True
        where = None if self._everything else self.namespaces[0].name
        for found, place in self._blocks(where):
            if stopped():
                return None
            nbytes, blocks = nbytes + found.size, blocks + 1
            number = self.namespaces.number(place.namespace)
            namespace = self.namespaces[number]
            block_id = namespace.block_id(place.key)
            if found.name != block_path(namespace, place.key, block_id):
                # It takes room, but nobody looks for it there, so nobody can evict it either.
                continue
            if number == 0 and found.size != self._row_bytes and not self._everything:
                continue
            if found.size != self._row_bytes:
                odd_bytes[block_id] = found.size
            if index.mark_seen(block_id, 0):
                continue
            if len(index) >= _KNOWN_MAX:
                complete = False
                continue
            index.add(block_id, place.key, number, 0, found.modified_ns)
        self._odd_bytes = odd_bytes
        if complete:
            index.forget_unseen(0)
        return Totals(nbytes, blocks)

    def _blocks(self, prefix: str | None) -> Iterator[tuple[Listed, Place]]:
        pages = self._client.pages(prefix)
        while True:
            # A page that failed cannot be asked for again alone: the listing begins anew later.
            page = self._requests.ask(lambda: next(pages, None), self._breaker, retries=0)
            if page is None:
                return
            for found in page:
                place = parse_block_path(found.name)
                if place is not None:
                    yield found, place
