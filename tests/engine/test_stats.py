"""Percentiles out of histograms that were merged."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from backends.histogram import LatencyHistogram


@given(
    values=st.lists(st.floats(1e-6, 100), min_size=1, max_size=200),
    percent=st.sampled_from([1, 50, 95, 99, 100]),
    parts=st.integers(1, 4),
)
def test_a_percentile_of_merged_histograms_is_within_five_percent(
    values: list[float], percent: int, parts: int
) -> None:
    histograms = [LatencyHistogram() for _ in range(parts)]
    for value in values:
        random.choice(histograms).add(value)
    merged = LatencyHistogram()
    for histogram in histograms:
        merged.merge(histogram)
    exact = sorted(values)[-(-len(values) * percent // 100) - 1]
    found = merged.percentile_s(percent)
    assert found is not None
    assert abs(found / exact - 1) < 0.05


def test_nothing_measured_has_no_percentile() -> None:
    assert LatencyHistogram().percentile_s(50) is None
