"""KV events: the bytes on the wire, what a stack says, and a stream under load and loss."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from backends.block import BlockKey
from backends.config import KvGroup
from backends.events.publisher import END, EventsError, Publisher, PublisherSettings
from backends.events.source import KvEvents, Place
from backends.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    lowest_64_bits,
)
from backends.policy.lru import Lru
from backends.stack.observer import PRIMARY
from backends.stack.stack import TierStack
from backends.testing import MemorySettings, MemoryTier, RowBuffer, make_context
from backends.tier.base import Lookup
from backends.tier.filesystem import FilesystemSettings
from backends.tier.filesystem.tier import FilesystemTier
from backends.tier.gone import Gone

TIMEOUT_MS = 20_000
FULL = KvGroup("full", "full", (0, 1), kv_heads=2, head_size=16, planes=2)
WINDOW = KvGroup("window", "sliding_window", (2,), 2, 16, 2, sliding_window=128)

# One batch, byte by byte: what vLLM 0.32 encodes for the same values.
GOLDEN = bytes.fromhex(
    "93"  # array of 3
    "cb3ff8000000000000"  # ts 1.5
    "92"  # two events
    "8c"  # map of 12
    "a474797065" "ab426c6f636b53746f726564"  # type: BlockStored
    "ac626c6f636b5f686173686573" "92" "01" "c4026162"  # block_hashes: [1, b"ab"]
    "b1706172656e745f626c6f636b5f68617368" "c0"  # parent_block_hash: nil
    "a9746f6b656e5f696473" "920708"  # token_ids: [7, 8]
    "aa626c6f636b5f73697a65" "10"  # block_size: 16
    "a76c6f72615f6964" "c0"  # lora_id: nil
    "a66d656469756d" "a753544f52414745"  # medium: STORAGE
    "a96c6f72615f6e616d65" "c0"  # lora_name: nil
    "a967726f75705f696478" "01"  # group_idx: 1
    "b26b765f63616368655f737065635f6b696e64" "ae736c6964696e675f77696e646f77"  # sliding_window
    "bc6b765f63616368655f737065635f736c6964696e675f77696e646f77" "cc80"  # 128
    "a96f776e657273686970" "a26673"  # ownership: fs
    "85"  # map of 5
    "a474797065" "ac426c6f636b52656d6f766564"  # type: BlockRemoved
    "ac626c6f636b5f686173686573" "91" "02"  # block_hashes: [2]
    "a66d656469756d" "a3435055"  # medium: CPU
    "a967726f75705f696478" "00"  # group_idx: 0
    "a86c6f63616c697479" "a54c4f43414c"  # locality: LOCAL
    "03"  # data_parallel_rank
)  # fmt: skip


def golden_batch() -> EventBatch:
    stored = BlockStored(
        block_hashes=[1, b"ab"],
        parent_block_hash=None,
        token_ids=[7, 8],
        block_size=16,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        ownership="fs",
    )
    removed = BlockRemoved(block_hashes=[2], medium="CPU", group_idx=0, locality="LOCAL")
    return EventBatch(1.5, [stored, removed], 3)


def test_a_batch_has_the_bytes_of_the_format() -> None:
    assert msgspec.msgpack.encode(golden_batch()) == GOLDEN
    assert msgspec.msgpack.decode(GOLDEN, type=EventBatch) == golden_batch()


def test_fields_of_an_event_that_have_their_default_are_left_out() -> None:
    removed = BlockRemoved(block_hashes=[], medium=None)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(0.0, [removed])))
    assert plain == [0.0, [{"type": "BlockRemoved", "block_hashes": [], "medium": None}], None]


def test_a_number_is_the_last_eight_bytes_of_a_hash() -> None:
    assert lowest_64_bits(bytes(24) + b"\xff" + bytes(6) + b"\x02") == (255 << 56) + 2


# What a stack says.


class Sent:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def publish(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))

    @property
    def events(self) -> list[Any]:
        return [event for batch in self.batches for event in batch]


def keys(sequence: str, start: int, end: int) -> list[bytes]:
    return [f"{sequence}{n:06}".encode().rjust(32, b"\0") for n in range(start, end)]


def stack_of(rows: int, **options: Any) -> tuple[TierStack, Sent]:
    sent = Sent()
    groups = options.pop("groups", (FULL,))
    events = KvEvents(sent, groups, 64, rows=rows, int_hashes=False, **options)
    stack = TierStack(rows, Lru(rows // len(groups)), groups=len(groups), observers=(events,))
    return stack, sent


def store(stack: TierStack, run: list[bytes], **where: Any) -> None:
    storing = stack.prepare_store(run, **where)
    assert list(storing.keys) == run
    stack.complete_store(run)
    stack.step()


def test_a_stored_run_is_one_event_with_its_parent() -> None:
    stack, sent = stack_of(8)
    run = keys("a", 0, 5)
    store(stack, run[:2])
    store(stack, run[2:], first=2, parent=run[1])
    first, second = sent.events
    assert first.block_hashes == run[:2]
    assert first.parent_block_hash is None
    assert second.block_hashes == run[2:]
    assert second.parent_block_hash == run[1]
    assert (second.medium, second.locality, second.ownership) == ("CPU", "LOCAL", None)
    assert (second.block_size, second.token_ids, second.group_idx) == (64, [], 0)
    assert second.kv_cache_spec_kind == "full_attention"
    assert len(sent.batches) == 2


def test_nothing_is_said_before_all_ranks_have_written() -> None:
    stack, sent = stack_of(8)
    run = keys("a", 0, 2)
    stack.prepare_store(run)
    stack.step()
    assert sent.events == []
    stack.complete_store(run, failed=run[1:])
    stack.step()
    [event] = sent.events
    assert event.block_hashes == run[:1]


def test_runs_that_do_not_follow_each_other_are_events_of_their_own() -> None:
    stack, sent = stack_of(8)
    one, other = keys("a", 0, 2), keys("b", 0, 2)
    stack.prepare_store(one)
    stack.prepare_store(other)
    stack.complete_store(one + other)
    stack.step()
    assert [event.block_hashes for event in sent.events] == [one, other]
    assert [event.parent_block_hash for event in sent.events] == [None, None]


def test_what_is_evicted_forgotten_or_reset_is_removed() -> None:
    stack, sent = stack_of(4)
    old, new = keys("a", 0, 4), keys("b", 0, 2)
    store(stack, old)
    store(stack, new)
    removed, stored = sent.events[1:]
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == set(old[2:])
    assert (removed.medium, removed.group_idx) == ("CPU", 0)
    assert stored.block_hashes == new

    stack.prepare_load(new)
    stack.complete_load(new, failed=new[1:])
    stack.step()
    assert sent.events[-1].block_hashes == new[1:]

    stack.reset()
    stack.step()
    assert set(sent.events[-1].block_hashes) == {*old[:2], new[0]}


def test_each_group_has_events_of_its_own_and_says_what_it_keeps() -> None:
    stack, sent = stack_of(8, groups=(FULL, WINDOW))
    run = keys("a", 0, 2)
    store(stack, run)
    full, window = sent.events
    assert (full.group_idx, window.group_idx) == (0, 1)
    assert window.kv_cache_spec_kind == "sliding_window"
    assert window.kv_cache_spec_sliding_window == 128
    stack.reset()
    stack.step()
    assert [event.group_idx for event in sent.events[2:]] == [0, 1]


def test_an_engine_that_knows_its_tokens_says_them() -> None:
    tokens = {key: [n, n + 1] for n, key in enumerate(keys("a", 0, 2))}
    stack, sent = stack_of(8, token_ids=tokens.__getitem__)
    store(stack, list(tokens))
    assert sent.events[0].token_ids == [0, 1, 1, 2]


def test_tiers_are_named_as_the_caller_says() -> None:
    sent = Sent()
    places = {"object": Place(locality="REMOTE", ownership="bucket")}
    events = KvEvents(sent, (FULL,), 64, rows=8, places=places)
    events.stored("object", 0, keys("a", 0, 1))
    events.stored("fs", 0, keys("a", 0, 1))
    events.removed(PRIMARY, 0, keys("a", 0, 1))
    events.stepped()
    assert [(e.medium, e.locality, e.ownership) for e in sent.events] == [
        ("STORAGE", "REMOTE", "bucket"),
        ("STORAGE", None, "fs"),
        ("CPU", "LOCAL", None),
    ]
    assert sent.events[0].block_hashes == [lowest_64_bits(keys("a", 0, 1)[0])]


def test_removals_one_after_the_other_are_one_event_and_large_batches_are_cut() -> None:
    sent = Sent()
    events = KvEvents(sent, (FULL,), 64, rows=8)
    for key in keys("a", 0, 10_000):
        events.removed(PRIMARY, 0, (key,))
    events.stepped()
    assert [len(event.block_hashes) for event in sent.events] == [4096, 4096, 1808]


def test_a_parent_that_was_forgotten_is_left_out() -> None:
    stack, sent = stack_of(4)
    run = keys("a", 0, 2)
    stack.prepare_store(run)
    for n in range(20):
        stack.index.observers[0].admitted(keys(f"x{n}-", 0, 1), None)
    stack.complete_store(run)
    stack.step()
    assert [(e.block_hashes, e.parent_block_hash) for e in sent.events] == [
        ([run[0]], None),
        ([run[1]], None),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_lower_tier_is_said_to_have_is_what_it_has(tmp_path: Path, rank: int) -> None:
    """Whatever it evicted for its capacity meanwhile, this replica's blocks or another's (`rank` 1:
    there is one that has filled it before)."""
    rows = RowBuffer(16, 2 * 4096)
    settings = FilesystemSettings(
        paths=(str(tmp_path),),
        capacity=12 * rows.row_bytes,
        probe_interval_s=0.01,
        high_watermark=1.0,
        low_watermark=1.0,
    )
    held: dict[Any, set[bytes]] = defaultdict(set)
    every: list[bytes] = []
    for replica in range(rank + 1):
        sent = Sent()
        tier = FilesystemTier(make_context(rows), settings)
        stack = TierStack(
            16,
            Lru(16),
            [tier],
            observers=(KvEvents(sent, (FULL,), 64, rows=16, int_hashes=False),),
        )
        with closing(stack):
            assert stack.settle(TIMEOUT_MS / 1000)
            for n in range(8):
                run = keys(f"r{replica}s{n}-", 0, 5)
                every += run
                storing = stack.prepare_store(run)
                for key, row in zip(storing.keys, storing.rows[0], strict=True):
                    rows.fill(row, BlockKey(key, 0))
                stack.complete_store(storing.keys)
                assert stack.drain(TIMEOUT_MS / 1000)
            until_s = time.monotonic() + TIMEOUT_MS / 1000
            while True:  # the tier's own thread may be about to tell of what it has just done
                stack.step()
                for event in sent.events:
                    where = held[event.medium, event.ownership]
                    if isinstance(event, BlockStored):
                        where.update(event.block_hashes)
                    else:
                        where.difference_update(event.block_hashes)
                sent.batches.clear()
                answers = tier.lookup([BlockKey(key, 0) for key in every])
                there = {k for k, a in zip(every, answers, strict=True) if a is Lookup.HIT}
                if held["STORAGE", "fs"] == there and Lookup.PENDING not in answers:
                    break
                assert time.monotonic() < until_s, (held["STORAGE", "fs"] - there, there)
                time.sleep(0.01)
            assert 0 < len(there) <= 12
            assert stack.report()["fs"]["evictions"] > 0


def test_a_tier_that_has_forgotten_what_it_let_go_clears_all_that_was_said_of_it() -> None:
    gone = Gone(most=3)
    tier = MemoryTier(make_context(RowBuffer(4, 2 * 4096)), MemorySettings())
    tier.evicted = gone.take  # type: ignore[method-assign]
    sent = Sent()
    stack = TierStack(
        4, Lru(4), [tier], observers=(KvEvents(sent, (FULL,), 64, rows=4, int_hashes=False),)
    )
    with closing(stack):
        blocks = [BlockKey(key, 0) for key in keys("a", 0, 5)]
        gone.add(blocks[:3])
        stack.step()
        gone.add(blocks)
        gone.add(blocks[:1])
        stack.step()
        stack.step()
        stack.step()
    removed, cleared = sent.events
    assert removed.block_hashes == [block.hash for block in blocks[:3]]
    assert cleared == AllBlocksCleared(medium="STORAGE", ownership="memory")


# The stream.


@contextmanager
def publishing(rank: int | None = 1, **settings: Any) -> Iterator[Publisher]:
    publisher = Publisher(PublisherSettings(port=0, replay_port=0, **settings), rank)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: Publisher, topic: bytes = b"") -> Iterator[Callable[[], list[bytes]]]:
    """A subscriber that has been seen to receive; the function gives the next message."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(f"tcp://127.0.0.1:{publisher.port}")

        def receive() -> list[bytes]:
            assert socket.poll(TIMEOUT_MS), "nothing came"
            return socket.recv_multipart()

        until_s = time.monotonic() + TIMEOUT_MS / 1000
        while not socket.poll(10):
            assert time.monotonic() < until_s, "nothing came"
            publisher.publish([removal(0)])
        yield receive


