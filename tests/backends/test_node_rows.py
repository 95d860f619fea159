"""Replicas of one node read each other's rows: a block is kept once, and nothing wrong is read."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.block import BlockKey
from backends.copy import GroupCopier
from backends.errors import ConfigError, CopyError, RegionError, TierError
from backends.policy.registry import PolicyRegistry
from backends.region.node import reader as reader_module
from backends.region.node.neighbours import LOOK_S
from backends.region.node.reader import Lease, shared_row
from backends.region.region import Region
from backends.stack import node as node_module
from backends.stack.observer import NODE
from backends.stack.stack import TierStack
from tests.backends.node_kit import (
    FINGERPRINT,
    ROWS,
    SHM,
    Replica,
    keys_of,
    maps,
    new_run_id,
    replicas,
)
from tests.backends.region_kit import Kept, child


@pytest.fixture
def pair() -> Iterator[list[Replica]]:
    with replicas() as made:
        yield made


def see_each_other(made: list[Replica]) -> None:
    """Wait until every leader has looked who lives."""
    time.sleep(2 * LOOK_S)
    for replica in made:
        replica.hits(keys_of("nothing", 1))


class TestKeptOnce:
    def test_a_block_of_a_neighbour_is_loaded_and_takes_no_row(self, pair: list[Replica]) -> None:
        a, b = pair
        keys = keys_of("p", 4)
        a.store(keys)
        see_each_other(pair)
        assert b.hits(keys) == 4
        assert b.stack.prepare_load(keys).sources == dict.fromkeys(keys, NODE)
        b.stack.complete_load(keys)
        assert b.load(keys) == 4
        assert b.store(keys) == []
        assert (a.stack.index.rows_used, b.stack.index.rows_used) == (4, 0)
        counts = b.node.report()
        assert (counts["node_hits"], counts["node_held"], counts["node_lost"]) == (8, 4, 0)
        assert a.node.report()["rows_shared"] == 4

    def test_a_prefix_may_be_there_and_its_extension_here(self, pair: list[Replica]) -> None:
        a, b = pair
        keys = keys_of("p", 6)
        a.store(keys[:4])
        see_each_other(pair)
        assert b.store(keys) == keys[4:]
        assert b.load(keys) == 6
        assert a.hits(keys) == 4 + 2
        assert a.load(keys) == 6
        assert a.stack.index.rows_used + b.stack.index.rows_used == 6

    def test_what_a_neighbour_is_about_to_store_is_left_to_it(self, pair: list[Replica]) -> None:
        a, b = pair
        keys = keys_of("p", 3)
        see_each_other(pair)
        storing = a.stack.prepare_store(keys)
        assert b.hits(keys) == 0
        assert b.store(keys) == []
        a.fill(keys, storing.rows[0])
        a.stack.complete_store(keys)
        assert b.load(keys) == 3

    def test_a_store_that_failed_keeps_nobody_from_storing(self, pair: list[Replica]) -> None:
        a, b = pair
        keys = keys_of("p", 3)
        see_each_other(pair)
        a.stack.prepare_store(keys)
        a.stack.complete_store(keys, failed=keys)
        assert b.store(keys) == keys

    def test_what_found_no_room_is_not_claimed(self, pair: list[Replica]) -> None:
        a, b = pair
        see_each_other(pair)
        keys = keys_of("p", ROWS + 2)
        assert a.store(keys) == keys[:ROWS]
        assert b.store(keys) == keys[ROWS:]

    def test_what_the_owner_evicts_is_stored_by_whoever_needs_it(self, pair: list[Replica]) -> None:
        a, b = pair
        keys = keys_of("p", 4)
        a.store(keys)
        a.store(keys_of("q", ROWS))
        see_each_other(pair)
        assert b.hits(keys) == 0
        assert b.store(keys) == keys
        assert a.load(keys) == 4

    def test_what_is_being_read_is_not_stored_meanwhile(self, pair: list[Replica]) -> None:
        """A request that loads a block must not be given an unwritten row for that very block."""
        a, b = pair
        keys = keys_of("p", 4)
        a.store(keys)
        see_each_other(pair)
        assert b.hits(keys) == 4
        b.stack.prepare_load(keys[:3])
        a.store(keys_of("q", ROWS))
        see_each_other(pair)
        assert b.stack.prepare_store(keys).keys == keys[3:]
        b.stack.complete_store(keys[3:])
        b.stack.complete_load(keys[:3], failed=keys[:1])
        assert b.store(keys) == keys[:3]

    def test_what_neighbours_use_stays(self, pair: list[Replica]) -> None:
        a, b = pair
        hot, cold = keys_of("h", 3), keys_of("c", 5)
        a.store(hot)
        a.store(cold)
        see_each_other(pair)
        assert b.load(hot) == 3
        a.stack.step()
        assert a.node.report()["node_uses"] == 3
        a.store(keys_of("n", 5))
        assert a.hits(hot) == 3
        assert a.stack.index.unread.count == 10  # all but those that b read

    def test_three_replicas_find_each_others(self) -> None:
        with replicas(3) as made:
            names = [keys_of(name, 2) for name in "abc"]
            for replica, keys in zip(made, names, strict=True):
                replica.store(keys)
            see_each_other(made)
            for replica in made:
                assert [replica.load(keys) for keys in names] == [2, 2, 2]
                assert replica.stack.index.rows_used == 2

    def test_an_entry_with_rows_in_two_groups_is_had_as_a_whole(self) -> None:
        with replicas(groups=2) as made:
            a, b = made
            keys = keys_of("p", 3)
            a.store(keys)
            see_each_other(made)
            assert b.load(keys) == 3
            assert b.store(keys) == []
            half = keys_of("h", 2)
            storing = a.stack.prepare_store(half, groups=(0,))
            a.fill(half, storing.rows[0])
            a.stack.complete_store(half, groups=(0,))
            assert b.hits(half) == 0
            assert b.stack.lookup(half, groups=(0,)).hits == 2
            assert b.store(half) == half

    @pytest.mark.parametrize("backing", ["memfd", "shm"])
    def test_regions_of_both_backings_can_be_read(self, backing: str) -> None:
        with replicas(backing=backing) as made:
            a, b = made
            a.store(keys_of("p", 2))
            see_each_other(made)
            assert not (SHM / a.region.spec.name).exists()
            assert b.load(keys_of("p", 2)) == 2

    def test_windows_are_refused(self, pair: list[Replica]) -> None:
        policy = PolicyRegistry().open("lru", ROWS)
        with pytest.raises(ConfigError, match="window"):
            TierStack(ROWS, policy, groups=2, reach=[None, 2], node=pair[0].node)

    def test_a_key_that_nobody_has_cannot_be_loaded(self, pair: list[Replica]) -> None:
        with pytest.raises(TierError, match="look it up"):
            pair[0].stack.prepare_load(keys_of("p", 1))


class TestReading:
    def read(self, pair: list[Replica], row: int, key: bytes) -> Lease | None:
        return pair[1].reader.lease(shared_row(0, row, ROWS), BlockKey(key, 0))

    def row(self, a: Replica, key: bytes) -> int:
        return a.stack.index.rows_of([key], 0)[0]

    def test_a_row_that_is_given_away_during_the_copy_is_found_out(
        self, pair: list[Replica]
    ) -> None:
        a, b = pair
        [key] = a.store(keys_of("p", 1))
        lease = self.read(pair, self.row(a, key), key)
        assert lease is not None
        assert b.reader.kept([lease]) == 1
        a.stack.reset()
        assert b.reader.kept([lease]) == 0

    @pytest.mark.parametrize("how", ["evicted", "failed", "reset"])
    def test_it_is_found_out_before_the_row_is_anybody_elses(
        self, how: str, pair: list[Replica]
    ) -> None:
        a, b = pair
        keys = a.store(keys_of("p", ROWS))
        leases = [self.read(pair, self.row(a, key), key) for key in keys]
        assert all(leases)
        if how == "evicted":
            gone = a.stack.prepare_store(keys_of("q", 2)).evicted
        elif how == "failed":
            a.stack.prepare_load(keys)
            a.stack.complete_load(keys, failed=keys[-1:])
            gone = keys[-1:]
        else:
            a.stack.reset()
            gone = keys
        for key, lease in zip(keys, leases, strict=True):
            assert lease is not None
            assert b.reader.kept([lease]) == (key not in gone)

    def test_an_entry_that_points_to_another_block_is_a_miss(self, pair: list[Replica]) -> None:
        a, b = pair
        [key, other] = a.store(keys_of("p", 2))
        assert self.read(pair, self.row(a, other), key) is None
        assert self.read(pair, 5, key) is None  # never written
        assert b.reader.lease(shared_row(1, 0, ROWS), BlockKey(key, 0)) is None  # its own
        assert b.reader.lease(shared_row(7, 0, ROWS), BlockKey(key, 0)) is None  # nobody's
        group = BlockKey(key, 1)
        assert b.reader.lease(shared_row(0, self.row(a, key), ROWS), group) is None

    def test_blocks_of_another_layout_are_not_read(self, pair: list[Replica]) -> None:
        a, b = pair
        [key] = a.store(keys_of("p", 1))
        b.reader._fingerprint = bytes(32)
        assert self.read(pair, self.row(a, key), key) is None
        b.reader._fingerprint = FINGERPRINT
        assert self.read(pair, self.row(a, key), key) is not None

    def test_a_failed_read_is_a_miss_and_not_offered_again_at_once(
        self, pair: list[Replica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = pair
        keys = a.store(keys_of("p", 3))
        see_each_other(pair)
        a.region.row_headers()[self.row(a, keys[1])] = 0
        assert b.load(keys) == 1
        assert b.node.report()["node_lost"] == 1
        assert b.hits(keys) == 1
        monkeypatch.setattr(node_module, "_REFUSE_S", 0.0)
        b.node._refused.clear()
        assert b.hits(keys) == 3

    def test_a_neighbour_that_fails_again_and_again_is_left_alone(
        self, pair: list[Replica]
    ) -> None:
        a, b = pair
        keys = a.store(keys_of("p", node_module._FAILURES_MOST + 1))
        see_each_other(pair)
        a.region.row_headers()[:] = 0
        for key in keys[:-1]:
            assert b.hits([key]) == 1
            assert b.load([key]) == 0
        assert b.hits(keys[-1:]) == 0
        assert b.store(keys) == keys

    def test_a_neighbours_rows_cannot_be_written(self, pair: list[Replica]) -> None:
        a, b = pair
        [key] = a.store(keys_of("p", 1))
        lease = self.read(pair, self.row(a, key), key)
        assert lease is not None
        slots = b.reader.slots(lease)
        with pytest.raises(ValueError, match="read-only"):
            slots[0] = 1
        blocks = [torch.zeros(4, slots.shape[1], dtype=torch.uint8)]
        with pytest.raises(CopyError, match="read-only"):
            GroupCopier(blocks, block_dim=0, slot=slots, blocks_per_chunk=1)
        ids, rows = np.array([[2]]), np.array([lease.row])
        with GroupCopier(
            blocks, block_dim=0, slot=slots, blocks_per_chunk=1, loads_only=True
        ) as copier:
            copier.load(ids, rows)
            with pytest.raises(CopyError, match="loads only"):
                copier.store(ids, rows)
        assert bytes(blocks[0][2].numpy()) == bytes(slots[lease.row])

    def test_another_region_than_the_plans_is_not_mapped(self, pair: list[Replica]) -> None:
        a, b = pair
        with pytest.raises(RegionError, match="expects"):
            Region.attach_read_only(a.region.handle(), b.region.spec)


class TestEnds:
    def test_one_that_closes_is_let_go_of(
        self, pair: list[Replica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "LOOK_S", 0.0)
        a, b = pair
        keys = a.store(keys_of("p", 2))
        see_each_other(pair)
        assert b.load(keys) == 2
        a.close()
        assert maps(a.region)
        time.sleep(2 * LOOK_S)
        assert b.hits(keys) == 0
        assert b.reader.sweep() == [0]
        assert not maps(a.region)
        assert b.store(keys) == keys
        assert b.node.report()["neighbours_lost"] == 0

    def test_a_killed_one_is_noticed_unmapped_and_its_blocks_are_stored_anew(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "LOOK_S", 0.0)
        run_id = new_run_id()
        keys = keys_of("p", 3)

        def serve() -> Kept:
            replica = Replica(run_id, 0)
            replica.store(keys)
            return Kept((replica.region.spec, replica))

        with child(serve) as owner, contextlib.closing(Replica(run_id, 1)) as b:
            assert b.load(keys) == 3
            assert b.store(keys) == []
            [lease] = [b.reader.lease(shared_row(0, 0, ROWS), BlockKey(k, 0)) for k in keys[:1]]
            assert lease is not None
            owner.kill()
            # It died between lease and copy: what is there is whole, and nobody writes to it.
            assert b.reader.slots(lease)[lease.row].any()
            assert b.reader.kept([lease]) == 1
            assert maps(owner.result)
            time.sleep(2 * LOOK_S)
            assert b.hits(keys) == 0
            assert b.reader.sweep() == [0]
            assert not maps(owner.result)
            assert b.store(keys) == keys
            assert b.load(keys) == 3
            assert b.node.report()["neighbours_lost"] == 1
            # It comes back under the same number, and is read again.
            b.stack.reset()
            with child(serve) as again:
                time.sleep(2 * LOOK_S)
                assert b.load(keys) == 3
                assert maps(again.result)
        assert not list(SHM.glob(f"kvquay_{run_id}*"))

    def test_a_worker_that_cannot_map_a_region_reads_nothing_and_goes_on(
        self, pair: list[Replica]
    ) -> None:
        a, b = pair
        keys = a.store(keys_of("p", 2))
        see_each_other(pair)
        handle = b.reader._sections.handle[0]
        told = bytes(handle)
        a.node._section._handle[:16] = 0
        assert b.hits(keys) == 2
        assert b.load(keys) == 0
        assert 0 in b.reader.problems
        a.node._section._handle[:] = np.frombuffer(told, np.uint8)
        b.reader._retry_at_s.clear()
        b.node._refused.clear()
        assert b.load(keys) == 2
        assert not b.reader.problems


_COPY_S = 0.002


def overwrite_for_ever(run_id: str, names: list[list[bytes]], seed: int) -> None:
    replica, order = Replica(run_id, 0, rows=4), np.random.default_rng(seed)
    while True:
        replica.store(names[order.integers(len(names))])
        # About as long as a reader takes for a copy, on any machine: some are overtaken, not all.
        time.sleep(order.random() * 2 * _COPY_S)


@pytest.mark.multiproc
def test_an_owner_that_overwrites_its_rows_all_the_time_and_is_killed_makes_no_wrong_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every byte of every copy that counts is compared, see `Replica.load`."""
    monkeypatch.setattr(node_module, "_REFUSE_S", 0.0)
    monkeypatch.setattr(node_module, "_FAILURES_MOST", 1 << 30)
    run_id = new_run_id()
    names = [keys_of(name, 3) for name in "abcdef"]
    with contextlib.closing(Replica(run_id, 1, rows=4)) as b:
        b.pause_s = _COPY_S  # in the middle of a copy, so that it is often overtaken
        for seed in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    overwrite_for_ever(run_id, names, seed)
                finally:
                    os._exit(1)
            whole, until_s = 0, time.monotonic() + 60.0
            try:
                while whole < 200 and time.monotonic() < until_s:
                    whole += sum(b.load(keys) for keys in names)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            assert whole, "nothing was ever read"
            assert b.node.report()["node_lost"], "nothing was ever overtaken"
            # What is left of the dead is read as it was, until that is noticed.
            for keys in names:
                b.load(keys)
            time.sleep(2 * LOOK_S)
            assert all(b.hits(keys) == 0 for keys in names)
            assert b.node.report()["neighbours_lost"] == seed + 1
    assert not list(SHM.glob(f"kvquay_{run_id}*"))


