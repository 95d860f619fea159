"""What the object tier knows of its store without asking, how it finds out, and how processes share
one capacity."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from object_kit import ROW_BYTES, HookedClient, make_settings, path_of

from backends.testing.bench import TierBench
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context, make_keys, stored_block
from backends.tier.base import Lookup, Outcome
from backends.tier.counters import Counters
from backends.tier.health import Breaker
from backends.tier.object import names, recency
from backends.tier.object.client import ObjectClient
from backends.tier.object.ledger import Account, Holding, Ledger
from backends.tier.object.recency import Uses
from backends.tier.object.requests import COUNTS, Requests
from backends.tier.object.tier import ObjectTier

DONE, SHED = Outcome.DONE, Outcome.SHED
HIT, MISS = Lookup.HIT, Lookup.MISS


class Opener:
    """Tiers on one directory, whose requests are counted."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.seen: Counter[str] = Counter()
        self.benches: list[TierBench] = []

    def __call__(self, *, fingerprint: bytes = FINGERPRINT, **changes: Any) -> TierBench:
        rows = RowBuffer(32, ROW_BYTES, fingerprint)
        settings = make_settings(f"file://{self.root}", **{"rescan_s": 0.0, **changes})
        client = HookedClient(settings, lambda operation, name: self._see(operation, name))
        tier = ObjectTier(make_context(rows), settings, client=client)
        self.benches.append(TierBench(tier, rows, 20.0))
        assert tier.wait_until_known(20.0)
        return self.benches[-1]

    def put(self, label: str, count: int) -> tuple[Any, ...]:
        """Blocks by another program."""
        keys = make_keys(label, count)
        for key in keys:
            path = self.root / path_of(FINGERPRINT, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored_block(key, FINGERPRINT, ROW_BYTES).tobytes())
        return keys

    def blocks(self) -> int:
        return sum(1 for _ in self.root.rglob("*.kvb"))

    def _see(self, operation: str, name: str) -> None:
        if operation != "list" or not name.startswith(names.LEDGER):
            self.seen[operation] += 1


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    for bench in opener.benches:
        bench.close()


# Existence.


def test_what_was_there_before_is_known_without_asking_for_each(opener: Opener) -> None:
    keys = opener.put("before", 40)
    bench = opener()
    opener.seen.clear()
    assert list(bench.tier.lookup(keys)) == [HIT] * 40
    assert not opener.seen


def test_a_few_unknown_keys_are_asked_for_one_by_one(opener: Opener) -> None:
    bench = opener()
    theirs = opener.put("few", 3)
    opener.seen.clear()
    assert bench.lookup([*theirs, *make_keys("nowhere", 2)]) == [HIT] * 3 + [MISS] * 2
    assert (opener.seen["size"], opener.seen["list"]) == (5, 0)


@pytest.mark.alone  # The longer it takes, the more often it lists.
def test_many_unknown_keys_are_found_by_one_listing(opener: Opener) -> None:
    bench = opener(probe_interval_s=0.05)
    theirs = opener.put("many", 40)
    opener.seen.clear()
    assert bench.lookup([*theirs, *make_keys("nowhere", 40)]) == [HIT] * 40 + [MISS] * 40
    assert opener.seen["size"] == 0
    assert opener.seen["list"] <= 4


def test_absence_is_believed_for_a_while_and_no_longer(opener: Opener) -> None:
    bench, keys = opener(absent_ttl_s=0.2), make_keys("absent", 2)
    assert bench.lookup(keys) == [MISS] * 2
    opener.put("absent", 2)
    opener.seen.clear()
    assert list(bench.tier.lookup(keys)) == [MISS] * 2
    assert not opener.seen
    bench.until(lambda: bench.lookup(keys) == [HIT] * 2, "an absence is believed for ever")


def test_an_object_of_another_size_is_no_hit(opener: Opener) -> None:
    keys = opener.put("cut", 20)
    for key in keys:
        path = opener.root / path_of(FINGERPRINT, key)
        path.write_bytes(path.read_bytes()[:-1])
    bench = opener(probe_interval_s=0.02)
    assert bench.lookup(keys) == [MISS] * 20
    assert bench.lookup(keys[:2]) == [MISS] * 2
    assert bench.store(keys) == [DONE] * 20
    assert bench.load(keys) == [DONE] * 20


def test_what_a_lifecycle_rule_removed_is_forgotten_by_the_next_listing(opener: Opener) -> None:
    keys = opener.put("expired", 6)
    bench = opener(rescan_s=0.2)
    assert bench.lookup(keys) == [HIT] * 6
    shutil.rmtree(opener.root / FINGERPRINT.hex())
    bench.until(lambda: bench.lookup(keys) == [MISS] * 6, "they are never forgotten")