def removal(number: int, count: int = 1) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number] * count, medium="CPU", group_idx=0)


def ask(publisher: Publisher, first: int) -> list[list[bytes]]:
    """What a client gets that asks for everything from `first` on, without the empty frame."""
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        client.send(first.to_bytes(8, "big"))
        assert client.poll(TIMEOUT_MS), "no answer"
        return [client.recv_multipart()]


def ask_all(publisher: Publisher, request: Sequence[bytes]) -> list[list[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 0)
        client.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        client.send_multipart(request)
        found = []
        while True:
            assert client.poll(TIMEOUT_MS), "no answer"
            empty, *frames = client.recv_multipart()
            assert empty == b""
            found.append(frames)
            if frames[1] == END:
                return found


def numbers(messages: Sequence[Sequence[bytes]]) -> list[int]:
    return [int.from_bytes(frames[1], "big", signed=True) for frames in messages]


def test_a_subscriber_gets_topic_number_and_batch_in_order() -> None:
    with publishing(topic="kv") as publisher, subscribed(publisher, b"kv") as receive:
        topic, seq, payload = receive()
        assert topic == b"kv"
        start = int.from_bytes(seq, "big")
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        assert batch.data_parallel_rank == 1
        assert abs(batch.ts - time.time()) < 60
        for number in range(500):
            publisher.publish([removal(number)])
        got: list[int] = []
        while not got or got[-1] != 499:
            _, seq, payload = receive()
            start += 1
            assert int.from_bytes(seq, "big") == start
            [event] = msgspec.msgpack.decode(payload, type=EventBatch).events
            got += event.block_hashes
        assert got[-500:] == list(range(500))


def test_who_missed_some_gets_them_again() -> None:
    with publishing() as publisher:
        for number in range(50):
            publisher.publish([removal(number)])
        wait(lambda: publisher.counts["event_batches"] == 50)
        found = ask_all(publisher, (b"", (40).to_bytes(8, "big")))
        assert numbers(found) == [*range(40, 50), -1]
        assert found[-1] == [b"", END, b""]
        [event] = msgspec.msgpack.decode(found[0][2], type=EventBatch).events
        assert event.block_hashes == [40]
        assert publisher.counts["event_batches_replayed"] == 10
        # A plain REQ socket gets its first frame, and the publisher goes on.
        assert numbers(ask(publisher, 49)) == [49]
        assert numbers(ask_all(publisher, (b"", (50).to_bytes(8, "big")))) == [-1]


@pytest.mark.parametrize("request_", [(b"", b"short"), (b"",), (b"", b"", b"", b"", bytes(8))])
def test_a_request_that_is_none_is_passed_over(request_: tuple[bytes, ...]) -> None:
    with publishing() as publisher:
        publisher.publish([removal(0)])
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
            client.send_multipart(request_)
            client.send_multipart((b"", bytes(8)))
            assert client.poll(TIMEOUT_MS)
            assert client.recv_multipart()[2] in (bytes(8), END)


def test_what_is_kept_is_bounded_by_count_and_by_bytes() -> None:
    with publishing(replay_batches=20, replay_bytes=1 << 16) as publisher:
        for number in range(100):
            publisher.publish([removal(number)])
        wait(lambda: publisher.counts["event_batches"] == 100)
        assert numbers(ask_all(publisher, (b"", bytes(8)))) == [*range(80, 100), -1]
        for number in range(10):
            publisher.publish([removal(2**40 + number, 3000)])  # 27 kB each
        wait(lambda: publisher.counts["event_batches"] == 110)
        assert numbers(ask_all(publisher, (b"", bytes(8)))) == [108, 109, -1]


def test_a_full_queue_drops_counts_and_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    encode = Publisher._send
    monkeypatch.setattr(
        Publisher, "_send", lambda self, encoder: held.wait() and encode(self, encoder)
    )
    with publishing(queue_batches=10) as publisher:
        for number in range(25):
            publisher.publish([removal(number, 3)])
        assert publisher.counts["event_batches_dropped"] == 15
        assert publisher.counts["event_blocks_dropped"] == 45
        held.set()
        wait(lambda: publisher.counts["event_batches"] == 10)
        publisher.publish([removal(25)])
        wait(lambda: publisher.counts["event_batches"] == 11)
        # The numbers of what was dropped are used up: who listens sees that something is missing.
        assert numbers(ask_all(publisher, (b"", bytes(8)))) == [*range(10), 25, -1]


def test_a_subscriber_that_reads_nothing_costs_nobody_else_anything() -> None:
    with (
        publishing(queue_batches=100_000, replay_bytes=1 << 20) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as lazy,
    ):
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.setsockopt(zmq.SUBSCRIBE, b"")
        lazy.connect(f"tcp://127.0.0.1:{publisher.port}")
        assert lazy.poll(0) == 0
        with subscribed(publisher) as receive:
            for number in range(20_000):
                publisher.publish([removal(number, 100)])
            last = 0
            while last != 19_999:
                [event] = msgspec.msgpack.decode(receive()[2], type=EventBatch).events
                last = event.block_hashes[0]
        assert publisher.counts["event_batches_dropped"] == 0


def test_close_sends_what_waits_and_may_be_called_again() -> None:
    with publishing() as publisher, subscribed(publisher) as receive:
        for number in range(200):
            publisher.publish([removal(number)])
        publisher.publish([removal(12345)])
        publisher.close()
        publisher.close()
        while True:
            [event] = msgspec.msgpack.decode(receive()[2], type=EventBatch).events
            if event.block_hashes == [12345]:
                break
        publisher.publish([removal(0)])
        assert publisher.counts["event_batches_dropped"] == 1


def test_a_port_that_is_taken_is_told_and_nothing_is_left_open() -> None:
    before = threading.active_count()
    with publishing() as publisher:
        for taken in (
            PublisherSettings(port=publisher.port),
            PublisherSettings(port=0, replay_port=publisher.replay_port),
        ):
            with pytest.raises(EventsError, match=r"127\.0\.0\.1:\d+.*choose another port"):
                Publisher(taken, 0)
    assert threading.active_count() == before


def test_it_listens_on_the_loopback_alone() -> None:
    found = defaultdict(set)
    with publishing() as publisher, open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            address, _, port = line.split()[1].partition(":")
            found[int(port, 16)].add(address)
        assert found[publisher.port] == found[publisher.replay_port] == {"0100007F"}


def wait(there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_MS / 1000
    while not there():
        assert time.monotonic() < until_s, "did not come to be"
        time.sleep(0.002)
