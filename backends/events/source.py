"""Turns what a tier stack does into event batches, one an engine step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from backends.config import KvGroup
from backends.events.wire import (
    LOCAL,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    SPEC_KINDS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    lowest_64_bits,
)
from backends.stack.observer import PRIMARY, Observer

_BATCH_BLOCKS: Final = 4096  # a batch is sent when it has so many hashes, whatever the step
_PARENTS_PER_ROW: Final = 4


class Sink(Protocol):
    """Where batches go: a `Publisher`, or an engine's own one."""

    def publish(self, events: Sequence[Event]) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """How a tier is named in an event."""

    medium: str = MEDIUM_STORAGE
    locality: str | None = None
    ownership: str | None = None


class KvEvents(Observer):
    """One replica's events. Memory is bounded: a few numbers for each row of the region."""

    def __init__(
        self,
        sink: Sink,
        groups: Sequence[KvGroup],
        tokens_per_entry: int,
        *,
        rows: int,
        places: Mapping[str, Place] | None = None,
        int_hashes: bool = True,
        token_ids: Callable[[bytes], Sequence[int]] | None = None,
    ) -> None:
        """`rows` are those of the region. `places`: how to name tiers otherwise than as STORAGE
        that is known by the tier's own name. `token_ids` gives the tokens of one entry where the
        engine knows them; without it events have none, and routers go by hashes alone.
        """
        self._sink = sink
        self._groups = [
            (SPEC_KINDS[group.kind], group.sliding_window, index)
            for index, group in enumerate(groups)
        ]
        self._tokens = tokens_per_entry
        self._places = {PRIMARY: Place(MEDIUM_CPU, LOCAL), **(places or {})}
        self._hash: Callable[[bytes], BlockHash] = lowest_64_bits if int_hashes else bytes
        self._token_ids = token_ids
        self._parents: dict[bytes, bytes | None] = {}
        self._parents_most = _PARENTS_PER_ROW * rows
        self._events: list[Event] = []
        self._blocks = 0

    def admitted(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        parents = self._parents
        before: Sequence[bytes | None] = [parent, *keys[:-1]]
        for key in keys:
            parents.pop(key, None)  # the most recent ones come last
        parents.update(zip(keys, before, strict=True))
        if len(parents) > self._parents_most:
            for key in list(parents)[: len(parents) - self._parents_most]:
                del parents[key]

    def stored(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        """One event for each unbroken part of a sequence."""
        if self._within(group):
            return
        start = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or self._parents.get(keys[end]) != keys[end - 1]:
                self._store(tier, group, keys[start:end])
                start = end

    def _store(self, tier: str, group: int, run: Sequence[bytes]) -> None:
        place = self._place(tier)
        kind, window, index = self._groups[group]
        parent = self._parents.get(run[0])
        tokens: list[int] = []
        if self._token_ids is not None:
            for key in run:
                tokens += self._token_ids(key)
        event = BlockStored(
            block_hashes=[self._hash(key) for key in run],
            parent_block_hash=None if parent is None else self._hash(parent),
            token_ids=tokens,
            block_size=self._tokens,
            lora_id=None,
            medium=place.medium,
            lora_name=None,
            group_idx=index,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=place.locality,
            ownership=place.ownership,
        )
        self._add(event, len(run))

    def removed(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        if self._within(group):
            return
        place = self._place(tier)
        hashes = [self._hash(key) for key in keys]
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockRemoved)
            and (last.medium, last.group_idx, last.ownership)
            == (place.medium, group, place.ownership)
        ):  # fmt: skip
            last.block_hashes += hashes
            self._count(len(hashes))
            return
        event = BlockRemoved(
            block_hashes=hashes,
            medium=place.medium,
            group_idx=group,
            locality=place.locality,
            ownership=place.ownership,
        )
        self._add(event, len(hashes))

    def cleared(self, tier: str) -> None:
        place = self._place(tier)
        event = AllBlocksCleared(
            medium=place.medium, locality=place.locality, ownership=place.ownership
        )
        self._add(event, 0)

    def _within(self, column: int) -> bool:
        """Whether this is a further chunk of a group in an entry, beside the one that stands for
        the group: an event is about an entry's block of a group."""
        return column >= len(self._groups)

    def stepped(self) -> None:
        """Send what there is since the last step."""
        if self._events:
            events, self._events, self._blocks = self._events, [], 0
            self._sink.publish(events)

    def _place(self, tier: str) -> Place:
        place = self._places.get(tier)
        if place is None:
            place = self._places[tier] = Place(ownership=tier)
        return place

    def _add(self, event: Event, blocks: int) -> None:
        self._events.append(event)
        self._count(blocks)

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        if self._blocks >= _BATCH_BLOCKS:
            self.stepped()
