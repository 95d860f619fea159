"""What blocks there are, in memory: answers lookups, and knows what was used least recently.

A dictionary from 64-bit ids to places, and one numpy column for each fact, so that a million blocks
are some 150 MB and can be filled, saved and sorted in bulk. Reading needs no lock; writing does.
Two keys with one id would share a place, which costs a miss and never a wrong block: files are
named by the whole key.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.block import BlockKey

_FIRST: Final = 1024
_HASH_BYTES: Final = 32
# So many places are entered at a time: the engine's thread is not to wait for longer.
_CHUNK: Final = 20000

_LIVE: Final = 1
_WRITTEN: Final = 2  # by this tier, in this run
_READ: Final = 4

U8 = npt.NDArray[np.uint8]


class Columns(NamedTuple):
    """Facts of many blocks: ids u64, hashes u8 [n, width], lengths u8, groups u32, used_ns i64."""

    ids: npt.NDArray[np.uint64]
    hashes: U8
    lengths: U8
    groups: npt.NDArray[np.uint32]
    used_ns: npt.NDArray[np.int64]

    def part(self, chosen: slice | npt.NDArray[np.int64]) -> Columns:
        return Columns(
            self.ids[chosen],
            self.hashes[chosen],
            self.lengths[chosen],
            self.groups[chosen],
            self.used_ns[chosen],
        )


class Candidate(NamedTuple):
    """A block that may be evicted."""

    place: int
    block_id: int
    key: BlockKey
    namespace: int
    used_ns: int


class Index:
    """Blocks by id. `namespace` and `volume` are small numbers of the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        self._ids = np.zeros(_FIRST, np.uint64)
        self._hashes = np.zeros((_FIRST, _HASH_BYTES), np.uint8)
        self._lengths = np.zeros(_FIRST, np.uint8)
        self._groups = np.zeros(_FIRST, np.uint32)
        self._used_ns = np.zeros(_FIRST, np.int64)
        self._shown_ns = np.zeros(_FIRST, np.int64)
        self._seen = np.zeros(_FIRST, np.uint32)
        self._namespaces = np.zeros(_FIRST, np.uint16)
        self._volumes = np.zeros(_FIRST, np.uint8)
        self._flags = np.zeros(_FIRST, np.uint8)
        self._counts: dict[int, int] = {}
        self.generation = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def count(self, volume: int) -> int:
        """Blocks known on a volume, of all namespaces."""
        return self._counts.get(volume, 0)

    # One block.

    def volume_of(self, block_id: int) -> int | None:
        place = self._places.get(block_id)
        return None if place is None else int(self._volumes[place])

    def use(self, block_id: int, used_ns: int) -> int | None:
        """Note a use; the block's volume, None if it is not known. Takes no lock."""
        place = self._places.get(block_id)
        if place is None:
            return None
        self._used_ns[place] = used_ns
        return int(self._volumes[place])

    def use_all(self, block_ids: Sequence[int], used_ns: int) -> list[int | None]:
        """`use` of each, the first one at `used_ns` and each next one a little before."""
        found = [self._places.get(block_id) for block_id in block_ids]
        known = [i for i, place in enumerate(found) if place is not None]
        places = np.array([found[i] for i in known], np.int64)
        self._used_ns[places] = used_ns - np.array(known, np.int64)
        volumes: list[int | None] = self._volumes[places].tolist()
        if len(known) == len(found):
            return volumes
        answers: list[int | None] = [None] * len(found)
        for i, volume in zip(known, volumes, strict=True):
            answers[i] = volume
        return answers

    def used_elsewhere(self, block_id: int, used_ns: int) -> None:
        """Another process has used it, at least as late as that."""
        with self._lock:
            place = self._places.get(block_id)
            if place is not None:
                self._used_ns[place] = max(int(self._used_ns[place]), used_ns)

    def loaded(self, block_id: int, shown_ns: int) -> bool:
        """Note a load; whether it is the first of a block that was written in this run."""
        with self._lock:
            place = self._places.get(block_id)
            if place is None:
                return False
            self._shown_ns[place] = shown_ns
            first = int(self._flags[place]) & (_WRITTEN | _READ) == _WRITTEN
            self._flags[place] |= _READ
            return first

    def add(
        self, block_id: int, key: BlockKey, namespace: int, volume: int, used_ns: int, *,
        written: bool = False, shown: bool = False,
    ) -> None:  # fmt: skip
        """Enter a block, or correct where it is.

        `written`: in this run. `shown`: others see `used_ns` in the file's atime.
        """
        with self._lock:
            place = self._put(block_id, key, namespace, volume, used_ns)
            if written:
                self._flags[place] = _LIVE | _WRITTEN
            if shown:
                self._shown_ns[place] = used_ns

    def add_written(
        self, blocks: Sequence[tuple[int, BlockKey, int]], namespace: int, volume: int
    ) -> None:
        """Enter blocks, by id, key, and use, that were written in this run and show their use."""
        with self._lock:
            new: dict[int, tuple[int, BlockKey, int]] = {}
            known = []
            for block in blocks:
                if block[0] in self._places or block[0] in new:
                    known.append(block)
                else:
                    new[block[0]] = block
            if new:
                self._enter_written(list(new.values()), namespace, volume)
            for block_id, key, used_ns in known:
                place = self._put(block_id, key, namespace, volume, used_ns)
                self._flags[place] = _LIVE | _WRITTEN
                self._shown_ns[place] = used_ns

    def mark_seen(self, block_id: int, volume: int) -> bool:
        """Note that a scan has found it on this volume; False if it is not known there."""
        place = self._places.get(block_id)
        if place is None or self._volumes[place] != volume:
            return False
        self._seen[place] = self.generation
        return True

    def remove(self, block_id: int, volume: int | None = None) -> bool:
        """Forget a block, if it is on `volume` (None: wherever)."""
        with self._lock:
            place = self._places.get(block_id)
            if place is None or (volume is not None and self._volumes[place] != volume):
                return False
            self._forget(block_id, place)
            return True

    def _forget(self, block_id: int, place: int) -> None:
        del self._places[block_id]
        self._count(int(self._volumes[place]), -1)
        self._flags[place] = 0
        self._used_ns[place] = 0
        self._free.append(place)

    # Many.

    def add_many(self, columns: Columns, namespace: int, volume: int) -> int:
        """Enter what a snapshot tells, where it is not known already; how many were new."""
        added = 0
        for start in range(0, columns.ids.size, _CHUNK):
            part = columns.part(slice(start, start + _CHUNK))
            with self._lock:
                added += self._add_part(part, namespace, volume)
        return added

    def _add_part(self, part: Columns, namespace: int, volume: int) -> int:
        ids = part.ids.tolist()
        if not self._places.keys().isdisjoint(ids) or len(set(ids)) != len(ids):
            known = self._places
            first = {block_id: i for i, block_id in enumerate(ids) if block_id not in known}
            chosen = np.fromiter(first.values(), np.int64, len(first))
            part = part.part(chosen)
            ids = part.ids.tolist()
        count = len(ids)
        self._reach(self._end + count)
        self._widen(part.hashes.shape[1])
        new = slice(self._end, self._end + count)
        self._ids[new] = part.ids
        self._hashes[new] = 0
        self._hashes[new, : part.hashes.shape[1]] = part.hashes
        self._lengths[new] = part.lengths
        self._groups[new] = part.groups
        self._used_ns[new] = part.used_ns
        self._shown_ns[new] = part.used_ns
        self._seen[new] = 0
        self._namespaces[new] = namespace
        self._volumes[new] = volume
        self._flags[new] = _LIVE
        self._places.update(zip(ids, range(new.start, new.stop), strict=True))
        self._end += count
        self._count(volume, count)
        return count

    def forget_unseen(self, volume: int, shard: int | None = None) -> int:
        """Forget what neither a scan of this generation nor anybody since has seen there, of the
        ids that begin with the byte `shard` (None: of all)."""
        end = self._end
        gone = (
            (self._flags[:end] & _LIVE != 0)
            & (self._volumes[:end] == volume)
            & (self._seen[:end] != self.generation)
        )
        if shard is not None:
            gone &= self._ids[:end] >> np.uint64(56) == shard
        return sum(self.remove(block_id, volume) for block_id in self._ids[:end][gone].tolist())

    def columns(self, namespace: int, volume: int) -> Columns:
        """All of one namespace on one volume, copied."""
        with self._lock:
            end = self._end
            chosen = np.flatnonzero(
                (self._flags[:end] & _LIVE != 0)
                & (self._volumes[:end] == volume)
                & (self._namespaces[:end] == namespace)
            )
            everything = Columns(
                self._ids, self._hashes, self._lengths, self._groups, self._used_ns
            )
            return everything.part(chosen)

    def least_recent(self, volume: int, count: int) -> list[Candidate]:
        """The `count` blocks of a volume that were used least recently, the oldest first."""
        with self._lock:
            end = self._end
            used_ns = self._used_ns[:end].copy()
            here = (self._flags[:end] & _LIVE != 0) & (self._volumes[:end] == volume)
        places = np.flatnonzero(here)
        if places.size > count:
            places = places[np.argpartition(used_ns[places], count)[:count]]
        places = places[np.argsort(used_ns[places], kind="stable")]
        with self._lock:
            return self._candidates(places)

    def shown_all_ns(self, candidates: Sequence[Candidate]) -> list[int]:
        """When others were last shown that these are used; 0 where unknown."""
        shown_ns: list[int] = self._shown_ns[[each.place for each in candidates]].tolist()
        return [
            ns if self._places.get(each.block_id) == each.place else 0
            for each, ns in zip(candidates, shown_ns, strict=True)
        ]

    def evicted(self, candidates: Sequence[Candidate]) -> list[bool]:
        """Forget candidates that have gone, but for those that have been stored anew since they
        were named; which of all were written in this run and never loaded in it.

        A lookup that came in between makes one recent, and does not bring it back.
        """
        places = [candidate.place for candidate in candidates]
        never_read = []
        with self._lock:
            shown_ns, flags = self._shown_ns[places].tolist(), self._flags[places].tolist()
            for candidate, shown, flag in zip(candidates, shown_ns, flags, strict=True):
                is_here = self._places.get(candidate.block_id) == candidate.place
                never_read.append(is_here and flag & (_WRITTEN | _READ) == _WRITTEN)
                if is_here and shown <= candidate.used_ns:
                    self._forget(candidate.block_id, candidate.place)
        return never_read

    def still(self, candidate: Candidate) -> bool:
        """Whether a candidate has been neither used nor forgotten since it was named."""
        return (
            self._places.get(candidate.block_id) == candidate.place
            and int(self._used_ns[candidate.place]) == candidate.used_ns
        )

    def oldest_ns(self) -> int | None:
        """When the least recent block was used, None if there is none."""
        end = self._end
        used_ns = self._used_ns[:end][self._flags[:end] & _LIVE != 0]
        return int(used_ns.min()) if used_ns.size else None

    # Places.

    def _put(self, block_id: int, key: BlockKey, namespace: int, volume: int, used_ns: int) -> int:
        place = self._places.get(block_id)
        if place is None:
            place = self._take_place()
            self._enter(place, block_id, key)
            self._flags[place] = _LIVE
            self._places[block_id] = place
            self._count(volume, 1)
            self._used_ns[place] = used_ns
        else:
            if self._volumes[place] != volume:
                self._count(int(self._volumes[place]), -1)
                self._count(volume, 1)
            self._used_ns[place] = max(int(self._used_ns[place]), used_ns)
        self._namespaces[place] = namespace
        self._volumes[place] = volume
        self._seen[place] = self.generation
        return place

    def _count(self, volume: int, more: int) -> None:
        self._counts[volume] = self._counts.get(volume, 0) + more

    def _candidates(self, places: npt.NDArray[np.int64]) -> list[Candidate]:
        width, digests = self._hashes.shape[1], self._hashes[places].tobytes()
        columns = (self._lengths, self._ids, self._groups, self._namespaces, self._used_ns)
        facts = (column[places].tolist() for column in columns)
        begins = range(0, len(digests), width)
        return [
            Candidate(place, block_id, BlockKey(digests[at : at + length], group), space, used_ns)
            for place, at, length, block_id, group, space, used_ns in zip(
                places.tolist(), begins, *facts, strict=True
            )
        ]

    def _enter(self, place: int, block_id: int, key: BlockKey) -> None:
        self._widen(len(key.hash))
        self._ids[place] = block_id
        self._hashes[place, : len(key.hash)] = np.frombuffer(key.hash, np.uint8)
        self._lengths[place] = len(key.hash)
        self._groups[place] = key.group
        self._used_ns[place] = 0
        self._shown_ns[place] = 0

    def _enter_written(
        self, blocks: Sequence[tuple[int, BlockKey, int]], namespace: int, volume: int
    ) -> None:
        """`_put` of blocks that are not known, each of them once. Who reads without the lock finds
        one when all of it is there."""
        ids, keys, used_ns = zip(*blocks, strict=True)
        lengths = [len(key.hash) for key in keys]
        self._widen(max(lengths))
        places = [self._take_place() for _ in blocks]
        self._ids[places] = np.array(ids, np.uint64)
        width = self._hashes.shape[1]
        digests = b"".join(key.hash.ljust(width, b"\0") for key in keys)
        self._hashes[places] = np.frombuffer(digests, np.uint8).reshape(-1, width)
        self._lengths[places] = lengths
        self._groups[places] = [key.group for key in keys]
        self._used_ns[places] = self._shown_ns[places] = used_ns
        self._seen[places] = self.generation
        self._namespaces[places] = namespace
        self._volumes[places] = volume
        self._flags[places] = _LIVE | _WRITTEN
        self._places.update(zip(ids, places, strict=True))
        self._count(volume, len(blocks))

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        self._reach(self._end + 1)
        self._end += 1
        return self._end - 1

    def _reach(self, end: int) -> None:
        size = self._ids.size
        if end <= size:
            return
        more = max(end, size * 2) - size
        for name in (
            *("_ids", "_hashes", "_lengths", "_groups", "_used_ns", "_shown_ns", "_seen"),
            *("_namespaces", "_volumes", "_flags"),
        ):
            column = getattr(self, name)
            grown = np.zeros((more, *column.shape[1:]), column.dtype)
            setattr(self, name, np.concatenate([column, grown]))

    def _widen(self, width: int) -> None:
        have = self._hashes.shape[1]
        if width > have:
            self._hashes = np.pad(self._hashes, ((0, 0), (0, width - have)))
