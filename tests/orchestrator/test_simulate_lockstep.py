"""What lockstep needs: turns over replicas, and tiers that know what the others did."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from backends.block import BlockKey
from backends.stack.asks import HERE, NOWHERE, WAIT, Asker
from backends.stack.lane import Lane
from backends.stack.settings import StackSettings
from backends.tier.base import Lookup
from backends.tier.filesystem import FilesystemSettings
from orchestrator.engine.lockstep import LockstepError, Turn
from orchestrator.simulate.clock import Clock
from orchestrator.simulate.medium import Medium
from orchestrator.simulate.tier import SimTier
from orchestrator.simulate.timing import TierTiming
from tests.backends.filesystem_kit import ROW_BYTES, Bench, block_files, make_settings
from tests.orchestrator.test_simulate_tier import Replica, key

CAPACITY = 12
KEYS = 24


def repeatable(disk: Path) -> FilesystemSettings:
    """As experiment=reproducible has it."""
    return make_settings(
        disk,
        capacity=CAPACITY * ROW_BYTES,
        spare_files=0,
        lease_blocks=0,
        stagger_s=0.0,
        touch_interval_s=0.0,
    )


def test_two_real_tiers_on_one_disk_keep_what_two_simulated_ones_keep(tmp_path: Path) -> None:
    """The simulator's model of the filesystem tier, held against the tier itself."""
    disk, chance = tmp_path / "disk", random.Random(7)
    medium = Medium(CAPACITY)
    simulated = [Replica(medium), Replica(medium)]
    settings = repeatable(disk)
    with (
        Bench(settings, replica=0, replicas=2) as one,
        Bench(settings, replica=1, replicas=2) as two,
    ):
        real = [one.ready(), two.ready()]
        before = -1
        for step in range(150):
            who = chance.randrange(2)
            numbers = chance.sample(range(KEYS), chance.randint(1, 4))
            verb = chance.choice(["store", "store", "load", "touch", "has"])
            if who != before:
                assert real[who].fs.settle(10)
                before = who
            expected = getattr(simulated[who], verb)(*numbers)
            found = act(real[who], verb, [key(number) for number in numbers])
            if verb in ("store", "load"):
                assert list(found) == list(expected.outcomes), step
            elif verb == "has":
                assert [answer is Lookup.HIT for answer in found] == expected, step
            there = {name_of(number) for number in range(KEYS) if number in medium}
            assert {path.name for path in block_files(disk)} == there, step
        for bench, replica in zip(real, simulated, strict=True):
            counts, model = bench.fs.counters(), replica.tier.counters()
            for name in ("stored", "loaded", "evicted", "dedup_skips"):
                assert counts[name] == model[name] > 0, name


def act(bench: Bench, verb: str, keys: Sequence[BlockKey]) -> Sequence[object]:
    if verb == "touch":
        bench.fs.touch(keys)
        return ()
    if verb == "has":
        return bench.lookup(keys)
    return bench.store(keys) if verb == "store" else bench.load(keys)


def name_of(number: int) -> str:
    block = key(number)
    return f"{block.hash.hex()}_{block.group}.kvb"


def test_turns_come_in_the_order_of_the_requests(tmp_path: Path) -> None:
    """Each of three threads takes the requests that are its own."""
    served: list[int] = []
    path = tmp_path / "turn"

    def serve(own: Sequence[int]) -> None:
        turn = Turn(path, patience_s=20.0)
        for index in own:
            while not turn.wait(index, 0.01):
                pass
            served.append(index)
            turn.ended(index)
        turn.close()

    shares = [(0, 3, 4), (1, 5, 9), (2, 6, 7, 8)]
    threads = [threading.Thread(target=serve, args=(own,)) for own in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == list(range(10))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_replica_knows_whether_another_one_has_acted(tmp_path: Path) -> None:
    one, two = Turn(tmp_path / "turn", 20.0), Turn(tmp_path / "turn", 20.0)
    assert one.wait(0, 1.0)
    assert not one.others_acted
    one.ended(0)
    assert not one.others_acted
    assert not one.wait(2, 0.0)
    assert two.wait(1, 1.0)
    assert two.others_acted
    two.ended(1)
    assert one.wait(2, 1.0)
    assert one.others_acted


def test_a_request_that_nobody_serves_is_named(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "turn", patience_s=0.02)
    with pytest.raises(LockstepError, match="request 0 has not been served"):
        turn.wait(5, 10.0)


class Doubtful(SimTier):
    """Does not know for as long as it is told not to."""

    unsure = True

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Lookup]:
        return [Lookup.PENDING] * len(keys) if self.unsure else super().lookup(keys)


def test_a_tier_that_got_a_block_is_asked_before_one_that_was_asked_after_it() -> None:
    """What was asked further down, and never came back for, says nothing of what was stored
    since."""
    clock = Clock()
    near = SimTier("fs", Medium(None), ROW_BYTES, clock, TierTiming())
    far = Doubtful("object", Medium(None), ROW_BYTES, clock, TierTiming())
    settings = StackSettings(lookup_timeout_s=5.0)
    asker = Asker([Lane(0, near, settings), Lane(1, far, settings)], settings)
    block = key(1)
    assert asker.ask([block], 0.0) == [WAIT]
    near._medium.show(near._blocks([block]), 1)
    asker.stored([block], 0)
    assert asker.ask([block], 0.1) == [0]
    far.unsure = False
    assert asker.ask([key(2)], 0.2) == [NOWHERE]
    assert HERE not in asker.ask([block], 0.3)
