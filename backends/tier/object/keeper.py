"""What has to be done for a store from time to time: one thread, never the engine's.

It reaches a store that did not answer at the start, lists what is there, and lists again; keeps the
capacity, shares recency, and sweeps what dead writers left in a directory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from backends.errors import TierError
from backends.tier.counters import Counters
from backends.tier.health import Breaker
from backends.tier.object.bank import Bank
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Sick, StoreFault
from backends.tier.object.leftovers import sweep_directory
from backends.tier.object.listing import Listing
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.sharing import Sharing

_TICK_S: Final = 0.25
# A file that nobody has written to for so long is nobody's any more; sweeps go on for that.
_STALE_S: Final = 5.0
_SWEEPS_S: Final = (0.0, 6.0, 60.0)


class Keeper:
    """One tier's. `opened`: the store may be used; `listed`: what was there before is known."""

    def __init__(
        self,
        settings: ObjectSettings,
        client: ObjectClient,
        listing: Listing,
        bank: Bank | None,
        sharing: Sharing | None,
        breaker: Breaker,
        counters: Counters,
        *,
        open_store: Callable[[], None],
        ready: Callable[[], None],
    ) -> None:
        """`ready` is called when stores may begin. `breaker` is that of writing."""
        self._settings = settings
        self._client = client
        self._listing = listing
        self._bank = bank
        self._sharing = sharing
        self._breaker = breaker
        self._counters = counters
        self._open_store = open_store
        self._ready = ready
        self.opened = threading.Event()
        self.listed = threading.Event()
        self._stop = threading.Event()
        self._sweeps = 0
        self._next_open_s = self._next_scan_s = 0.0
        self._next_sweep_s = time.monotonic()
        self._open_pause_s = settings.breaker_s
        self._thread = threading.Thread(
            target=self._serve, name="kvquay-object-keeper", daemon=True
        )

    def open_first(self) -> None:
        """The first attempt, by whoever opens the tier. Raises TierError where none would help."""
        with contextlib.suppress(Sick):
            self._open()

    def start(self) -> None:
        self._thread.start()

    def may_store(self) -> bool:
        return self.opened.is_set() and (self._bank is None or self._bank.counted)

    def stop(self) -> None:
        self._stop.set()
        if self._bank is not None:
            self._bank.stop()

    def join(self, end_s: float) -> bool:
        self._thread.join(max(0.0, end_s - time.monotonic()))
        return not self._thread.is_alive()

    def leave(self) -> None:
        """The last thing: share what is known and give back what was granted."""
        if not self.opened.is_set() or not self._breaker.closed():
            return
        for part in (self._sharing and self._sharing.share, self._bank and self._bank.leave):
            if part:
                with contextlib.suppress(StoreFault):
                    part()

    def _serve(self) -> None:
        while not self._stop.is_set():
            # It shows in the breakers, whose pause ends in a new attempt.
            with contextlib.suppress(StoreFault, OSError):
                self._tick(time.monotonic())
            self._stop.wait(_TICK_S)

    def _tick(self, now_s: float) -> None:
        if not self.opened.is_set():
            if now_s < self._next_open_s:
                return
            self._next_open_s = now_s + self._open_pause_s
            self._open_pause_s = min(2 * self._open_pause_s, self._settings.breaker_most_s)
            try:
                self._open()
            except TierError as error:
                self._breaker.failed(now_s, str(error))
            if not self.opened.is_set():
                return
            self._ready()
        if not self._breaker.closed():
            return
        if now_s >= self._next_sweep_s and self._settings.scheme == "file":
            self._next_sweep_s = now_s + _SWEEPS_S[min(self._sweeps + 1, len(_SWEEPS_S) - 1)]
            self._sweeps += 1
            self._counters.add("swept", sweep_directory(self._settings.prefix, _STALE_S))
        if self._bank is not None:
            could_store = self._bank.counted
            self._bank.tick()
            if self._bank.counted and not could_store:
                if self._bank.has_listed:
                    self._was_listed()
                self._ready()
        if self._is_due(now_s):
            # Where it fails it is not tried again at once.
            self._next_scan_s = now_s + self._settings.breaker_most_s
            if self._listing.scan(self._stop.is_set) is None:
                return
            self._was_listed()
        if self._sharing is not None:
            self._sharing.tick(now_s)

    def _open(self) -> None:
        self._open_store()
        self.opened.set()

    def _was_listed(self) -> None:
        self._counters.add("listings")
        self.listed.set()
        self._next_scan_s = time.monotonic() + self._settings.rescan_s

    def _is_due(self, now_s: float) -> bool:
        if self.listed.is_set() and not self._settings.rescan_s:
            return False
        return now_s >= self._next_scan_s
