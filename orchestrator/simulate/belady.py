"""Belady's rule, which knows the future: what is needed latest goes first. The bound for others."""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence

from backends.policy.base import EvictionPolicy
from orchestrator.simulate.access import Access

_NEVER = 1 << 62


class Belady(EvictionPolicy):
    """Among chunks that are needed at the same time the deepest goes first: an extension is needed
    no sooner than its prefix, so prefixes are kept. O(log n) a key.

    It counts requests by `touch`, so it takes part only in the replay that it was made for.
    """

    def __init__(self, capacity: int, future: Future) -> None:
        super().__init__(capacity)
        self._future = future
        self._request = -1
        self._next: dict[bytes, int] = {}
        # (-next use, -depth, key); one that no longer says what `_next` says is void.
        self._heap: list[tuple[int, int, bytes]] = []

    def insert(
        self, keys: Sequence[bytes], now_s: float, first: int = 0, parent: bytes | None = None
    ) -> None:
        ahead = self._future.next_use[self._request]
        for depth, key in enumerate(keys, first):
            self._next[key] = ahead[depth]
            heapq.heappush(self._heap, (-ahead[depth], -depth, key))

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        self._request += 1
        self.insert(keys, now_s)
        if len(self._heap) > 4 * self.capacity + 1024:
            self._heap = [entry for entry in self._heap if self._next.get(entry[2]) == -entry[0]]
            heapq.heapify(self._heap)

    def victims(self, count: int, held: Container[bytes] = ()) -> list[bytes]:
        chosen: list[bytes] = []
        kept = []
        while len(chosen) < count and self._heap:
            entry = heapq.heappop(self._heap)
            key = entry[2]
            if self._next.get(key) != -entry[0]:
                continue
            if key in held:
                kept.append(entry)
                continue
            del self._next[key]
            chosen.append(key)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return chosen

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._next.pop(key, None)

    def __len__(self) -> int:
        return len(self._next)

    def __contains__(self, key: object) -> bool:
        return key in self._next


class Future:
    """Of every key of every request, the number of the next request that uses it."""

    def __init__(self, requests: Sequence[Access]) -> None:
        self.next_use: list[list[int]] = []
        latest: dict[bytes, int] = {}
        for number in range(len(requests) - 1, -1, -1):
            keys = requests[number].keys
            self.next_use.append([latest.get(key, _NEVER) for key in keys])
            latest.update(dict.fromkeys(keys, number))
        self.next_use.reverse()
