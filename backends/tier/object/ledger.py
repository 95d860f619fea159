"""How much of the capacity is used, in one small object that processes change one after another.

A change is a new generation of the object: whoever creates number n + 1 has made it, which needs
create-only puts and nothing more of a store, no locks and no conditional updates. Old generations
are deleted, but not the last ones: a process that was asleep and creates a number that is long gone
sees by the listing that later ones exist, and knows that its change was none.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, TypeVar

import msgspec

from backends.tier.counters import Counters
from backends.tier.health import Breaker
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Absent, Exists, Sick
from backends.tier.object.names import LEDGER, generation_path, parse_generation
from backends.tier.object.requests import Requests

_Answer = TypeVar("_Answer")
_KEPT: Final = 16
_TRIES: Final = 40
_BYTES_MAX: Final = 1 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]


class Holding(msgspec.Struct, frozen=True):
    """What a writer may have written that no listing shows yet, and when it was last heard of."""

    bytes: _Count
    seen_s: float


class Account(msgspec.Struct, frozen=True):
    """One generation. Times are of the wall clock, seconds since the epoch.

    used: bytes stored and granted; None while nobody has counted. granted: all that was ever
    granted, so that a count can tell what was granted meanwhile. evictor: who alone deletes blocks,
    until `until_s`.
    """

    used: _Count | None = None
    granted: _Count = 0
    writers: dict[_Name, Holding] = {}
    evictor: _Name = ""
    until_s: float = 0.0


class Ledger:
    """One process's view. Methods raise StoreFault; what failed so may have been done or not."""

    def __init__(
        self, client: ObjectClient, requests: Requests, breaker: Breaker, counters: Counters
    ) -> None:
        self._client = client
        self._requests = requests
        self._breaker = breaker
        self._counters = counters
        self._one = threading.Lock()
        self._latest: tuple[int, Account] | None = None
        self.cached = Account()

    def read(self) -> Account:
        """The account as it is now."""
        with self._one:
            self._latest = None
            return self._current()[1]

    def update(self, change: Callable[[Account], Account | None]) -> Account:
        """Make a change; the account after it. `change` gives None where there is none to make,
        and is called again where another process was faster."""
        with self._one:
            for attempt in range(_TRIES):
                number, account = self._current()
                changed = change(account)
                if changed is None:
                    return account
                if self._add(number + 1, changed):
                    return changed
                self._counters.add("ledger_conflicts")
                time.sleep(random.uniform(0.0, 0.002 * min(attempt + 1, 20)))
            raise Sick("other processes change the ledger all the time")

    def _current(self) -> tuple[int, Account]:
        while self._latest is None:
            numbers = self._numbers()
            if not numbers:
                self._latest = (0, Account())
                break
            name = generation_path(max(numbers))
            try:
                found = self._ask(partial(self._client.fetch, name, _BYTES_MAX))
            except Absent:
                continue
            self._latest = (max(numbers), _unpack(found.data.tobytes()))
        self.cached = self._latest[1]
        return self._latest

    def _add(self, number: int, account: Account) -> bool:
        name = generation_path(number)
        self._latest = None
        try:
            # Not twice: a second attempt would meet the first one's object, and count as a loss.
            self._ask(lambda: self._client.create(name, msgspec.json.encode(account)), retries=0)
        except Exists:
            return False
        numbers = self._numbers()
        if max(numbers, default=number) - number >= _KEPT:
            self._ask(lambda: self._client.delete([name]))
            return False
        if max(numbers, default=number) == number:
            self._latest = (number, account)
            self.cached = account
        old = [generation_path(each) for each in numbers if each <= number - _KEPT]
        if len(old) >= _KEPT:
            self._ask(lambda: self._client.delete(old))
        return True

    def _numbers(self) -> list[int]:
        pages = self._ask(lambda: list(self._client.pages(LEDGER)))
        names = [parse_generation(found.name) for page in pages for found in page]
        return [number for number in names if number is not None]

    def _ask(self, call: Callable[[], _Answer], retries: int | None = None) -> _Answer:
        return self._requests.ask(call, self._breaker, retries=retries)


def _unpack(data: bytes) -> Account:
    """What is no account is as good as none: what is used has to be counted."""
    try:
        return msgspec.json.decode(data, type=Account)
    except msgspec.DecodeError:
        return Account()
