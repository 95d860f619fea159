"""Our KV events beside vLLM's own: its decoder reads ours, and on the wire nobody can tell."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

import zmq
from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from backends.events import wire as ours
from backends.events.publisher import END, Publisher, PublisherSettings
from backends.events.source import KvEvents
from backends.policy.lru import Lru
from backends.stack.observer import PRIMARY
from backends.stack.stack import TierStack
from tests.backends.test_events import FULL, GOLDEN, WINDOW, golden_batch, keys

pytestmark = pytest.mark.vllm
TIMEOUT_MS = 20_000


def test_vllm_decodes_the_golden_bytes_and_encodes_the_same() -> None:
    decoded = msgspec.msgpack.decode(GOLDEN, type=theirs.KVEventBatch)
    stored, removed = decoded.events
    assert isinstance(stored, theirs.BlockStored)
    assert isinstance(removed, theirs.BlockRemoved)
    assert msgspec.msgpack.encode(decoded) == GOLDEN == msgspec.msgpack.encode(golden_batch())


def test_every_field_of_ours_is_one_of_theirs_and_what_they_require_is_there() -> None:
    for name in ("BlockStored", "BlockRemoved", "EventBatch"):
        own = [f.encode_name for f in msgspec.structs.fields(getattr(ours, name))]
        known = msgspec.structs.fields(getattr(theirs, name))
        assert [f.encode_name for f in known if f.encode_name in own] == own
        assert {f.encode_name for f in known if f.required} <= set(own)


def test_words_and_hashes_are_theirs() -> None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    assert set(ours.SPEC_KINDS.values()) <= {kind.value for kind in KVCacheSpecKind}
    assert (ours.MEDIUM_CPU, ours.MEDIUM_STORAGE) == (theirs.MEDIUM_CPU, theirs.MEDIUM_STORAGE)
    key = bytes(range(200, 232))
    assert ours.lowest_64_bits(key) == maybe_convert_block_hash(key)


def test_a_subscriber_with_vllm_s_decoder_follows_a_stack() -> None:
    """As vLLM's own subscriber does it: three frames, a number, a typed decoder."""
    publisher = Publisher(PublisherSettings(port=0, replay_port=0, topic="kv"), 2)
    source = KvEvents(publisher, (FULL, WINDOW), 64, rows=8)
    stack = TierStack(8, Lru(4), groups=2, observers=(source,))
    with closing(publisher):
        for sequence in "abc":
            run = keys(sequence, 0, 3)
            stack.prepare_store(run)
            stack.complete_store(run)
            stack.step()
        held: dict[int, set[Any]] = {0: set(), 1: set()}
        for _, seq, payload in replay(publisher.replay_port, 0, expected=3):
            batch = msgspec.msgpack.Decoder(type=theirs.KVEventBatch).decode(payload)
            assert batch.data_parallel_rank == 2
            assert len(seq) == 8
            for event in batch.events:
                assert event.medium == theirs.MEDIUM_CPU
                if isinstance(event, theirs.BlockStored):
                    held[event.group_idx].update(event.block_hashes)
                else:
                    assert isinstance(event, theirs.BlockRemoved)
                    held[event.group_idx].difference_update(event.block_hashes)
        ready = {ours.lowest_64_bits(key) for key in stack.index.ready_keys()}
        assert held == {0: ready, 1: ready}


def test_frames_are_those_of_vllm_s_publisher() -> None:
    """Both publish the same events, and are asked for them again in the same way."""
    batches = [golden_batch() for _ in range(5)]
    with closing(Publisher(PublisherSettings(0, 0, topic="kv"), 3)) as publisher:
        for batch in batches:
            publisher.publish(batch.events)
        mine = list(replay(publisher.replay_port, 2, expected=3))
    port, replay_port = free_port(), free_port()
    # A publisher shifts its ports by its rank; rank 0 leaves them alone.
    vllm = theirs.ZmqEventPublisher(
        0, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", topic="kv"
    )
    try:
        for batch in batches:
            same = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=theirs.KVEventBatch)
            vllm.publish(same)
        yours = list(replay(replay_port, 2, expected=3))
    finally:
        vllm.shutdown()
    assert [frames[:2] for frames in mine] == [frames[:2] for frames in yours]
    for (*_, one), (*_, other) in zip(mine, yours, strict=True):
        decoded = msgspec.msgpack.decode(one, type=theirs.KVEventBatch)
        assert decoded.events == msgspec.msgpack.decode(other, type=theirs.KVEventBatch).events
        # All but the time in front, which is that of the call.
        assert one[10:] == other[10:]


def replay(port: int | None, first: int, expected: int = 0) -> Iterator[list[bytes]]:
    """Topic, number and batch of everything from `first` on; asks again until there is enough."""
    until_s = time.monotonic() + TIMEOUT_MS / 1000
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{port}")
        while True:
            client.send_multipart((b"", first.to_bytes(8, "big")))
            found = []
            while True:
                assert client.poll(TIMEOUT_MS), "no answer"
                _, *frames = client.recv_multipart()
                if frames[1] == END:
                    break
                found.append(frames)
            if found and len(found) >= expected:
                yield from found
                return
            assert time.monotonic() < until_s, "the events did not come"
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_cleared_tier_is_all_blocks_cleared_to_vllm_s_decoder() -> None:
    """Which knows no tiers there: it passes over what says which one it is."""
    cleared = ours.AllBlocksCleared(medium=ours.MEDIUM_STORAGE, ownership="fs")
    packed = msgspec.msgpack.encode(ours.EventBatch(1.5, [cleared], 3))
    decoded = msgspec.msgpack.decode(packed, type=theirs.KVEventBatch)
    assert decoded.events == [theirs.AllBlocksCleared()]


def test_the_region_is_named_as_vllm_names_memory() -> None:
    sent: list[Any] = []

    class Sink:
        def publish(self, events: Any) -> None:
            sent.extend(events)

    source = KvEvents(Sink(), (FULL,), 64, rows=1)
    source.stored(PRIMARY, 0, keys("a", 0, 1))
    source.stepped()
    [event] = msgspec.convert(msgspec.to_builtins(sent), list[theirs.BlockStored])
    assert event.medium == theirs.MEDIUM_CPU
    assert event.locality == "LOCAL"
