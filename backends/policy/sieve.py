"""SIEVE: one queue and a hand. Zhang, Yang, Yue, Vigfusson and Rashmi, NSDI 2024."""

from __future__ import annotations

from backends.policy.keyed import KeyPolicy


class _Node:
    __slots__ = ("key", "newer", "older", "used")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.used = False
        self.newer = self.older = self


class Sieve(KeyPolicy):
    """Keys in order of arrival; a hand goes from old to new over and over, passes over what was
    used since it last came by, and takes the first that was not."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._nodes: dict[bytes, _Node] = {}
        self._ends = _Node(b"")  # newer: the oldest; older: the newest
        self._hand = self._ends

    def _put(self, key: bytes) -> None:
        node = self._nodes[key] = _Node(key)
        newest = self._ends.older
        node.older, node.newer = newest, self._ends
        newest.newer = self._ends.older = node

    def _use(self, key: bytes) -> None:
        self._nodes[key].used = True

    def _candidate(self) -> bytes:
        hand = self._hand
        while hand is self._ends or hand.used:
            hand.used = False
            hand = hand.newer
        self._hand = hand
        return hand.key

    def _spare(self, key: bytes) -> None:
        self._hand = self._nodes[key].newer

    def _drop(self, key: bytes, evicted: bool) -> None:
        node = self._nodes.pop(key)
        if node is self._hand:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
