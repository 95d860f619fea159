"""Runs of a sequence's chunks, for an engine that names its chunks one by one.

A stack is asked about runs, because a tier is fast at many keys and eviction goes by who extends
whom. An engine that only tells each key's end in tokens is followed here, request by request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from backends.block import BlockKey


class Run(NamedTuple):
    """`keys[0]` is chunk number `first` of its sequence, `parent` the chunk before it."""

    group: int
    first: int
    parent: bytes | None
    keys: list[bytes]


class Chunks:
    """One request's chunks by group, as far as they were told."""

    def __init__(self, tokens_per_chunk: Sequence[int]) -> None:
        self._tokens = tokens_per_chunk
        self.groups: list[list[bytes]] = [[] for _ in tokens_per_chunk]
        self.told = 0

    def tell(self, ends: Iterable[tuple[BlockKey, int]]) -> None:
        """More keys, each with the token behind its last one. One that does not end a whole chunk
        is in no run."""
        for key, end in ends:
            chunks = self.groups[key.group]
            if end == (len(chunks) + 1) * self._tokens[key.group]:
                chunks.append(key.hash)
            self.told += 1

    def place(self, key: BlockKey, end: int | None) -> int | None:
        """Which chunk of its group a key is; None if it is none of them."""
        chunks, tokens = self.groups[key.group], self._tokens[key.group]
        if end is None or end % tokens:
            return None
        at = end // tokens - 1
        return at if at < len(chunks) and chunks[at] == key.hash else None

    def parent(self, group: int, at: int) -> bytes | None:
        return self.groups[group][at - 1] if at else None

    def runs(self, keys: Iterable[tuple[BlockKey, int | None]]) -> Iterator[Run]:
        """Keys with their ends, in order, as runs without a gap; a key in no run is one alone."""
        run: Run | None = None
        for key, end in keys:
            at = self.place(key, end)
            if run and run.group == key.group and at == run.first + len(run.keys):
                run.keys.append(key.hash)
                continue
            if run:
                yield run
            run = Run(key.group, at or 0, self.parent(key.group, at or 0), [key.hash])
        if run:
            yield run
