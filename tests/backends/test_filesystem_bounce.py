"""Buffers in huge pages: which way is taken, and that bytes are the same either way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.testing import make_keys
from backends.tier.base import Outcome
from backends.tier.filesystem import bounce
from backends.tier.filesystem.bounce import Bounce, Way
from tests.backends.filesystem_kit import Bench, block_files, make_settings

ROW_BYTES = 64 << 10


def settle(way: Way, without_s: float, with_s: float, transfers: int = 64) -> None:
    """Transfers of a disk on which each way always takes as long."""
    for _ in range(transfers):
        bounced = way.bounces()
        way.took(ROW_BYTES, with_s if bounced else without_s, bounced=bounced)


def test_both_ways_are_timed_before_one_is_preferred() -> None:
    way = Way("auto")
    taken = []
    for _ in range(2 * bounce._FIRST):
        taken.append(way.bounces())
        way.took(ROW_BYTES, 1.0, bounced=taken[-1])
    assert taken.count(True) == taken.count(False) == bounce._FIRST
    assert way.gain() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("without_s", "with_s", "bounces"),
    [(3.0, 1.0, True), (1.0, 3.0, False), (1.1, 1.0, False), (1.0, 1.0, False)],
)
def test_a_buffer_is_used_where_it_gains_more_than_it_costs(
    without_s: float, with_s: float, bounces: bool
) -> None:
    way = Way("auto")
    settle(way, without_s, with_s)
    assert way.bounces() is bounces
    assert way.gain() == pytest.approx(without_s / with_s)


def test_the_other_way_is_tried_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("backends.tier.filesystem.bounce.time.monotonic", lambda: now[0])
    way = Way("auto")
    settle(way, 3.0, 1.0)
    assert [way.bounces() for _ in range(3)] == [True, True, True]
    now[0] += bounce._AGAIN_S + 0.1
    assert [way.bounces() for _ in range(3)] == [False, True, True]
    # The disk is another one now: it is found out, if slowly.
    for _ in range(bounce._FIRST):
        now[0] += bounce._AGAIN_S + 0.1
        settle(way, 1.0, 3.0, transfers=2)
    assert way.bounces() is False


def test_a_disk_that_stops_for_a_moment_decides_nothing() -> None:
    way = Way("auto")
    for n in range(2 * bounce._FIRST):
        bounced = way.bounces()
        stopped = bounced and n % 8 == 1
        way.took(ROW_BYTES, 100.0 if stopped else 1.0 if bounced else 3.0, bounced=bounced)
    assert way.bounces() is True


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_choice_is_kept(mode: bounce.Mode) -> None:
    way = Way(mode)
    settle(way, 3.0 if mode == "off" else 1.0, 1.0 if mode == "off" else 3.0)
    assert way.bounces() is (mode == "on")


def test_buffers_are_lent_and_come_back() -> None:
    buffers = Bounce("on", ROW_BYTES, 2)
    way = buffers.loads
    first, second = buffers.take(way), buffers.take(way)
    assert first is not None
    assert second is not None
    assert not np.shares_memory(first, second)
    # Small blocks go through it several at a time.
    assert (first.size, first.ctypes.data % 4096) == (8 * ROW_BYTES, 0)
    # One more transfer than there are buffers goes without.
    assert buffers.take(way) is None
    buffers.give_back(first, way, 0, 1.0)
    assert buffers.take(way) is first


def test_tiny_rows_go_without() -> None:
    buffers = Bounce("auto", 8192, 2)
    settle(buffers.loads, 3.0, 1.0)
    assert buffers.take(buffers.loads) is None


@pytest.mark.parametrize(
    ("row_bytes", "size"),
    [
        (1 << 18, 1 << 21),
        ((1 << 19) + 4096, 4 * ((1 << 19) + 4096)),
        (1 << 21, 1 << 21),
        ((1 << 22) + 4096, 1 << 22),
    ],
)
def test_a_buffer_has_room_for_as_many_blocks_as_go_together(row_bytes: int, size: int) -> None:
    buffers = Bounce("on", row_bytes, 1)
    buffer = buffers.take(buffers.stores)
    assert buffer is not None
    assert buffer.size == size


def test_stores_go_through_a_buffer_that_a_whole_block_fits_and_nothing_times_them() -> None:
    buffers = Bounce("auto", ROW_BYTES, 2)
    for _ in range(50):
        buffer = buffers.take(buffers.stores)
        assert buffer is not None
        assert buffer.size >= ROW_BYTES
        buffers.give_back(buffer, buffers.stores, ROW_BYTES, 1e9)
    large = Bounce("auto", (4 << 20) + 4096, 2)
    assert large.take(large.stores) is None
    # Loads are timed, both ways first.
    buffer = buffers.take(buffers.loads)
    assert buffer is None
    buffers.give_back(buffer, buffers.loads, ROW_BYTES, 1.0)
    assert buffers.take(buffers.loads) is not None


@pytest.mark.parametrize("mode", ["on", "auto", "off"])
@pytest.mark.parametrize("most_bytes", [ROW_BYTES, ROW_BYTES - 4096, 4096])
def test_blocks_come_back_the_same_whichever_way_they_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, most_bytes: int
) -> None:
    """Also where a row is longer than a buffer, and goes piece by piece."""
    monkeypatch.setattr(bounce, "_MOST_BYTES", most_bytes)
    keys = make_keys("a", 30)
    settings = make_settings(tmp_path / "disk", bounce=mode, threads=4)
    with Bench(settings, row_bytes=ROW_BYTES).ready() as bench:
        assert bench.store(keys) == [Outcome.DONE] * 30
        assert bench.load(keys) == [Outcome.DONE] * 30
    damaged = block_files(tmp_path / "disk")[0]
    data = bytearray(damaged.read_bytes())
    data[-5000] ^= 4
    damaged.write_bytes(data)
    with Bench(settings, row_bytes=ROW_BYTES).ready() as bench:
        outcomes = bench.load(keys)
        assert sorted(outcomes, key=str).count(Outcome.CORRUPT) == 1
        assert outcomes.count(Outcome.DONE) == 29
