"""What the object tier does with a store that works."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from object_kit import ROW_BYTES, HookedClient, MemoryHarness, make_settings, path_of

from backends.errors import TierError
from backends.testing import TierConformance
from backends.testing.bench import TierBench
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context, make_keys
from backends.tier.base import Lookup, Outcome
from backends.tier.object import names
from backends.tier.object.doctor import leftovers
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.tier import ObjectTier

DONE, SHED = Outcome.DONE, Outcome.SHED


class Watched:
    """A store in a directory, whose requests are counted, and held while `gate` is closed."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.seen: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.benches: list[TierBench] = []

    def open(
        self,
        *,
        replica: int = 0,
        replicas: int = 1,
        row_bytes: int = ROW_BYTES,
        rows: int = 32,
        client_type: type[HookedClient] = HookedClient,
        **changes: Any,
    ) -> TierBench:
        buffer = RowBuffer(rows, row_bytes)
        settings = make_settings(f"file://{self.root}", **changes)
        context = make_context(buffer, data_parallel_index=replica, data_parallel_size=replicas)
        tier = ObjectTier(context, settings, client=client_type(settings, self._see))
        self.benches.append(TierBench(tier, buffer, 20.0))
        return self.benches[-1]

    def count(self, operation: str) -> int:
        """Requests of a kind for blocks."""
        return sum(found == operation and ".kvb" in name for found, name in self.seen)

    def objects(self, where: str = "") -> list[Path]:
        return [path for path in (self.root / where).rglob("*") if path.is_file()]

    def _see(self, operation: str, name: str) -> None:
        self.seen.append((operation, name))
        if ".kvb" in name:
            self.gate.wait(20)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.gate.set()
    for bench in watched.benches:
        bench.close()


class UnconditionalHarness(MemoryHarness):
    """As a store without conditional writes is used."""

    changes: ClassVar[Mapping[str, Any]] = {"conditional": "off"}
    capabilities = dataclasses.replace(MemoryHarness.capabilities, quota=False)


class TestWithoutConditionalWrites(TierConformance):
    harness_type = UnconditionalHarness


class OverwritingClient(HookedClient):
    """A store that does not know the condition, as some gateways."""

    def create(self, name: str, data: Any) -> None:
        self.put(name, data)


def test_a_store_that_overwrites_is_found_out_and_said(store: Watched) -> None:
    bench = store.open(client_type=OverwritingClient)
    [line] = bench.tier.describe()  # type: ignore[attr-defined]
    assert "no conditional writes" in line
    keys = make_keys("overwritten", 4)
    assert bench.store(keys) == [DONE] * 4
    assert bench.load(keys) == [DONE] * 4
    [line] = store.open().tier.describe()  # type: ignore[attr-defined]
    assert "puts create only" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"conditional": "on"}, "set conditional to auto"), ({"capacity": 1 << 20}, "unbounded")],
)
def test_what_needs_conditional_writes_is_refused_without(
    changes: dict[str, Any], words: str, store: Watched
) -> None:
    with pytest.raises(TierError, match=words):
        store.open(client_type=OverwritingClient, **changes)


def test_replicas_that_store_the_same_blocks_cost_one_upload(store: Watched) -> None:
    benches = [store.open(replica=i, replicas=4, stagger_s=0.1) for i in range(4)]
    keys = make_keys("same", 16)
    jobs = [bench.submit_store(keys) for bench in benches]
    for bench, job in zip(benches, jobs, strict=True):
        assert bench.outcomes(job) == [DONE] * 16
    assert sum(bench.tier.counters()["stored"] for bench in benches) == 16
    assert len([path for path in store.objects() if path.suffix == ".kvb"]) == 16
    for bench in benches:
        assert bench.load(keys) == [DONE] * 16


def test_a_block_whose_first_writer_is_gone_is_stored_all_the_same(store: Watched) -> None:
    bench = store.open(replica=2, replicas=4)
    keys = make_keys("left alone", 16)
    assert bench.store(keys) == [DONE] * 16
    assert bench.tier.counters()["stored"] == 16


