"""Page 0: what is written comes back, and anything else is refused in words."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from region_kit import make_spec

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.header import RegionHeader, check, pack, unpack

SPEC = make_spec(engine_id="x" * 128, run_id="run-1.a_b")
HEADER = RegionHeader.of(
    SPEC, owner_pid=4242, owner_start_time=987654321, pid_namespace=4026531836, generation=2**63 - 1
)


def test_a_header_comes_back_as_it_was_packed() -> None:
    page = pack(HEADER)
    assert len(page) == 4096
    assert unpack(page, "here") == HEADER


@given(st.integers(0, 4095), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position: int, flip: int) -> None:
    page = bytearray(pack(HEADER))
    page[position] ^= flip
    with pytest.raises(RegionError, match="here: "):
        unpack(bytes(page), "here")


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (b"", "holds 0 bytes, expected 4096"),
        (bytes(4096), "not a region of kvquay"),
        (b"KVQUAYRG\x07\0\0\0\0\x10\0\0" + bytes(4080), "region format 7"),
    ],
)
def test_what_is_no_header_of_this_format_is_told_apart(page: bytes, told: str) -> None:
    with pytest.raises(RegionError, match=told):
        unpack(page, "here")


def test_every_field_that_differs_is_named_with_both_values() -> None:
    other = replace(SPEC, engine_id="other", run_id="run-2", geometry_digest="ff" * 8, rows=9)
    with pytest.raises(RegionError) as caught:
        check(HEADER, other, "here")
    for text in ("engine_id found", "run_id found 'run-1.a_b' expected 'run-2'", "rows found 8"):
        assert text in str(caught.value)
    assert "geometry_digest found '0123456789abcdef' expected 'ffffffffffffffff'" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["slot_bytes", "local_world_size", "row_bytes", "nbytes"])
def test_a_header_of_another_layout_is_refused(name: str) -> None:
    with pytest.raises(RegionError, match=name):
        check(replace(HEADER, **{name: getattr(HEADER, name) + 64}), SPEC, "here")


HANDLE = RegionHandle(
    backing="memfd",
    name="kvquay_a",
    creator_pid=1,
    creator_start_time=2,
    host="h",
    uid=0,
    fd=3,
    device=4,
    inode=5,
    nbytes=6,
    file_bytes=7,
    huge_pages="off",
    page_bytes=4096,
    generation=8,
)


@pytest.mark.parametrize("name", [field.name for field in fields(RegionHandle)])
def test_a_handle_with_a_missing_or_mistyped_field_is_refused_by_name(name: str) -> None:
    values = HANDLE.to_dict()
    assert RegionHandle.from_dict(values) == HANDLE
    with pytest.raises(RegionError, match=f"{name} is None"):
        RegionHandle.from_dict(values | {name: None})
    del values[name]
    with pytest.raises(RegionError, match=f"{name} is missing"):
        RegionHandle.from_dict(values)


def test_a_handle_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(RegionError, match="colour is unknown"):
        RegionHandle.from_dict(HANDLE.to_dict() | {"colour": 1})
