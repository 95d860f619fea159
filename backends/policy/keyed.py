"""The base of policies that order single keys, and not whole runs of a sequence.

The literature's policies know no prefixes. They say here which key would go next; where that has
extensions, the end of one of them goes in its stead, for without its prefix it is worth nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Container, Sequence

from backends.policy.base import EvictionPolicy
from backends.policy.chains import Chains


class KeyPolicy(EvictionPolicy):
    """Keeps prefixes for an order of single keys. A run is put in, and used, last key first, so
    that most extensions are before their prefix in that order anyway."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._chains = Chains()

    @abstractmethod
    def _put(self, key: bytes) -> None:
        """A key came in."""

    def _put_all(self, keys: Sequence[bytes]) -> None:
        """Keys came in, in this order."""
        deque(map(self._put, keys), 0)

    @abstractmethod
    def _use(self, key: bytes) -> None:
        """A key that is there was used."""

    @abstractmethod
    def _candidate(self) -> bytes:
        """The key that would go next; there is one. The order may change by asking."""

    @abstractmethod
    def _spare(self, key: bytes) -> None:
        """The candidate has to stay, for it is held: let another be the next."""

    @abstractmethod
    def _drop(self, key: bytes, evicted: bool) -> None:
        """A key is gone. `evicted` False: for a reason that says nothing of its use."""

    def insert(
        self, keys: Sequence[bytes], now_s: float, first: int = 0, parent: bytes | None = None
    ) -> None:
        if keys:
            self._chains.add(keys, parent)
            self._put_all(keys[::-1])

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        there = self._chains.parents
        for key in reversed(keys):
            if key in there:
                self._use(key)

    def victims(self, count: int, held: Container[bytes] = ()) -> list[bytes]:
        chains = self._chains
        chosen: list[bytes] = []
        spared = 0
        walked: bytes | None = None
        at: bytes | None = None
        count = min(count, len(chains))
        next_candidate, drop = self._candidate, self._drop
        extended, parents = chains.extensions, chains.parents
        while len(chosen) < count:
            candidate = next_candidate()
            if candidate not in extended and candidate not in held:
                # An end already, as most are: see `insert`.
                spared, walked = 0, None
                drop(candidate, True)
                chosen.append(candidate)
                parent = parents.pop(candidate)
                if parent is not None and type(found := extended.pop(parent)) is dict:
                    del found[candidate]
                    if found:
                        extended[parent] = found
                continue
            # The same candidate again: its extensions are not walked down from the top once more.
            start = at if candidate == walked and at is not None else candidate
            key = chains.end(start, held)
            if key is None and start != candidate:
                key = chains.end(candidate, held)
            if key is None:
                self._spare(candidate)
                spared += 1
                if spared >= len(chains):
                    break
                continue
            spared = 0
            walked, at = candidate, chains.parent(key)
            self._let_go(key, chosen)
        if len(chosen) < count:
            self._search(count, held, chosen)
        return chosen

    def _search(self, count: int, held: Container[bytes], chosen: list[bytes]) -> None:
        """Nearly everything is held: look at every key, for an order may not have shown all."""
        for start in list(self._chains):
            while start in self._chains and len(chosen) < count:
                key = self._chains.end(start, held)
                if key is None:
                    break
                self._let_go(key, chosen)

    def _let_go(self, key: bytes, chosen: list[bytes]) -> None:
        self._drop(key, True)
        self._chains.forget(key)
        chosen.append(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._chains:
                self._drop(key, False)
                self._chains.forget(key)

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, key: object) -> bool:
        return key in self._chains