def test_replicas_that_are_isolated_do_not_see_each_other(store: Watched) -> None:
    first = store.open(replica=0, replicas=2, placement="per_replica")
    second = store.open(replica=1, replicas=2, placement="per_replica")
    keys = make_keys("isolated", 4)
    assert first.store(keys) == [DONE] * 4
    assert second.lookup(keys) == [Lookup.MISS] * 4
    assert second.store(keys) == [DONE] * 4
    assert second.tier.counters()["stored"] == 4


def test_a_wrong_object_in_the_way_of_a_create_only_put_is_replaced(store: Watched) -> None:
    keys = make_keys("in the way", 3)
    for key, data in zip(keys, (b"", b"short", bytes(ROW_BYTES)), strict=True):
        path = store.root / path_of(FINGERPRINT, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    bench = store.open()
    assert bench.store(keys) == [DONE] * 3
    assert bench.tier.counters()["stored"] == 3
    assert bench.load(keys) == [DONE] * 3


def test_what_was_wrong_is_kept_for_inspection_within_its_limit(store: Watched) -> None:
    bench = store.open(quarantine_limit_bytes=3 * ROW_BYTES)
    keys = make_keys("kept", 8)
    bench.store(keys)
    for key in keys:
        _flip(store.root / path_of(FINGERPRINT, key))
    assert bench.load(keys) == [Outcome.CORRUPT] * 8
    kept = store.objects(names.QUARANTINE)
    assert 0 < len(kept) <= 3
    assert bench.tier.counters()["quarantined"] == 8
    assert not any((store.root / path_of(FINGERPRINT, key)).exists() for key in keys)


def test_without_a_quarantine_what_is_wrong_is_deleted(store: Watched) -> None:
    bench, [key] = store.open(quarantine_limit_bytes=0), make_keys("deleted", 1)
    bench.store([key])
    _flip(store.root / path_of(FINGERPRINT, key))
    assert bench.load([key]) == [Outcome.CORRUPT]
    assert not store.objects(names.QUARANTINE)
    assert bench.tier.counters()["corrupt"] == 1


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


def test_a_giant_under_a_blocks_name_is_not_read(store: Watched) -> None:
    bench, [key] = store.open(), make_keys("giant", 1)
    bench.store([key])
    with (store.root / path_of(FINGERPRINT, key)).open("wb") as file:
        file.truncate(1 << 40)
    assert bench.load([key]) == [Outcome.CORRUPT]
    assert bench.store([key]) == [DONE]


def test_big_blocks_go_up_in_parts_and_come_back(store: Watched) -> None:
    big_bytes = 12 << 20
    in_parts = {"multipart_threshold": 6 << 20, "multipart_part": 5 << 20}
    bench = store.open(row_bytes=big_bytes, rows=2, **in_parts)
    keys = make_keys("big", 2)
    assert bench.store(keys) == [DONE] * 2
    assert store.count("put_parts") == 2
    assert bench.load(keys) == [DONE] * 2
    again = store.open(row_bytes=big_bytes, rows=2, **in_parts)
    assert again.store(keys) == [DONE] * 2
    assert store.count("put_parts") == 2


def test_keys_are_spread_over_prefixes(store: Watched) -> None:
    bench = store.open()
    for number in range(8):
        bench.store(make_keys(f"spread {number}", 32))
    shards = Counter(path.parent.name for path in store.objects() if path.suffix == ".kvb")
    assert len(shards) > 100
    assert max(shards.values()) < 12


def test_the_manifest_says_what_the_digest_stands_for_and_is_written_once(store: Watched) -> None:
    bench = store.open()
    path = store.root / FINGERPRINT.hex() / names.MANIFEST
    written = path.stat()
    was = (written.st_ino, written.st_mtime_ns)
    document = json.loads(path.read_text())
    assert document["fingerprint"] == FINGERPRINT.hex()
    assert document["row_bytes"] == ROW_BYTES
    store.open()
    # Not its atime, which reading it changes.
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == was
    with pytest.raises(TierError, match="blocks of 16384 bytes, expected 32768"):
        store.open(row_bytes=2 * ROW_BYTES)
    bench.close()


@pytest.mark.parametrize("found", [b"", b"{", b"[1]", b'{"row_bytes": "x"}', b"\xff" * 100])
def test_a_manifest_that_is_none_is_written_anew(found: bytes, store: Watched) -> None:
    path = store.root / FINGERPRINT.hex() / names.MANIFEST
    path.parent.mkdir(parents=True)
    path.write_bytes(found)
    store.open()
    assert json.loads(path.read_text())["row_bytes"] == ROW_BYTES


def test_loads_go_before_stores(store: Watched) -> None:
    bench = store.open(concurrency=1)
    stored = make_keys("stored before", 4)
    bench.store(stored)
    store.gate.clear()
    store.seen.clear()
    stores = bench.submit_store(make_keys("stored later", 8))
    bench.until(lambda: store.count("create") > 0, "no store begins")
    load = bench.submit_load(stored)
    store.gate.set()
    assert bench.outcomes(load) == [DONE] * 4
    assert bench.outcomes(stores) == [DONE] * 8
    order = [found for found, name in store.seen if ".kvb" in name]
    last_load = max(i for i, found in enumerate(order) if found == "fetch")
    assert order[:last_load].count("create") <= 4


def test_no_more_than_allowed_are_in_flight(store: Watched) -> None:
    bench = store.open(concurrency=8, in_flight_bytes=3 * ROW_BYTES)
    store.gate.clear()
    job = bench.submit_store(make_keys("in flight", 16))
    bench.until(lambda: store.count("create") == 3, "three stores never begin")
    time.sleep(0.05)
    assert store.count("create") == 3
    store.gate.set()
    assert bench.outcomes(job) == [DONE] * 16


def test_unfinished_files_are_listed_and_swept_when_they_are_old(store: Watched) -> None:
    first = store.open()
    first.store(make_keys("finished", 2))
    first.close()
    [block, *_] = [path for path in store.objects() if path.suffix == ".kvb"]
    old, new, foreign = (Path(f"{block}#{n}") for n in (1, 2, "x"))
    for path in (old, new, foreign):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 60, time.time() - 60))
    settings = make_settings(f"file://{store.root}")
    assert {left.name for left in leftovers(settings)} == {str(old), str(new)}
    bench = store.open()
    bench.until(lambda: bench.tier.counters()["swept"] > 0, "the old one is never swept")
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()
    assert bench.tier.counters()["swept"] == 1


