"""Rows, keys and bytes of tests are what they say, in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backends.block import HEADER_BYTES, check, seal, set_state
from backends.testing import FINGERPRINT, RowBuffer, make_keys, stored_block

ROW_BYTES = 3 * 4096


def test_rows_are_aligned_and_apart() -> None:
    rows = RowBuffer(4, ROW_BYTES)
    addresses = [rows.row_view(row).__array_interface__["data"][0] for row in range(4)]
    assert all(address % 4096 == 0 for address in addresses)
    assert np.diff(addresses).tolist() == [ROW_BYTES] * 3
    assert rows.row_view(0).size == rows.row_bytes == ROW_BYTES


def test_keys_and_bytes_are_the_same_in_every_process() -> None:
    script = (
        "import hashlib; from backends.testing import FINGERPRINT, make_keys, stored_block; "
        "[key] = make_keys('anywhere', 1); "
        f"block = stored_block(key, FINGERPRINT, {ROW_BYTES}); "
        "print(hashlib.sha256(block.tobytes()).hexdigest(), end='')"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    [key] = make_keys("anywhere", 1)
    block = stored_block(key, FINGERPRINT, ROW_BYTES)
    assert said == {hashlib.sha256(block.tobytes()).hexdigest()}


def test_a_stored_block_is_what_a_filled_row_becomes() -> None:
    [key] = make_keys("filled", 1)
    rows = RowBuffer(1, ROW_BYTES)
    rows.fill(0, key)
    assert rows.wrong(0, key) is None
    seal(rows.row_view(0), ROW_BYTES - HEADER_BYTES)
    assert (rows.row_view(0) == stored_block(key, FINGERPRINT, ROW_BYTES)).all()
    assert check(rows.row_view(0), key, FINGERPRINT, ROW_BYTES - HEADER_BYTES) is None


def test_every_key_group_and_namespace_has_bytes_of_its_own() -> None:
    first, second = make_keys("own", 2)
    other = hashlib.sha256(b"other").digest()
    blocks = [
        stored_block(key, fingerprint, ROW_BYTES)[HEADER_BYTES:].tobytes()
        for key in (first, second, first._replace(group=1))
        for fingerprint in (FINGERPRINT, other)
    ]
    assert len(set(blocks)) == 6


def test_any_wrong_byte_of_a_row_is_told() -> None:
    first, second = make_keys("told", 2)
    rows = RowBuffer(1, ROW_BYTES)
    rows.fill(0, first)
    assert "holds key" in (rows.wrong(0, second) or "")
    rows.row_view(0)[-1] ^= 1
    assert rows.wrong(0, first) == f"row 0 has 1 wrong payload bytes, the first at {8191}"
    rows.fill(0, first)
    set_state(rows.row_view(0), 0)
    assert "has state 0" in (rows.wrong(0, first) or "")


@pytest.mark.parametrize("row_bytes", [4096, 4097, 10_000])
def test_a_row_needs_whole_pages_and_a_payload(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"row_bytes is {row_bytes}"):
        RowBuffer(1, row_bytes)


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError, match="row is 2"):
        RowBuffer(2, ROW_BYTES).row_view(2)
