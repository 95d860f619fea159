"""Room for blocks: granted in advance out of the shared ledger, so that a capacity holds always.

Who wants to store takes a grant first; then what all processes together have stored or may still
store is never more than the capacity. Where nothing is left, one process evicts what was used least
recently. A process that dies leaves its grant behind; a later count gives it back.

Nothing is ever counted too low. Too high it may be, after a failure: until the next count.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from backends.tier.counters import Counters
from backends.tier.gone import Gone
from backends.tier.health import Breaker
from backends.tier.index import Candidate, Index
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import StoreFault
from backends.tier.object.ledger import Account, Holding, Ledger
from backends.tier.object.listing import Listing
from backends.tier.object.names import block_path
from backends.tier.object.requests import Requests
from backends.tier.object.settings import ObjectSettings

_GRANT_BLOCKS: Final = 64
_EVICT_BLOCKS: Final = 256
_FULL_S: Final = 0.25
_BEAT_S: Final = 15.0
# A writer that was not heard of for so long is dead, and one that could not be heard stops first.
_DEAD_S: Final = 60.0
_SILENT_S: Final = 40.0
_ROLE_S: Final = 30.0
_IDLE_S: Final = 1.0
_LOOK_S: Final = 10.0


class NoSpace(Exception):
    """A block does not fit, and nothing could be evicted for it."""


class Bank:
    """One process's. Methods raise StoreFault."""

    def __init__(
        self,
        capacity_bytes: int,
        settings: ObjectSettings,
        client: ObjectClient,
        requests: Requests,
        breaker: Breaker,
        listing: Listing,
        index: Index,
        counters: Counters,
        gone: Gone,
        is_loading: Callable[[int], bool],
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._high_bytes = int(settings.high_watermark * capacity_bytes)
        self._low_bytes = int(settings.low_watermark * capacity_bytes)
        self._client = client
        self._requests = requests
        self._breaker = breaker
        self._listing = listing
        self._index = index
        self._counters = counters
        self._gone = gone
        self._is_loading = is_loading
        self._me = secrets.token_hex(8)
        self._ledger = Ledger(client, requests, breaker, counters)
        # Held while the store is asked: who wants room waits for who gets it.
        self._asking = threading.RLock()
        # Held for a few instructions only.
        self._sums = threading.Lock()
        self._free_bytes = 0
        self._flying_bytes = 0
        self._full_until_s = 0.0
        self._heard_s = self._taken_s = self._looked_s = -_DEAD_S
        self._counted_until_s = 0.0
        self._stopped = False
        self.counted = False
        self.has_listed = False

    def take(self, nbytes: int, before_ns: int, wanted: int) -> None:
        """Have room for a block of `nbytes`; `wanted` more will be asked for soon.

        What was used before `before_ns` may be evicted for it. Raises NoSpace. `ended` follows.
        """
        if self._spend(nbytes):
            return
        with self._asking:
            while not self._spend(nbytes):
                if time.monotonic() < self._full_until_s:
                    raise NoSpace("there is no room")
                self._get(nbytes, before_ns, max(1, min(wanted, _GRANT_BLOCKS)))

    def ended(self, nbytes: int, *, unused: bool) -> None:
        """A block that had room is stored, or may be; `unused`: surely not."""
        with self._sums:
            self._flying_bytes -= nbytes
            if unused:
                self._free_bytes += nbytes

    def used_bytes(self) -> int:
        """What is used, as far as is known. Waits for nothing."""
        return max(0, (self._ledger.cached.used or 0) - self._free_bytes)

    def tick(self) -> None:
        """What has to be done from time to time: counting, giving back, evicting ahead."""
        now_s = time.monotonic()
        if not self.counted:
            self._begin()
            return
        if self._free_bytes and now_s - self._taken_s > _IDLE_S:
            self._give_back()
        elif now_s - self._heard_s > _BEAT_S:
            with self._asking:
                self._update(lambda account: account)
        busy = now_s - self._taken_s < _LOOK_S
        if now_s - self._looked_s > (_IDLE_S if busy else _LOOK_S):
            self._looked_s = now_s
            self._ledger.read()
        if (self._ledger.cached.used or 0) > self._high_bytes:
            self._evict_ahead()

    def stop(self) -> None:
        """Lists and evicts no more."""
        self._stopped = True

    def leave(self) -> None:
        """Give everything back, as well as it goes."""

        def change(account: Account) -> Account:
            writers = {name: held for name, held in account.writers.items() if name != self._me}
            used = None if account.used is None else max(0, account.used - self._free_bytes)
            mine = account.evictor == self._me
            return msgspec.structs.replace(
                account,
                used=used,
                writers=writers,
                evictor="" if mine else account.evictor,
                until_s=0.0 if mine else account.until_s,
            )

        with self._asking:
            self._ledger.update(change)
            self._free_bytes = 0

    # Room.

    def _spend(self, nbytes: int) -> bool:
        with self._sums:
            now_s = time.monotonic()
            if now_s - self._heard_s > _SILENT_S:
                # Others may have given away by now what was granted.
                self._free_bytes = 0
            if self._free_bytes < nbytes:
                return False
            self._free_bytes -= nbytes
            self._flying_bytes += nbytes
            self._taken_s = now_s
            return True

    def _get(self, nbytes: int, before_ns: int, wanted: int) -> None:
        for evicted in (False, True):
            if self._grant(nbytes, wanted):
                return
            if not evicted and not self._evict(nbytes * wanted, before_ns):
                break
        # Where there was no room a moment ago there is no use in asking.
        self._full_until_s = time.monotonic() + _FULL_S
        raise NoSpace("there is no room, and nothing that could go for it now")

    def _grant(self, nbytes: int, wanted: int) -> bool:
        got_bytes = 0

        def change(account: Account) -> Account | None:
            nonlocal got_bytes
            got_bytes = 0
            if account.used is None:
                self.counted = False
                return None
            fits = min(wanted, (self._capacity_bytes - account.used) // nbytes)
            if fits < 1:
                return None
            got_bytes = fits * nbytes
            return msgspec.structs.replace(
                account, used=account.used + got_bytes, granted=account.granted + got_bytes
            )

        self._update(change, lambda: got_bytes)
        with self._sums:
            self._free_bytes += got_bytes
        return got_bytes > 0

    def _give_back(self) -> None:
        with self._asking:
            with self._sums:
                # First here, so that a failure leaves it counted and not spent twice.
                back_bytes, self._free_bytes = self._free_bytes, 0
            self._update(
                lambda account: msgspec.structs.replace(
                    account, used=None if account.used is None else account.used - back_bytes
                )
            )

    def _update(
        self, change: Callable[[Account], Account | None], more: Callable[[], int] = lambda: 0
    ) -> Account:
        """A change of the ledger, with what this writer holds brought up to date in it."""

        def with_own(account: Account) -> Account | None:
            changed = change(account)
            if changed is None:
                return None
            held = self._free_bytes + self._flying_bytes + more()
            own = {self._me: Holding(held, time.time())}
            return msgspec.structs.replace(changed, writers=changed.writers | own)

        account = self._ledger.update(with_own)
        if self._me in account.writers:
            self._heard_s = time.monotonic()
        return account

    # Counting.

    def _begin(self) -> None:
        """Believe what others say is used; if there are none, count."""
        account = self._ledger.read()
        others = any(_is_alive(held) for held in account.writers.values())
        if account.used is None or not others:
            with self._asking:
                self.counted = self._count()
            return
        with self._asking:
            self._update(lambda account: account)
            self.counted = True

    def _take_role(self) -> Account | None:
        """Be the one who evicts, for a while; None where another is."""
        mine = False

        def change(account: Account) -> Account | None:
            nonlocal mine
            now_s = time.time()
            mine = account.evictor in ("", self._me) or now_s >= account.until_s
            if not mine:
                return None
            return msgspec.structs.replace(account, evictor=self._me, until_s=now_s + _ROLE_S)

        account = self._update(change)
        return account if mine else None

    def _count(self) -> bool:
        """List everything and put the sum into the ledger, with all that may not be listed yet."""
        before = self._take_role()
        if before is None:
            return self._ledger.cached.used is not None
        held = sum(each.bytes for each in before.writers.values() if _is_alive(each))
        totals = self._listing.scan(lambda: self._stopped)
        if totals is None:
            return False
        self.has_listed = True
        mine = False

        def change(account: Account) -> Account | None:
            nonlocal mine
            mine = account.evictor == self._me
            if not mine:
                return None
            meanwhile = account.granted - before.granted
            return msgspec.structs.replace(
                account,
                used=totals.bytes + held + meanwhile,
                writers={name: each for name, each in account.writers.items() if _is_alive(each)},
                until_s=time.time() + _ROLE_S,
            )

        self._update(change)
        if mine:
            self._counted_until_s = time.monotonic() + _ROLE_S
        return mine

    # Evicting.

    def _evict_ahead(self) -> None:
        with self._asking:
            over_bytes = (self._ledger.cached.used or 0) - self._low_bytes
            while over_bytes > 0 and not self._stopped:
                freed_bytes = self._evict(over_bytes, time.time_ns())
                if not freed_bytes:
                    return
                over_bytes -= freed_bytes

    def _evict(self, need_bytes: int, before_ns: int) -> int:
        """Evict what was used before that, some `need_bytes` at most; the bytes freed.

        Only by who has the role, and knows by a listing since it took it what there is: so nothing
        is freed in the ledger twice.
        """
        if self._stopped or self._take_role() is None:
            return 0
        if time.monotonic() >= self._counted_until_s and not self._count():
            return 0
        self._counted_until_s = time.monotonic() + _ROLE_S
        batch = self._choose(need_bytes, before_ns)
        if not batch:
            return 0
        spaces = self._listing.namespaces
        names = [block_path(spaces[each.namespace], each.key, each.block_id) for each in batch]
        freed_bytes = sum(self._listing.bytes_of(each.block_id) for each in batch)
        try:
            self._requests.ask(lambda: self._client.delete(names), self._breaker)
            self._free_in_ledger(freed_bytes)
        except StoreFault:
            # Which of them are gone is not known, nor whether they were taken off.
            self._counted_until_s = 0.0
            raise
        self._index.evicted(batch)
        self._gone.add(each.key for each in batch if not each.namespace)
        self._counters.add_all({"evicted": len(batch), "evicted_bytes": freed_bytes})
        return freed_bytes

    def _free_in_ledger(self, freed_bytes: int) -> None:
        def change(account: Account) -> Account | None:
            if account.evictor != self._me or account.used is None:
                self._counted_until_s = 0.0
                return None
            return msgspec.structs.replace(
                account,
                used=max(0, account.used - freed_bytes),
                until_s=time.time() + _ROLE_S,
            )

        self._update(change)

    def _choose(self, need_bytes: int, before_ns: int) -> list[Candidate]:
        chosen: list[Candidate] = []
        for candidate in self._index.least_recent(0, _EVICT_BLOCKS):
            if need_bytes <= 0 or candidate.used_ns >= before_ns:
                break
            if not self._is_loading(candidate.block_id):
                chosen.append(candidate)
                need_bytes -= self._listing.bytes_of(candidate.block_id)
        return chosen


def _is_alive(held: Holding) -> bool:
    return time.time() - held.seen_s < _DEAD_S
