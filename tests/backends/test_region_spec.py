"""Layout arithmetic and the checks on a region's identity."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from region_kit import make_spec

from backends.errors import RegionError
from backends.region.spec import (
    HEADER_BYTES,
    ROW_HEADER_BYTES,
    RegionSpec,
    row_bytes_for,
    rows_for_size,
)

slots = st.integers(1, 1 << 20).map(lambda units: units * 64)
small_specs = st.builds(
    lambda rows, units, workers: make_spec(
        rows=rows, slot_bytes=units * 64, local_world_size=workers
    ),
    st.integers(1, 12),
    st.integers(1, 300),
    st.integers(1, 9),
)


@given(small_specs)
def test_no_byte_belongs_to_two_slots_and_headers_padding_and_slots_fill_the_region(
    spec: RegionSpec,
) -> None:
    spans = [(0, HEADER_BYTES)]
    for row in range(spec.rows):
        spans.append((spec.row_offset(row), ROW_HEADER_BYTES))
        spans += [(spec.slot_offset(row, k), spec.slot_bytes) for k in range(spec.local_world_size)]
    spans.sort()
    gaps = [
        after[0] - (before[0] + before[1])
        for before, after in zip(spans, [*spans[1:], (spec.nbytes, 0)], strict=True)
    ]
    assert all(gap >= 0 for gap in gaps)
    # What is between is padding: less than a page, and only where a row ends.
    assert all(gap < 4096 for gap in gaps)
    assert sum(gap > 0 for gap in gaps) <= spec.rows


@given(small_specs)
def test_slots_are_aligned_to_64_and_rows_to_4096(spec: RegionSpec) -> None:
    for row in range(spec.rows):
        assert spec.row_offset(row) % 4096 == 0
        for local_rank in range(spec.local_world_size):
            offset = spec.slot_offset(row, local_rank)
            assert offset % 64 == 0
            assert offset + spec.slot_bytes <= spec.row_offset(row) + spec.row_bytes
    assert spec.nbytes % 4096 == 0


@given(st.integers(0, 1 << 42), slots, st.integers(1, 64))
def test_rows_for_size_is_the_most_that_fits_and_never_exceeds_it(
    size_bytes: int, slot_bytes: int, workers: int
) -> None:
    rows = rows_for_size(size_bytes, slot_bytes, workers)
    row_bytes = row_bytes_for(slot_bytes, workers)
    if rows:
        assert HEADER_BYTES + rows * row_bytes <= size_bytes
    assert HEADER_BYTES + (rows + 1) * row_bytes > size_bytes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine_id": "../escape"}, "engine_id is '../escape'"),
        ({"engine_id": ""}, "engine_id is ''"),
        ({"engine_id": ".hidden"}, "engine_id"),
        ({"engine_id": "a/b"}, "engine_id"),
        ({"engine_id": "a\n"}, "engine_id"),
        ({"engine_id": "x" * 129}, "1 to 128"),
        ({"run_id": "a b"}, "run_id"),
        ({"geometry_digest": "XYZ"}, "geometry_digest is 'XYZ'"),
        ({"backing": "hugetlbfs"}, "backing is 'hugetlbfs', expected one of memfd, shm"),
        ({"huge_pages": "yes"}, "expected one of off, try, require"),
        ({"rows": 0}, "rows is 0"),
        ({"local_world_size": 0}, "local_world_size 0"),
        ({"slot_bytes": 100}, "round it up to 128"),
        ({"slot_bytes": 0}, "round it up to 64"),
        ({"persist_name": True}, "no name to keep"),
        ({"numa_node": -1}, "numa_node is -1"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_by_name(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RegionError, match=told):
        make_spec(**changes)


@pytest.mark.parametrize(("row", "local_rank"), [(-1, 0), (8, 0), (0, -1), (0, 2)])
def test_an_offset_outside_the_region_is_refused(row: int, local_rank: int) -> None:
    with pytest.raises(RegionError, match="expected 0 <="):
        make_spec(rows=8, local_world_size=2).slot_offset(row, local_rank)


def test_rows_for_size_refuses_an_empty_slot() -> None:
    with pytest.raises(RegionError, match="slot_bytes is 0"):
        rows_for_size(1 << 20, 0, 1)


def test_planning_modules_load_neither_numpy_nor_torch() -> None:
    modules = ["machine", "region.spec", "region.space", "region.reap", "region.header"]
    code = (
        f"import sys, {', '.join('backends.' + name for name in modules)}\n"
        "print({'numpy', 'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
