"""Find out about keys that the index does not have, away from the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from backends.block import BlockKey
from backends.tier.base import Lookup
from backends.tier.filesystem.volume import Volume

_WAITING_MAX: Final = 65536
_ABSENT_MAX: Final = 262144


class Probes:
    """Keys being asked of every path, and keys that were found to be on none."""

    def __init__(self, age_s: float, patience_s: float) -> None:
        """An absence is believed for `age_s`. A probe that takes `patience_s` is a MISS for now."""
        self._age_s = age_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[float, int]] = {}
        self._absent: dict[int, float] = {}
        self.probers: list[Prober] = []

    def ask(self, block_id: int, key: BlockKey) -> Lookup:
        """MISS or PENDING for a key that is not in the index. Waits for nothing."""
        now_s = time.monotonic()
        asked = self._asked.get(block_id)
        if asked is not None:
            return Lookup.PENDING if now_s - asked[0] < self._patience_s else Lookup.MISS
        seen_s = self._absent.get(block_id)
        if seen_s is not None and now_s - seen_s < self._age_s:
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
        """One path has answered."""
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
                self._note_absent(block_id)

    def absent(self, block_id: int) -> None:
        """It is known not to be there."""
        with self._lock:
            self._note_absent(block_id)

    def present(self, block_id: int) -> None:
        with self._lock:
            self._absent.pop(block_id, None)

    def _note_absent(self, block_id: int) -> None:
        if len(self._absent) >= _ABSENT_MAX:
            self._absent.clear()
        self._absent[block_id] = time.monotonic()


class Prober:
    """One path's thread that looks whether there is a file."""

    def __init__(
        self, volume: Volume, found: Callable[[int, BlockKey, bool], None],
        useful: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`found(id, key, there)` gets each answer; `useful` says whether to ask at all."""
        self._volume = volume
        self._found = found
        self.useful = useful
        self._queue: deque[tuple[int, BlockKey]] = deque()
        self._work = threading.Condition()
        self._stopped = False
        name = f"kvquay-fs-probe-{volume.number}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def add(self, block_id: int, key: BlockKey) -> None:
        with self._work:
            self._queue.append((block_id, key))
            self._work.notify()

    def stop(self) -> None:
        with self._work:
            self._stopped = True
            self._queue.clear()
            self._work.notify()

    def join(self, end_s: float) -> bool:
        self._thread.join(max(0.0, end_s - time.monotonic()))
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._stopped:
                    self._work.wait()
                if self._stopped:
                    return
                block_id, key = self._queue.popleft()
            try:
                there = self._volume.blocks.holds(key, block_id)
            # The disk's fault shows in loads and stores; for now the key is not there.
            except OSError:
                there = False
            self._found(block_id, key, there)
