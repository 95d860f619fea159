"""Look whether there is a file, away from the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from backends.block import BlockKey
from backends.tier.filesystem.volume import Volume


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
