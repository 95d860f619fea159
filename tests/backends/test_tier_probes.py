"""What is asked of a storage in the background, on a clock of the test's own."""

from __future__ import annotations

import itertools

import pytest

from backends.block import BlockKey
from backends.testing import make_keys
from backends.tier import probes
from backends.tier.base import Lookup
from backends.tier.probes import Probes


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Disk:
    """Holds nothing, and is asked of one key after another."""

    def __init__(self, clock: Clock, probe_s: float, age_s: float) -> None:
        self._clock = clock
        self._probe_s = probe_s
        self._queue: list[int] = []
        self.probes = Probes(age_s, 5.0)
        self.probes.probers = [self]

    def useful(self) -> bool:
        return True

    def add(self, block_id: int, _key: BlockKey) -> None:
        self._queue.append(block_id)

    def lookup(self, keys: list[BlockKey]) -> list[Lookup]:
        return [self.probes.ask(number, key) for number, key in enumerate(keys)]

    def go_on(self) -> None:
        """One probe."""
        self._clock.now_s += self._probe_s
        if self._queue:
            self.probes.answered(self._queue.pop(0), False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(probes, "time", clock)
    return clock


@pytest.mark.parametrize("probe_s", [0.001, 0.01, 0.04])
def test_a_lookup_of_many_keys_ends_where_they_take_longer_than_an_absence_is_believed(
    clock: Clock, probe_s: float
) -> None:
    keys = make_keys("many", 100)
    disk = Disk(clock, probe_s, age_s=0.05)
    for count in itertools.count():
        if Lookup.PENDING not in disk.lookup(keys):
            break
        assert count < 1000, "a lookup stays PENDING"
        disk.go_on()


def test_what_was_found_quickly_is_asked_for_again_at_its_age(clock: Clock) -> None:
    keys = make_keys("one", 1)
    disk = Disk(clock, 0.001, age_s=0.05)
    assert disk.lookup(keys) == [Lookup.PENDING]
    disk.go_on()
    for _ in range(49):
        assert disk.lookup(keys) == [Lookup.MISS]
        disk.go_on()
    disk.go_on()
    assert disk.lookup(keys) == [Lookup.PENDING]
