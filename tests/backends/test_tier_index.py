"""The index of the lower tiers: what it still knows after an eviction that others crossed."""

from __future__ import annotations

import numpy as np
import pytest

from backends.block import BlockKey
from backends.testing import make_keys
from backends.tier.index import Candidate, Index

KEY = make_keys("evicted", 1)[0]


@pytest.fixture
def index() -> Index:
    index = Index()
    index.add_written([(7, KEY, 100)], 0, 0)
    return index


def named(index: Index) -> Candidate:
    (candidate,) = index.least_recent(0, 1)
    return candidate


def test_a_lookup_while_a_block_goes_does_not_bring_it_back(index: Index) -> None:
    candidate = named(index)
    assert index.use(7, 200) == 0
    index.evicted([candidate])
    assert 7 not in index
    assert index.count(0) == 0


def test_a_block_that_was_stored_anew_while_it_went_stays_known(index: Index) -> None:
    candidate = named(index)
    index.add_written([(7, KEY, 200)], 0, 0)
    index.evicted([candidate])
    assert 7 in index


def test_the_place_of_another_block_is_not_forgotten(index: Index) -> None:
    candidate = named(index)
    index.remove(7)
    index.add_written([(8, KEY, 50)], 0, 0)
    index.evicted([candidate])
    assert 8 in index
    assert index.count(0) == 1


def test_blocks_that_are_entered_together_are_all_there() -> None:
    """Hashes of several lengths, more than there are places for, one of them twice."""
    index = Index()
    keys = [BlockKey(bytes([n % 251]) * (1 + n % 40), n % 3) for n in range(3000)]
    ids = [(2**63 + 7 * n) % 2**64 for n in range(3000)]
    for begin in range(0, 3000, 29):
        part = slice(begin, begin + 29)
        blocks = list(zip(ids[part], keys[part], range(begin + 1, begin + 30), strict=False))
        index.add_written([*blocks, (ids[begin], keys[begin], begin + 9000)], 4, 2)
    assert len(index) == index.count(2) == 3000
    found = {each.block_id: each for each in index.least_recent(2, 4000)}
    for n, (block_id, key) in enumerate(zip(ids, keys, strict=True)):
        used_ns = n + 9000 if n % 29 == 0 else n + 1
        assert found[block_id][1:] == (block_id, key, 4, used_ns)
        assert index.volume_of(block_id) == 2
    assert index.shown_all_ns([found[ids[29]], found[ids[1]]]) == [29 + 9000, 2]
    columns = index.columns(4, 2)
    assert sorted(columns.ids.tolist()) == sorted(ids)
    assert index.evicted(list(found.values())) == [True] * 3000
    assert len(index) == 0


def test_places_of_blocks_that_have_gone_are_used_again(index: Index) -> None:
    """And nothing of who was there before shows."""
    long_key, short_key = BlockKey(b"\xff" * 32, 9), BlockKey(b"\x01" * 4, 0)
    index.add_written([(1, long_key, 10), (2, long_key, 11)], 3, 0)
    index.loaded(1, 10)
    assert index.evicted(index.least_recent(0, 2)) == [False, True]
    index.add_written([(5, short_key, 20), (6, short_key, 21)], 0, 1)
    first, second = index.least_recent(1, 9)
    assert {first.place, second.place} < {0, 1, 2}
    assert (first.key, first.namespace) == (short_key, 0)
    assert index.shown_all_ns([first, second]) == [20, 21]
    hashes = index.columns(0, 1).hashes
    assert np.array_equal(hashes[0], hashes[1])
    assert not hashes[0, 4:].any()


def test_what_was_shown_of_a_block_that_has_gone_is_not_known(index: Index) -> None:
    candidate = named(index)
    assert index.shown_all_ns([candidate]) == [100]
    index.remove(7)
    assert index.shown_all_ns([candidate]) == [0]
    assert index.evicted([candidate]) == [False]
