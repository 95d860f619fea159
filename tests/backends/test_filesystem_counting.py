"""Counts of many files at once: the same as of one after another."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filesystem_kit import Bench, make_settings

from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.ledgerfile import QUARANTINE_SHARD

NEVER = 200


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Counts that nobody else changes: the tier has seen all of its path."""
    with Bench(make_settings(tmp_path / "disk")) as bench:
        bench.ready()
        assert bench.fs.wait_until_known(20, scanned=True)
        lane = bench.fs._lanes[0]
        lane.keeper.stop()
        assert lane.keeper.join(time.monotonic() + 20)
        ledger = lane.volume.ledger
        yield ledger
        with ledger.counting() as counts:
            for shard in range(QUARANTINE_SHARD):
                counts.set(shard, 0, 0)


def fill(ledger: Ledger) -> None:
    with ledger.counting() as counts:
        for shard in range(QUARANTINE_SHARD):
            counts.set(shard, 1000 * shard, shard % 7)
        counts.set(NEVER, 0, -1)
    ledger.totals()


@pytest.mark.parametrize("sign", [1, -1])
def test_many_at_once_count_as_one_by_one(ledger: Ledger, sign: int) -> None:
    """Some shards several times, one that was never counted, some that would fall below nothing."""
    rng = random.Random(sign)
    shards = [*rng.choices(range(20, 240), k=300), NEVER, 3, 3]
    nbytes = [sign * rng.choice([0, 4096, 16384]) for _ in shards]
    found = []
    for at_once in (False, True):
        fill(ledger)
        before = ledger.cached
        with ledger.counting() as counts:
            if at_once:
                counts.add_all(shards, nbytes, sign)
            else:
                for shard, more in zip(shards, nbytes, strict=True):
                    counts.add(shard, more, sign)
        after = ledger.cached
        found.append(
            (ledger.counts().copy(), after.bytes - before.bytes, after.blocks - before.blocks)
        )
        assert ledger.counts()[NEVER].tolist() == [0, -1]
        totals = ledger.totals()
        assert (totals.bytes, totals.blocks) == (after.bytes, after.blocks)
    (one_by_one, *changed), (together, *changed_together) = found
    assert np.array_equal(one_by_one, together)
    assert changed == changed_together
    assert (one_by_one >= -1).all()


def test_nothing_at_once_changes_nothing(ledger: Ledger) -> None:
    fill(ledger)
    before = ledger.counts().copy()
    with ledger.counting() as counts:
        counts.add_all([], [], 1)
    assert np.array_equal(ledger.counts(), before)
