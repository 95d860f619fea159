"""Counts blocks that were written to a tier and that nobody has read from it since."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Final, Generic, TypeVar

MOST: Final = 1 << 18

Place = TypeVar("Place", bound=Hashable)


class Unread(Generic[Place]):
    """Of one tier, since the stack was opened, and by this replica's reads alone.

    A block is known by its place: a row of the region, which is cheap, or its key below it. At most
    `most` are remembered; the others count as not read for ever, as do those whose place was given
    to another block before anybody wanted them.
    """

    __slots__ = ("_gone", "_most", "_places")

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: set[Place] = set()
        self._gone = 0

    @property
    def count(self) -> int:
        return self._gone + len(self._places)

    def written(self, places: Collection[Place]) -> None:
        self._places.update(places)
        for _ in range(len(self._places) - self._most):
            self._places.pop()
            self._gone += 1

    def read(self, places: Iterable[Place]) -> None:
        if self._places:
            self._places.difference_update(places)

    def gone(self, places: Iterable[Place]) -> None:
        """Another block has come into their place."""
        before = len(self._places)
        if before:
            self._places.difference_update(places)
            self._gone += before - len(self._places)