def test_a_directory_of_blocks_is_nobody_elses_business(store: Watched) -> None:
    store.open()
    assert store.root.stat().st_mode & 0o077 == 0


def test_memory_takes_no_part_of_the_callers_rows() -> None:
    rows = RowBuffer(4, ROW_BYTES)
    bench = TierBench(ObjectTier(make_context(rows), ObjectSettings("memory:///")), rows, 20.0)
    keys = make_keys("aliased", 2)
    assert bench.store(keys) == [DONE] * 2
    for row in range(4):
        rows.scribble(row)
    assert bench.load(keys) == [DONE] * 2
    bench.close()


def test_a_capacity_below_one_block_is_refused(store: Watched) -> None:
    with pytest.raises(TierError, match="one block"):
        store.open(capacity=ROW_BYTES - 1)


def test_another_fingerprint_under_the_same_name_is_not_served(store: Watched) -> None:
    [key] = make_keys("fingerprint", 1)
    bench = store.open()
    bench.store([key])
    other = hashlib.sha256(b"other").digest()
    rows = RowBuffer(2, ROW_BYTES, other)
    theirs = TierBench(
        ObjectTier(make_context(rows), make_settings(f"file://{store.root}")), rows, 20.0
    )
    theirs.store([key])
    (store.root / path_of(FINGERPRINT, key)).write_bytes(
        (store.root / path_of(other, key)).read_bytes()
    )
    theirs.close()
    assert bench.load([key]) == [Outcome.CORRUPT]
    assert bench.store([key]) == [DONE]
    assert bench.load([key]) == [DONE]
