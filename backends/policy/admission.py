"""Which chunks are worth an entry of a tier at all. Asked before anything is let go for them.

All of these admit a beginning of a run: a chunk whose prefix stays out would be of no use. They
know keys only, like the eviction policies beside which they stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from backends.errors import ConfigError
from backends.policy.sketch import FrequencySketch
from backends.tier.settings import suggest


class AdmissionPolicy(ABC):
    """Asked by the owner of one tier; deterministic, and bounded by its capacity in entries."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of entries that the tier holds when it is full, at least 1."""
        if capacity < 1:
            raise ConfigError(f"admission was given capacity {capacity}, expected at least 1 entry")
        self.capacity = capacity

    @abstractmethod
    def seen(self, keys: Sequence[bytes]) -> None:
        """A request came by with these, whether they are there or not. Once a request."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes]) -> int:
        """How many of the first of `keys`, a run that is not there, are worth storing."""

    @abstractmethod
    def gone(self, keys: Sequence[bytes]) -> None:
        """These went to make room."""


class AdmitAll(AdmissionPolicy):
    """Everything."""

    def seen(self, keys: Sequence[bytes]) -> None:
        pass

    def admit(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def gone(self, keys: Sequence[bytes]) -> None:
        pass


class SecondHit(AdmissionPolicy):
    """What is asked for a second time while the first is still remembered: as many first sights as
    four times the capacity."""

    _REMEMBERED: Final = 4

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._sights: OrderedDict[bytes, int] = OrderedDict()

    def seen(self, keys: Sequence[bytes]) -> None:
        sights = self._sights
        for key in reversed(keys):  # a prefix is remembered at least as long as its extension
            sights[key] = sights.get(key, 0) + 1
            sights.move_to_end(key)
        while len(sights) > self._REMEMBERED * self.capacity:
            sights.popitem(last=False)

    def admit(self, keys: Sequence[bytes]) -> int:
        return _leading(keys, lambda key: self._sights.get(key, 0) > 1)

    def gone(self, keys: Sequence[bytes]) -> None:
        pass


class TinyLfuAdmission(AdmissionPolicy):
    """What was lately asked for more often than what lately went. While nothing goes, everything.

    TinyLFU compares with the one entry that would go; a store is admitted before a victim is
    chosen, so the comparison is with the mean of the latest victims.
    """

    _SMOOTHING: Final = 1 / 64

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._sketch = FrequencySketch(4 * capacity)
        self._threshold = 0.0

    def seen(self, keys: Sequence[bytes]) -> None:
        self._sketch.add(keys)

    def admit(self, keys: Sequence[bytes]) -> int:
        threshold = self._threshold
        if not threshold:
            return len(keys)
        return _leading(keys, lambda key: self._sketch.count(key) > threshold)

    def gone(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._threshold += (self._sketch.count(key) - self._threshold) * self._SMOOTHING


def _leading(keys: Sequence[bytes], wanted: Callable[[bytes], bool]) -> int:
    return next((number for number, key in enumerate(keys) if not wanted(key)), len(keys))


ADMISSIONS: Final[Mapping[str, type[AdmissionPolicy]]] = {
    "all": AdmitAll,
    "second_hit": SecondHit,
    "tinylfu": TinyLfuAdmission,
}


def open_admission(name: str, capacity: int) -> AdmissionPolicy:
    """A new admission policy. Raises ConfigError: there is none of that name."""
    kind = ADMISSIONS.get(name)
    if kind is None:
        raise ConfigError(f"there is no admission policy {name!r}; {suggest(name, ADMISSIONS)}")
    return kind(capacity)
