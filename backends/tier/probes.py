"""Find out about keys that the index does not have, away from the engine's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from backends.block import BlockKey
from backends.tier.base import Lookup

_WAITING_MAX: Final = 65536
_ABSENT_MAX: Final = 262144


class Asker(Protocol):
    """What finds out, in a thread of its own, about keys it is given."""

    @property
    def useful(self) -> Callable[[], bool]:
        """Whether to ask it at all now."""

    def add(self, block_id: int, key: BlockKey) -> None: ...


class Probes:
    """Keys being asked of every storage, and keys that were found to be on none."""

    def __init__(self, age_s: float, patience_s: float) -> None:
        """An absence is believed for `age_s`. A probe that takes `patience_s` is a MISS for now.

        One that took long to find is believed for twice that time, if that is longer. Else the
        first of many keys would be asked for anew before the last is answered, and their lookup
        would be PENDING for ever.
        """
        self._age_s = age_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[float, int]] = {}
        self._absent_until_s: dict[int, float] = {}
        self.probers: Sequence[Asker] = ()

    def ask(self, block_id: int, key: BlockKey) -> Lookup:
        """MISS or PENDING for a key that is not in the index. Waits for nothing."""
        now_s = time.monotonic()
        asked = self._asked.get(block_id)
        if asked is not None:
            return Lookup.PENDING if now_s - asked[0] < self._patience_s else Lookup.MISS
        absent_until_s = self._absent_until_s.get(block_id)
        if absent_until_s is not None and now_s < absent_until_s:
            return Lookup.MISS
        probers = [prober for prober in self.probers if prober.useful()]
        if not probers or len(self._asked) >= _WAITING_MAX:
            return Lookup.MISS
        with self._lock:
            self._asked[block_id] = (now_s, len(probers))
        for prober in probers:
            prober.add(block_id, key)
        return Lookup.PENDING

    def answered(self, block_id: int, found: bool) -> None:
        """One storage has answered."""
        with self._lock:
            asked = self._asked.get(block_id)
            if asked is None:
                return
            if found:
                del self._asked[block_id]
            elif asked[1] > 1:
                self._asked[block_id] = (asked[0], asked[1] - 1)
            else:
                del self._asked[block_id]
                now_s = time.monotonic()
                believed_s = max(self._age_s, 2 * (now_s - asked[0]))
                self._note_absent(block_id, now_s + believed_s)

    def absent(self, block_id: int) -> None:
        """It is known not to be there."""
        with self._lock:
            self._note_absent(block_id, time.monotonic() + self._age_s)

    def forget_absent(self) -> None:
        """Ask anew for what was not there."""
        with self._lock:
            self._absent_until_s.clear()

    def present(self, block_ids: Iterable[int]) -> None:
        """They are known to be there."""
        with self._lock:
            for block_id in block_ids:
                self._absent_until_s.pop(block_id, None)

    def _note_absent(self, block_id: int, until_s: float) -> None:
        if len(self._absent_until_s) >= _ABSENT_MAX:
            self._absent_until_s.clear()
        self._absent_until_s[block_id] = until_s