def test_names_that_are_no_blocks_are_passed_over(opener: Opener) -> None:
    [key] = opener.put("real", 1)
    own = opener.root / FINGERPRINT.hex()
    for name in ("00/x.kvb", "00/zz_0.kvb", f"00/{'ab' * 65}_0.kvb", "00/ab_99999999999.kvb"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(b"x")
    (opener.root / "stranger" / "00").mkdir(parents=True)
    (opener.root / "stranger" / "00" / "ab_0.kvb").write_bytes(b"x")
    bench = opener(capacity=4 * ROW_BYTES)
    assert bench.tier.usage().blocks == 1
    assert bench.load([key]) == [DONE]


@given(st.text(max_size=120))
def test_any_name_is_parsed_or_refused(name: str) -> None:
    names.parse_block_path(name)
    names.parse_generation(name)
    names.parse_block_path(f"{'a' * 64}/00/{name}.kvb")


# Recency.


@given(st.dictionaries(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), max_size=50))
def test_recency_comes_back_as_it_was_packed(uses: dict[int, int]) -> None:
    ours = Uses(np.array(list(uses), np.uint64), np.array(list(uses.values()), np.uint32))
    back = recency.unpack(recency.pack(ours))
    assert back is not None
    assert dict(zip(back.ids.tolist(), back.used_s.tolist(), strict=True)) == uses


@given(st.binary(max_size=200), st.integers(0, 150))
def test_what_is_no_recency_is_none(noise: bytes, place: int) -> None:
    assert recency.unpack(noise) is None
    packed = bytearray(recency.pack(Uses(np.arange(9, dtype=np.uint64), np.ones(9, np.uint32))))
    place %= len(packed)
    if not 12 <= place < 16:  # reserved
        packed[place] ^= 1
        assert recency.unpack(bytes(packed)) is None


def test_the_later_use_counts_and_what_is_gone_stays_gone() -> None:
    ours = Uses(np.array([5, 1, 9], np.uint64), np.array([10, 20, 30], np.uint32))
    theirs = Uses(np.array([9, 1, 7], np.uint64), np.array([40, 5, 99], np.uint32))
    merged = recency.merge(ours, theirs)
    assert merged.ids.tolist() == [5, 1, 9]
    assert merged.used_s.tolist() == [10, 20, 40]


def test_what_another_process_uses_is_evicted_last(opener: Opener) -> None:
    keys = opener.put("shared use", 8)
    past_s = time.time() - 1000
    for number, key in enumerate(keys):
        path = opener.root / path_of(FINGERPRINT, key)
        os.utime(path, (past_s + number, past_s + number))
    other = opener(capacity=8 * ROW_BYTES)
    other.tier.touch(keys[:4])
    other.close()
    bench = opener(capacity=8 * ROW_BYTES, recency_interval_s=0.1)
    index = bench.tier._index  # type: ignore[attr-defined]
    bench.until(
        lambda: {found.key for found in index.least_recent(0, 4)} == set(keys[4:]),
        "recency is never taken in",
    )
    assert opener.seen["fetch"] > 0
    new = make_keys("newer", 4)
    bench.until(lambda: bench.store(new) == [DONE] * 4, "there never is room")
    there = [(opener.root / path_of(FINGERPRINT, key)).exists() for key in keys]
    assert there == [True] * 4 + [False] * 4


# Capacity.


def make_ledger(tmp_path: Path) -> Ledger:
    settings = make_settings(f"file://{tmp_path}/ledger")
    counters = Counters((*COUNTS, "ledger_conflicts"))
    client, requests = ObjectClient(settings), Requests(settings, counters)
    return Ledger(client, requests, Breaker(1.0, 1.0, 100), counters)


def _more(account: Account) -> Account:
    return msgspec.structs.replace(account, granted=account.granted + 1)


def test_no_change_of_the_ledger_is_lost(tmp_path: Path) -> None:
    ledgers = [make_ledger(tmp_path) for _ in range(4)]

    def work(ledger: Ledger) -> None:
        for _ in range(25):
            ledger.update(_more)

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make_ledger(tmp_path).read().granted == 100
    assert len(list((tmp_path / "ledger" / "ledger").iterdir())) <= 40


def test_a_process_that_slept_through_generations_changes_nothing_by_mistake(
    tmp_path: Path,
) -> None:
    sleeper, others = make_ledger(tmp_path), make_ledger(tmp_path)
    sleeper.update(_more)
    for _ in range(100):
        others.update(_more)
    # It still believes in generation 1, and number 2 is long gone: it can be created again.
    assert not (tmp_path / "ledger" / names.generation_path(2)).exists()
    sleeper.update(_more)
    assert make_ledger(tmp_path).read().granted == 102
    assert not (tmp_path / "ledger" / names.generation_path(2)).exists()


@pytest.mark.parametrize(
    "found",
    [
        b"",
        b"{",
        b'{"used": -1}',
        b'{"writers": {"a": 1}}',
        b'{"used": 99999999999999999999}',
        b"[]",
    ],
)
def test_a_ledger_that_is_none_is_counted_anew(found: bytes, opener: Opener) -> None:
    keys = opener.put("counted", 3)
    path = opener.root / names.generation_path(7)
    path.parent.mkdir(parents=True)
    path.write_bytes(found)
    bench = opener(capacity=8 * ROW_BYTES)
    bench.until(lambda: bench.store(make_keys("more", 2)) == [DONE] * 2, "it is never counted")
    assert bench.load(keys) == [DONE] * 3
    bench.until(lambda: bench.tier.usage().bytes == 5 * ROW_BYTES, "the count is wrong")


