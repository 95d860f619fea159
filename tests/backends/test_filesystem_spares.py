"""How many files of evicted blocks are kept to be written over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from filesystem_kit import ROW_BYTES, Bench, block_files, make_settings

from backends.block import BlockKey
from backends.testing import make_keys
from backends.tier.base import Outcome
from backends.tier.filesystem import keeper
from backends.tier.filesystem.spares import AHEAD, SHARE, Spares


@pytest.mark.parametrize(("blocks", "ahead"), [(0, 0), (8, 0), (SHARE, 1), (10_000, AHEAD)])
def test_what_is_made_ahead_is_a_small_part_of_the_blocks_that_are_there(
    blocks: int, ahead: int
) -> None:
    assert Spares(64).ahead(blocks) == ahead


def test_a_few_blocks_on_a_full_disk_never_ask_for_more_spares() -> None:
    assert not Spares(64).run_low(8)
    assert Spares(64).run_low(10_000)


@contextlib.contextmanager
def full_tier(disk: Path) -> Iterator[tuple[Bench, Sequence[BlockKey]]]:
    """One that has evicted for the last 64 blocks of these."""
    blocks = 2 * AHEAD * SHARE
    settings = make_settings(
        disk, capacity=blocks * ROW_BYTES, high_watermark=1.0, low_watermark=1.0
    )
    with Bench(settings) as bench:
        bench.ready()
        keys = make_keys("a full tier", blocks + 64)
        for begin in range(0, len(keys), 32):
            assert bench.store(keys[begin : begin + 32]) == [Outcome.DONE] * 32
        yield bench, keys


def test_a_store_of_what_is_there_evicts_nothing(tmp_path: Path) -> None:
    """Also where the spare files have gone, as they do when nobody has needed them for a while."""
    with full_tier(tmp_path / "disk") as (bench, keys):
        pool = bench.fs._lanes[0].pool

        def rests() -> bool:
            """Threads have files ready for the next stores after those before have ended."""
            return pool.busy_for_s() == 0.0

        bench.until(rests, "a thread does not come to its end")
        evicted = bench.count("evicted")
        assert evicted >= 64
        bench.fs._lanes[0].volume.space.drop_spares()
        for _ in range(3):
            assert bench.store(keys[-8:]) == [Outcome.DONE] * 8
        bench.until(rests, "a thread does not come to its end")
        assert bench.count("dedup_skips") == 24
        assert bench.count("evicted") == evicted
        assert len(block_files(tmp_path / "disk")) == len(keys) - evicted


@pytest.mark.parametrize(
    ("kept_s", "disk_is_full", "stay"), [(60, False, True), (0.5, False, False), (60, True, False)]
)
def test_spare_files_outlast_a_pause_of_stores_and_not_a_long_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_s: float,
    disk_is_full: bool,
    stay: bool,
) -> None:
    """Whoever stores after a pause would have to make new files; a full disk needs the room."""
    monkeypatch.setattr(keeper, "_PAUSE_S", 0.5)
    monkeypatch.setattr(keeper, "_SPARES_S", kept_s)
    with full_tier(tmp_path / "disk") as (bench, _):
        row_bytes = bench.rows.row_bytes
        lane = bench.fs._lanes[0]
        bench.until(lambda: lane.pool.busy_for_s() == 0.0, "a thread does not come to its end")
        spares, volume = lane.volume.space.spares, lane.volume
        assert len(spares) > 0
        if disk_is_full:
            monkeypatch.setattr(volume, "limit_bytes", lambda totals: volume.quota_bytes - 1)
        looked = spares.idle_s() + 2.0
        bench.until(lambda: not len(spares) or spares.idle_s() > looked, "time stands still")
        assert (len(spares) > 0) is stay
        bench.until(
            lambda: volume.ledger.totals().reserved_bytes == len(spares) * row_bytes,
            "files that have gone are counted",
        )
        # A full disk is evicted from, too.
        bench.until(
            lambda: volume.ledger.totals().bytes == len(block_files(tmp_path / "disk")) * row_bytes,
            "files and what is counted differ",
        )
