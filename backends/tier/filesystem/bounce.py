"""Buffers in huge pages to read and write through, where that is faster.

O_DIRECT moves bytes between the disk and the row itself. A region of 4 KiB pages is seldom one
piece of physical memory, and a disk, or a hypervisor, may make a request of every piece: some then
take three times as long as for one huge page, and others do not care. Which it is depends on the
disk and on how fragmented memory is now, so for loads both ways are timed while they are used.
Stores are not timed: one that goes another way than those around it, with buffers that have left
the cache, says nothing about all of them going that way.
"""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections import deque
from typing import Final, Literal

import numpy as np

from backends.tier.base import Bytes

Mode = Literal["auto", "on", "off"]

_HUGE_BYTES: Final = 2 << 20
# One transfer of a longer row goes piece by piece.
_MOST_BYTES: Final = 4 << 20
# So many small blocks go through one buffer at a time.
_TOGETHER: Final = 8
_TOGETHER_BYTES: Final = 9 << 18
# Less than this is one request or a few, whatever its pages.
_LEAST_BYTES: Final = 32 << 10
# So many transfers each way before one is preferred; their median decides, because a disk that
# stops for a moment says nothing about the way.
_FIRST: Final = 9
# The way that is not preferred is tried once in so long a time.
_AGAIN_S: Final = 2.0
# The copy costs processor time: it has to gain that much.
_GAIN: Final = 1.15


class Way:
    """Loads, or stores: how long they took with a buffer and without. Threads may share it."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        # Seconds a byte, without a buffer and with one: the newest, and their median.
        self._newest: tuple[deque[float], deque[float]] = (
            deque(maxlen=_FIRST),
            deque(maxlen=_FIRST),
        )
        self._costs = [0.0, 0.0]
        self._tried_s = 0.0

    def bounces(self) -> bool:
        """Whether the next transfer is to go through a buffer."""
        if self._mode != "auto":
            return self._mode == "on"
        without, with_buffer = map(len, self._newest)
        now_s = time.monotonic()
        if min(without, with_buffer) < _FIRST:
            self._tried_s = now_s
            return with_buffer < without
        if now_s - self._tried_s > _AGAIN_S:
            self._tried_s = now_s
            return not self._is_faster()
        return self._is_faster()

    def took(self, nbytes: int, spent_s: float, *, bounced: bool) -> None:
        newest = self._newest[bounced]
        newest.append(spent_s / nbytes)
        self._costs[bounced] = statistics.median_low(list(newest))

    def gain(self) -> float | None:
        """How many times as fast it is with a buffer; None while that is not known."""
        without, with_buffer = self._costs
        known = min(map(len, self._newest)) >= _FIRST
        return without / with_buffer if known and with_buffer else None

    def _is_faster(self) -> bool:
        return self._costs[0] > _GAIN * self._costs[1]


class Bounce:
    """Of one path. Without O_DIRECT the kernel copies anyway, and nothing is used here."""

    def __init__(self, mode: Mode, row_bytes: int, buffers: int) -> None:
        if row_bytes < _LEAST_BYTES and mode == "auto":
            mode = "off"
        self.loads = Way(mode)
        # The checksum of what is stored has to be made, and the copy comes with it. So a buffer
        # costs nothing, is one piece, and stays in the cache, out of which the disk is then fed.
        self.stores = Way("on" if mode == "auto" and row_bytes <= _MOST_BYTES else mode)
        rows = max(1, min(_TOGETHER, _TOGETHER_BYTES // row_bytes))
        self._nbytes = min(row_bytes * rows, _MOST_BYTES)
        self._count = buffers
        self._making = threading.Lock()
        self._free: deque[Bytes] | None = None

    def take(self, way: Way) -> Bytes | None:
        """A buffer, uint8 [n], for one transfer, which is to be given back; None: go without."""
        if not way.bounces():
            return None
        if self._free is None:
            with self._making:
                if self._free is None:
                    self._free = self._make()
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, buffer: Bytes | None, way: Way, nbytes: int, spent_s: float) -> None:
        """A transfer of so many bytes has ended; nbytes 0: it failed, and says nothing."""
        if nbytes:
            way.took(nbytes, spent_s, bounced=buffer is not None)
        if buffer is not None and self._free is not None:
            self._free.append(buffer)

    def describe(self) -> str:
        """Empty where it is not known, or no use."""
        known = (("stores", self.stores.gain()), ("loads", self.loads.gain()))
        words = [f"{what} x{gain:.1f}" for what, gain in known if gain is not None]
        return f"; through huge pages {' and '.join(words)} as fast as without" if words else ""

    def _make(self) -> deque[Bytes]:
        # Together, so that small ones share their huge pages.
        size = self._count * self._nbytes
        memory = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        flat = np.frombuffer(memory, dtype=np.uint8)
        begin = -flat.ctypes.data % _HUGE_BYTES
        flat = flat[begin : begin + size]
        flat[:: mmap.PAGESIZE] = 0
        return deque(np.split(flat, self._count))