def test_what_a_dead_writer_was_granted_is_given_back_by_a_count(opener: Opener) -> None:
    capacity_bytes = 8 * ROW_BYTES
    opener.root.mkdir()
    held = {"dead": Holding(8 * ROW_BYTES, time.time() - 3600)}
    account = Account(used=capacity_bytes, granted=capacity_bytes, writers=held)
    path = opener.root / names.generation_path(3)
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(account))
    bench = opener(capacity=capacity_bytes)
    keys = make_keys("room again", 8)
    bench.until(lambda: bench.store(keys) == [DONE] * 8, "the grant is never given back")


def test_a_living_writers_grant_is_left_to_it(opener: Opener) -> None:
    capacity_bytes = 8 * ROW_BYTES
    held = {"alive": Holding(6 * ROW_BYTES, time.time())}
    account = Account(used=6 * ROW_BYTES, granted=6 * ROW_BYTES, writers=held)
    path = opener.root / names.generation_path(3)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(account))
    bench = opener(capacity=capacity_bytes)
    bench.until(lambda: bench.store(make_keys("own", 2)) == [DONE] * 2, "there never is room")
    assert set(bench.store(make_keys("beyond", 6))) <= {DONE, SHED}
    assert opener.blocks() <= 2


def test_what_nobody_can_evict_takes_room_all_the_same(opener: Opener) -> None:
    """Objects in a place that no key leads to: a deletion by their key would miss them."""
    bench = opener(capacity=8 * ROW_BYTES)
    bench.until(lambda: bench.store(make_keys("moved", 6)) == [DONE] * 6, "there never is room")
    bench.close()
    shutil.move(opener.root / FINGERPRINT.hex(), opener.root / ("ab" * 32))
    again = opener(capacity=8 * ROW_BYTES)
    new = make_keys("beside", 6)
    again.until(lambda: again.store(new).count(DONE) >= 2, "there never is room")
    assert opener.blocks() <= 8


def test_one_capacity_holds_for_all_namespaces(opener: Opener) -> None:
    capacity_bytes = 8 * ROW_BYTES
    first = opener(capacity=capacity_bytes, fingerprint=b"old model".ljust(32))
    old = make_keys("old model", 6)
    first.until(lambda: first.store(old) == [DONE] * 6, "there never is room")
    first.close()
    bench = opener(capacity=capacity_bytes)
    new = make_keys("new model", 6)
    bench.until(lambda: bench.store(new) == [DONE] * 6, "the old model's blocks never go")
    assert opener.blocks() <= 8
    assert bench.load(new) == [DONE] * 6


def test_above_the_high_watermark_it_is_evicted_to_the_low_one(opener: Opener) -> None:
    bench = opener(capacity=20 * ROW_BYTES, high_watermark=0.8, low_watermark=0.5)
    keys = make_keys("watermarks", 18)
    bench.until(lambda: bench.store(keys) == [DONE] * 18, "there never is room")
    bench.until(lambda: bench.tier.counters()["evicted"] >= 8, "nothing is evicted ahead")
    assert 8 <= opener.blocks() <= 10


def test_tiers_that_fill_one_capacity_together_never_exceed_it(opener: Opener) -> None:
    capacity_bytes = 12 * ROW_BYTES
    benches = [opener(capacity=capacity_bytes) for _ in range(3)]
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], opener.blocks())

    watcher = threading.Thread(target=watch)
    watcher.start()
    chance, outcomes = random.Random(5), Counter[Outcome]()
    for number in range(12):
        jobs = [
            bench.submit_store(make_keys(f"{i} {number}", chance.randrange(1, 5)))
            for i, bench in enumerate(benches)
        ]
        for bench, job in zip(benches, jobs, strict=True):
            outcomes.update(bench.outcomes(job))
    ended.set()
    watcher.join()
    assert most[0] <= 12
    assert set(outcomes) <= {DONE, SHED}
    assert outcomes[DONE] >= 12


def test_a_grant_nobody_heard_of_for_long_is_not_spent(opener: Opener) -> None:
    """A process that was stopped finds that others may have given its room away."""
    bench = opener(capacity=8 * ROW_BYTES)
    bench.until(lambda: bench.store(make_keys("first", 1)) == [DONE], "there never is room")
    bank = bench.tier._bank  # type: ignore[attr-defined]
    bank._free_bytes = ROW_BYTES
    bank._heard_s -= 100.0
    updates = opener.seen["create"]
    assert bench.store(make_keys("second", 1)) == [DONE]
    # Room was asked for anew: one create for the ledger besides the block's own.
    assert opener.seen["create"] - updates >= 2
