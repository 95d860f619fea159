"""ARC: adaptive replacement. Megiddo and Modha, FAST 2003."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from backends.policy.keyed import KeyPolicy

_Order = OrderedDict[bytes, None]


class Arc(KeyPolicy):
    """Keys used once and keys used more often, each least recent first, and what lately went from
    either: a miss on one of those says which of the two has too little room.

    One difference from the paper follows from the interface: a victim is chosen before it is known
    what comes in, so the case where both halves are exactly in balance is always the same one.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: _Order = OrderedDict()
        self._often: _Order = OrderedDict()
        self._gone_once: _Order = OrderedDict()
        self._gone_often: _Order = OrderedDict()
        self._once_target = 0.0

    def _put(self, key: bytes) -> None:
        gone_once, gone_often = self._gone_once, self._gone_often
        if key in gone_once:
            step = max(1.0, len(gone_often) / len(gone_once))
            self._once_target = min(float(self.capacity), self._once_target + step)
            del gone_once[key]
            self._often[key] = None
        elif key in gone_often:
            step = max(1.0, len(gone_once) / len(gone_often))
            self._once_target = max(0.0, self._once_target - step)
            del gone_often[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def _put_all(self, keys: Sequence[bytes]) -> None:
        if self._gone_once.keys().isdisjoint(keys) and self._gone_often.keys().isdisjoint(keys):
            self._once.update(dict.fromkeys(keys))
        else:
            super()._put_all(keys)

    def _use(self, key: bytes) -> None:
        if key in self._often:
            self._often.move_to_end(key)
        else:
            del self._once[key]
            self._often[key] = None

    def _candidate(self) -> bytes:
        from_once = self._once and (len(self._once) > self._once_target or not self._often)
        return next(iter(self._once if from_once else self._often))

    def _spare(self, key: bytes) -> None:
        (self._once if key in self._once else self._often).move_to_end(key)

    def _drop(self, key: bytes, evicted: bool) -> None:
        order, gone = self._once, self._gone_once
        if key not in order:
            order, gone = self._often, self._gone_often
        del order[key]
        if not evicted:
            return
        gone[key] = None
        if len(self._once) + len(self._gone_once) > self.capacity and self._gone_once:
            self._gone_once.popitem(last=False)
        elif (
            len(self._once) + len(self._often) + len(self._gone_once) + len(self._gone_often)
            >= 2 * self.capacity
        ):
            (self._gone_often or self._gone_once).popitem(last=False)
