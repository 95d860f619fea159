"""S3-FIFO: three queues. Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023."""

from __future__ import annotations

from collections import OrderedDict

from backends.policy.keyed import KeyPolicy

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo(KeyPolicy):
    """A small queue that what is new must survive by being used, a main one where every use buys
    another round, and the keys that lately went from the small one: those come into the main."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[bytes, int] = OrderedDict()  # key → uses, oldest first
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._small_share = max(1, int(capacity * _SMALL_SHARE))

    def _put(self, key: bytes) -> None:
        if key in self._gone:
            del self._gone[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _use(self, key: bytes) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(_MOST_USES, queue[key] + 1)

    def _candidate(self) -> bytes:
        small, main = self._small, self._main
        while True:
            if small and (len(small) >= self._small_share or not main):
                key = next(iter(small))
                if not small[key]:
                    return key
                del small[key]
                main[key] = 0
            else:
                key = next(iter(main))
                uses = main[key]
                if not uses:
                    return key
                main[key] = uses - 1
                main.move_to_end(key)

    def _spare(self, key: bytes) -> None:
        if key in self._small:
            del self._small[key]
            self._main[key] = 0
        else:
            self._main.move_to_end(key)

    def _drop(self, key: bytes, evicted: bool) -> None:
        if key not in self._small:
            del self._main[key]
            return
        del self._small[key]
        if evicted:
            self._gone[key] = None
            if len(self._gone) > self.capacity:
                self._gone.popitem(last=False)
