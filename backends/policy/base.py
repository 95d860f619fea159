"""What decides which entries of a tier go when it is full. Every eviction policy implements this.

A policy orders keys and nothing else: it knows no rows, no bytes, no tier and no clock. Its owner,
one thread, tells it what came in, what was used and what is gone, and asks it for victims.

An entry is one chunk of a sequence, and `keys[i]` stands for everything up to its end: it is of use
only while `keys[i - 1]` is there too. So `insert` and `touch` take runs of one sequence, first
chunk first. How a request looks to a policy:

    touch(hit prefix)            once, also where nothing was hit: it is how a new request is told
    admit(chunks computed)       only where the tier is full
    insert(those admitted)       one or more times, as they are stored
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

from backends.errors import ConfigError


class EvictionPolicy(ABC):
    """The order in which the entries of one tier go. Deterministic: no clock, no randomness.

    Memory is bounded by a small multiple of the capacity, and a verb costs O(log capacity) a key
    or less, amortised: an entry that may not go must not be met again and again.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of entries that the tier holds when it is full, at least 1."""
        if capacity < 1:
            raise ConfigError(f"a policy was given capacity {capacity}, expected at least 1 entry")
        self.capacity = capacity

    @abstractmethod
    def insert(
        self, keys: Sequence[bytes], now_s: float, first: int = 0, parent: bytes | None = None
    ) -> None:
        """A run of one sequence came in: `keys[0]` is chunk number `first` of it.

        `parent` is the chunk before `keys[0]`, None where that is the first or is not known. None
        of `keys` is there yet. Space is the owner's: it asks for victims first.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        """A request uses this run of one sequence. Keys that are not there are passed over."""

    def admit(
        self,
        keys: Sequence[bytes],
        room: int,
        now_s: float,
        first: int = 0,
        parent: bytes | None = None,
    ) -> int:
        """How many of the first of `keys` are worth what would have to go for them.

        Asked, as `insert` would be told, when the tier has `room` for fewer than these. Unless a
        policy says otherwise: all of them. Admission apart from eviction is in `admission`.
        """
        return len(keys)

    @abstractmethod
    def victims(self, count: int, held: Container[bytes] = ()) -> list[bytes]:
        """At most `count` entries to let go, first one first; they are no longer in the policy.

        None in `held` is among them, and none that has an extension which is still there: an
        extension goes before its prefix. Fewer come back only where no other may go.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """These are gone for another reason: failed, quarantined, reset. Unknown keys are passed
        over; extensions may stay behind without their prefix."""

    @abstractmethod
    def __len__(self) -> int:
        """Entries that are there."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...
