"""The index of the lower tiers: what it still knows after an eviction that others crossed."""

from __future__ import annotations

import pytest

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
    index.evicted(candidate)
    assert 7 not in index
    assert index.count(0) == 0


def test_a_block_that_was_stored_anew_while_it_went_stays_known(index: Index) -> None:
    candidate = named(index)
    index.add_written([(7, KEY, 200)], 0, 0)
    index.evicted(candidate)
    assert 7 in index


def test_the_place_of_another_block_is_not_forgotten(index: Index) -> None:
    candidate = named(index)
    index.remove(7)
    index.add_written([(8, KEY, 50)], 0, 0)
    index.evicted(candidate)
    assert 8 in index
    assert index.count(0) == 1
