"""What the engine stores into the region: rows that it was given, and what becomes of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from backends.stack.headers import RowHeaders
from backends.stack.primary import Admitted, PrimaryIndex
from backends.stack.results import Storing
from backends.stack.rows import NO_ROW
from backends.stack.windows import Windows

if TYPE_CHECKING:
    from backends.stack.node import NodeRows


class Stores:
    """Of one region. What is not complete after `timeout_s` is not waited for any more."""

    def __init__(
        self,
        index: PrimaryIndex,
        windows: Windows | None,
        headers: RowHeaders | None,
        node: NodeRows | None,
        timeout_s: float,
    ) -> None:
        self._index = index
        self._windows = windows
        self._headers = headers
        self._node = node
        self._timeout_s = timeout_s
        self._under_way: dict[bytes, float] = {}
        # Where groups keep windows, those in which an entry is being stored.
        self._given: dict[bytes, Sequence[int]] = {}
        self._doomed: set[bytes] = set()

    def deadline_s(self, key: bytes) -> float | None:
        """When the wait for one that is being stored is over; None if it is not."""
        until_s = self._under_way.get(key)
        return -math.inf if until_s is not None and key in self._doomed else until_s

    def doom(self) -> None:
        """What is being stored now is not to be used."""
        self._doomed.update(self._under_way)

    def begin(
        self,
        keys: Sequence[bytes],
        groups: Sequence[int] | None,
        now_s: float,
        clock_s: float,
        *,
        first: int,
        parent: bytes | None,
        keep: Collection[bytes],
        parted: int,
        held_from: Sequence[int],
    ) -> Storing:
        """As `TierStack.prepare_store` has it."""
        index = self._index
        if groups is None and self._windows is not None:
            return self._begin_windowed(
                self._windows, keys, now_s, clock_s, first, parent, keep, parted, held_from
            )
        groups = index.every_group if groups is None else groups
        elsewhere = () if self._node is None else self._node.reserve(keys, groups)
        admitted = index.admit(
            keys,
            groups,
            clock_s,
            first=first,
            parent=parent,
            keep=keep,
            weigh=True,
            elsewhere=elsewhere,
        )
        if self._node is not None:
            self._node.reserved(admitted.keys)
        return self._announced(admitted, groups, now_s)

    def _announced(self, admitted: Admitted, groups: Sequence[int], now_s: float) -> Storing:
        new = admitted.keys
        if new:
            self._under_way.update(dict.fromkeys(new, now_s + self._timeout_s))
            if self._headers is not None:
                for group, rows in zip(groups, admitted.rows, strict=True):
                    self._headers.announce(new, rows, group)
        return Storing(new, admitted.rows, admitted.evicted, admitted.short)

    def _begin_windowed(
        self,
        windows: Windows,
        keys: Sequence[bytes],
        now_s: float,
        clock_s: float,
        first: int,
        parent: bytes | None,
        keep: Collection[bytes],
        parted: int,
        held_from: Sequence[int],
    ) -> Storing:
        groups, columns = self._index.every_group, list[Sequence[int]]()

        def wanted(count: int) -> list[Sequence[int]]:
            columns[:] = windows.to_store(keys, count, parted, held_from)
            return columns

        admitted = self._index.admit_rows(
            keys,
            groups,
            wanted,
            clock_s,
            first=first,
            parent=parent,
            keep=keep,
            weigh=True,
        )
        windows.leave(keys, columns)
        rows_of = zip(*admitted.rows, strict=True)
        for key, rows in zip(admitted.keys, rows_of, strict=True):
            self._given[key] = [group for group in groups if rows[group] != NO_ROW]
        return self._announced(admitted, groups, now_s)

    def end(
        self, keys: Sequence[bytes], failed: Collection[bytes], groups: Sequence[int] | None
    ) -> Sequence[bytes]:
        """As `TierStack.complete_store` has it; what is there now."""
        index = self._index
        groups = index.every_group if groups is None else groups
        if failed or self._doomed:
            lost = {*failed, *self._doomed.intersection(keys)}
            self._doomed -= lost
            for of_lost, own in self._given_out([key for key in keys if key in lost], groups):
                index.free(index.take_back(of_lost, own))
            if self._node is not None:
                self._node.given_up(lost, groups)
            for key in lost:
                self._under_way.pop(key, None)
            keys = [key for key in keys if key not in lost]
        deque(map(self._under_way.pop, keys, repeat(0.0)), 0)
        index.counters.stored += len(keys)
        for of_keys, own in self._given_out(keys, groups):
            for of_group in index.commit(of_keys, own):
                index.written(of_group)
                if self._headers is not None:
                    self._headers.complete(of_group)
        return keys

    def _given_out(
        self, keys: Sequence[bytes], groups: Sequence[int]
    ) -> Iterable[tuple[Sequence[bytes], Sequence[int]]]:
        """These, by the groups in which they were to be stored. Others of their groups may be on
        their way in from a tier meanwhile."""
        if not self._given:
            return [(keys, groups)]
        found: dict[tuple[int, ...], list[bytes]] = {}
        for key in keys:
            found.setdefault(tuple(self._given.pop(key, groups)), []).append(key)
        return [(of_keys, own) for own, of_keys in found.items()]
