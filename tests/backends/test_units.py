"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.units import format_size, parse_size

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("  1TiB ", 2**40),
        ("1.5GiB", 3 * 2**29),
        ("0.1TB", 10**11),
        ("4096", 4096),
        ("1kib", 1024),
        ("0", 0),
        ("0.9B", 0),
    ],
)
def test_reads(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "8 gigs", "-1", "+1GiB", "1e3", "1e400", "nan", "inf", "0x10", "1_000"),
        *("1,5GiB", "8Gi", "8G", "8GiB/s", "8 Gi B", ".5GiB", "5.GiB", "1.2.3MiB", "9" * 19),
        "\N{ARABIC-INDIC DIGIT THREE}GiB",
    ],
)
def test_refuses_what_is_no_size_and_says_what_is_one(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and a unit, such as 512MiB") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**18 - 1), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_whole_numbers_are_exact_in_every_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * UNITS[unit]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6 - 1), st.sampled_from(sorted(UNITS)))
def test_fractions_are_exact_and_rounded_down(whole: int, millionths: int, unit: str) -> None:
    exact = (whole * 10**6 + millionths) * UNITS[unit] // 10**6
    assert parse_size(f"{whole}.{millionths:06d}{unit}") == exact


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**60))
def test_a_shown_size_reads_back_as_nearly_the_same(nbytes: int) -> None:
    shown = format_size(nbytes)
    assert parse_size(shown) == pytest.approx(nbytes, rel=0.006)
    assert len(shown) <= len("1023.9 MiB")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (2**30 - 1, "1.00 GiB"),
        (260 * 1024, "260 KiB"),
        (255_900_000, "244.0 MiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_shows(nbytes: int, shown: str) -> None:
    assert format_size(nbytes) == shown