@settings(max_examples=15)
@given(st.data())
def test_a_row_may_be_read_exactly_while_it_holds_a_block(data: st.DataObject) -> None:
    """Whatever is done to a stack: free rows and those on their way have even versions."""
    with replicas(groups=data.draw(st.integers(1, 2))) as made:
        a, b = made
        stack, index = a.stack, a.stack.index
        names = [keys_of(name, 4) for name in "abc"]
        loading: list[list[bytes]] = []
        storing: list[list[bytes]] = []

        def begin_load(keys: list[bytes]) -> None:
            found = keys[: stack.lookup(keys).hits]
            stack.prepare_load(found)
            loading.append(found)

        def end_load(fails: bool) -> None:
            keys = loading.pop(0)
            stack.complete_load(keys, keys[:1] if fails else ())

        def begin_store(keys: list[bytes]) -> None:
            storing.append(list(stack.prepare_store(keys).keys))

        def end_store(fails: bool) -> None:
            keys = storing.pop(0)
            stack.complete_store(keys, keys[:1] if fails else ())

        for _ in range(data.draw(st.integers(1, 20))):
            acts: dict[str, Any] = {
                "load": lambda: begin_load(data.draw(st.sampled_from(names))),
                "store": lambda: begin_store(data.draw(st.sampled_from(names))),
                "reset": stack.reset,
                "other": lambda: b.store(data.draw(st.sampled_from(names))),
            }
            if loading:
                acts["loaded"] = lambda: end_load(data.draw(st.booleans()))
            if storing:
                acts["stored"] = lambda: end_store(data.draw(st.booleans()))
            acts[data.draw(st.sampled_from(sorted(acts)))]()
            held = {row for rows in index._ready for row in rows.values()}
            section = a.node._section
            assert {row for row in range(ROWS) if section.version(row) % 2} == held
            blocks = {(key, g): r for g, rows in enumerate(index._ready) for key, r in rows.items()}
            assert {block: section._row[block] for block in section._row} == blocks
