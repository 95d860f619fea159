"""A run's numbers over time: bounded however long it takes, and added up over replicas."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.history import History
from orchestrator.series import Series


def record(levels: list[float], most: int = 8) -> dict[str, Any]:
    """One sample a second; the count grows by one each time."""
    history = History(most=most, interval_s=1.0)
    for second, level in enumerate(levels):
        history.add(float(second), {"count": second}, {"level": level})
    return history.to_dict()


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300), st.sampled_from([4, 8, 16]))
def test_a_history_is_bounded_and_keeps_its_ends_and_its_peak(
    levels: list[float], most: int
) -> None:
    found = record(levels, most)
    assert len(found["t_s"]) <= most
    assert found["t_s"][0] == 0
    assert found["t_s"][-1] == len(levels) - 1
    assert all(a < b for a, b in pairwise(found["t_s"]))
    assert found["count"] == found["t_s"]  # a count belongs to its moment, also after halving
    assert max(found["level"]) == max(levels)


def test_samples_come_half_as_often_each_time_that_it_is_full() -> None:
    history = History(most=8, interval_s=1.0)
    taken = []
    for second in range(200):
        if history.due(float(second)):
            taken.append(second)
            history.add(float(second), {}, {})
    gaps = [b - a for a, b in pairwise(taken)]
    assert gaps[0] == 1
    assert gaps[-1] >= 16
    assert gaps == sorted(gaps)


def result(t_s: list[float], **columns: list[float]) -> dict[str, Any]:
    return {"history": {"t_s": t_s, **columns}}


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 1000)), min_size=1, max_size=200),
        min_size=1,
        max_size=4,
    )
)
def test_rates_over_all_steps_add_up_to_the_count(replicas: list[list[tuple[float, int]]]) -> None:
    results = []
    for steps in replicas:
        t_s = [0.0, *accumulate(step for step, _ in steps)]
        results.append(result(t_s, tokens=[0.0, *accumulate(grown for _, grown in steps)]))
    series = Series.of(results)
    widths = [b - a for a, b in pairwise(series.edges)]
    total = sum(rate * width for rate, width in zip(series.rate("tokens"), widths, strict=True))
    expected = sum(grown for steps in replicas for _, grown in steps)
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert series.total("tokens") == expected


def test_levels_of_replicas_add_up_and_what_they_share_does_not() -> None:
    results = [
        result([0.0, 1.0, 2.0], used=[1.0, 5.0, 2.0]),
        result([0.0, 1.0, 2.0], used=[1.0, 1.0, 4.0]),
    ]
    series = Series.of(results)
    assert series.level("used") == [6.0, 9.0]
    assert series.level("used", shared=True) == [5.0, 5.0]


def test_a_replica_that_has_ended_adds_nothing_more() -> None:
    series = Series.of(
        [result([0.0, 1.0], tokens=[0.0, 10.0]), result([0.0, 4.0], tokens=[0.0, 40.0])]
    )
    assert series.rate("tokens") == [12.5]  # as many steps as the finest one has


def test_where_nothing_grew_there_is_no_ratio() -> None:
    series = Series.of([result([0.0, 1.0, 2.0], moved=[0.0, 6.0, 6.0], busy=[0.0, 2.0, 2.0])])
    assert series.ratio("moved", "busy") == [3.0, None]


def test_engines_that_record_nothing_are_no_error() -> None:
    series = Series.of([{}, {"history": None}, {"history": {"t_s": []}}])
    assert series.histories == ()
    assert series.t_s == ()
