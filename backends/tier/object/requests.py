"""One request after another until it works, or there is no use in asking again.

Counts what happens, tells the breaker, and waits between attempts with jitter, so that many clients
of one sick server do not come back together.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from backends.tier.counters import Counters
from backends.tier.health import Breaker
from backends.tier.object.faults import Denied, NoBucket, Sick
from backends.tier.object.settings import ObjectSettings

_Answer = TypeVar("_Answer")
COUNTS: Final = ("requests", "retries", "throttled", "timeouts", "denied", "breaker_opened")
_COUNTED: Final = {"throttled": "throttled", "timeout": "timeouts"}


class Requests:
    """How one tier asks its store."""

    def __init__(self, settings: ObjectSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._stopped = threading.Event()

    def stop(self) -> None:
        """No further attempts: what waits for the next one fails now."""
        self._stopped.set()

    def ask(
        self,
        call: Callable[[], _Answer],
        breaker: Breaker,
        *,
        deadline_s: float | None = None,
        retries: int | None = None,
    ) -> _Answer:
        """What `call` gives. Raises StoreFault.

        `deadline_s` is on time.monotonic's clock: no attempt begins behind it. `retries` None: as
        the settings say.
        """
        settings = self._settings
        most = settings.retries if retries is None else retries
        for attempt in range(most + 1):
            began_s = time.monotonic()
            self._counters.add("requests")
            try:
                answer = call()
            except Sick as error:
                self._failed(breaker, began_s, error)
                pause_s = self._pause_s(attempt)
                if (
                    attempt == most
                    or not breaker.closed()
                    or (deadline_s is not None and time.monotonic() + pause_s >= deadline_s)
                    or self._stopped.wait(pause_s)
                ):
                    raise
                self._counters.add("retries")
            except (Denied, NoBucket) as error:
                self._counters.add("denied")
                self._failed(breaker, began_s, error)
                raise
            except Exception:
                breaker.succeeded(began_s)
                raise
            else:
                breaker.succeeded(began_s)
                return answer
        raise AssertionError("the last attempt either answers or raises")

    def _failed(self, breaker: Breaker, began_s: float, error: Exception) -> None:
        kind = _COUNTED.get(error.kind) if isinstance(error, Sick) else None
        if kind is not None:
            self._counters.add(kind)
        was_closed = breaker.closed()
        breaker.failed(began_s, str(error))
        if was_closed and not breaker.closed():
            self._counters.add("breaker_opened")

    def _pause_s(self, attempt: int) -> float:
        settings = self._settings
        longest_s = min(settings.retry_most_s, settings.retry_s * 2.0**attempt)
        return longest_s * random.uniform(0.5, 1.0)
