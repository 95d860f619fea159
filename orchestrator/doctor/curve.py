"""Latency by number of blocks: measured for some numbers, each many times, with pauses between.

Loads one after the other find threads, caches and disks awake, and a run's do not: it loads a few
blocks, and then does something else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Final

from orchestrator.doctor.result import Curve, Point

MOST_BLOCKS: Final = 32
_LEAST_COUNT: Final = 2
_INTERRUPTED: Final = 4.0
"""A batch that took so many times the median was interrupted by something else. It counts, and as
no more than that: of one in fifty nobody knows how many there will be in a run."""


def numbers_of_blocks(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and at most MOST_BLOCKS."""
    return [1 << n for n in range(MOST_BLOCKS.bit_length()) if 1 << n <= most]


def make_curve(records: Iterable[tuple[int, float]]) -> Curve | None:
    """Of (blocks, seconds) in any order; None where nothing was measured often enough.

    `fixed_s` and `per_block_s` are the line through the means, by least squares of what they miss
    relative to the means, so that few blocks count as much as many. Neither is negative.
    """
    found: dict[int, list[float]] = {}
    for blocks, seconds in records:
        found.setdefault(blocks, []).append(seconds)
    points = tuple(
        _point(blocks, seconds)
        for blocks, seconds in sorted(found.items())
        if len(seconds) >= _LEAST_COUNT
    )
    if not points:
        return None
    fixed_s, per_block_s = _line([(float(p.blocks), p.mean) for p in points])
    return Curve(fixed_s=fixed_s, per_block_s=per_block_s, points=points)


def _point(blocks: int, seconds: list[float]) -> Point:
    middle_s = statistics.median(seconds)
    mean_s = statistics.fmean(min(each, _INTERRUPTED * middle_s) for each in seconds)
    return Point(blocks=blocks, count=len(seconds), mean=mean_s, p50=middle_s)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    w = wx = wy = wxx = wxy = 0.0
    for x, y in points:
        weight = 1 / max(y, 1e-9) ** 2
        w, wx, wy = w + weight, wx + weight * x, wy + weight * y
        wxx, wxy = wxx + weight * x * x, wxy + weight * x * y
    spread = w * wxx - wx * wx
    if len(points) < 2 or spread <= 0:
        return 0.0, wy / wx
    slope = (w * wxy - wx * wy) / spread
    fixed = (wy - slope * wx) / w
    if slope < 0:
        return wy / w, 0.0
    return (fixed, slope) if fixed >= 0 else (0.0, wxy / wxx)
