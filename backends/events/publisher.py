"""Sends event batches over ZeroMQ, the way that vLLM's engines do, from a thread of its own.

A batch is one PUB message of three frames: topic, sequence number (8 bytes, big endian), batch.
Who missed some asks the replay socket, a ROUTER: an empty frame and the first number that is
wanted. Each batch that is still kept from there on comes back as `empty, topic, number, batch`, and
then `empty, empty, END, empty`.

Everything is bounded and nobody waits for a subscriber: a batch that finds the queue full is
dropped and counted. Its number is used up all the same, so that a subscriber sees the gap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from backends.errors import KvquayError
from backends.events.wire import AllBlocksCleared, Event, EventBatch

END: Final = (-1).to_bytes(8, "big", signed=True)
_WAKE_S: Final = 0.02
_LINGER_MS: Final = 200
_SUBSCRIBER_BATCHES: Final = 10_000  # what one may leave unread before it loses some


class EventsError(KvquayError):
    """The sockets of an event stream cannot be opened."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Where to, and how much is kept.

    `port` and `replay_port` are bound at `host`, an address of this machine; 0 lets the system
    choose. `replay_port` None: no replay. The last `replay_batches` batches, and no more than
    `replay_bytes` of them, are kept for it; `queue_batches` may wait to be sent.
    """

    port: int
    replay_port: int | None = None
    host: str = "127.0.0.1"
    topic: str = ""
    queue_batches: int = 1024
    replay_batches: int = 10_000
    replay_bytes: int = 64 << 20


class Publisher:
    """One replica's event stream. `publish` is called by one thread, and returns at once."""

    def __init__(self, settings: PublisherSettings, data_parallel_rank: int | None) -> None:
        """Binds. Raises EventsError, with the port, where one is taken."""
        self._settings = settings
        self._rank = data_parallel_rank
        self._queue: deque[tuple[int, EventBatch]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._dropped = self._dropped_blocks = self._sent = self._replayed = 0
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, _SUBSCRIBER_BATCHES)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self.port = self._bind(self._pub, settings.port)
            self.replay_port: int | None = None
            if settings.replay_port is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A whole replay fits. A client that asks again without reading loses the rest, and
                # sees that by the numbers: nobody waits for it.
                self._replay.setsockopt(zmq.SNDHWM, settings.replay_batches + 2)
                self.replay_port = self._bind(self._replay, settings.replay_port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> int:
        host = self._settings.host
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise EventsError(
                f"cannot publish events at {host}:{port}: {error.strerror}; choose another port or "
                "address, or turn events off"
            ) from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    @property
    def counts(self) -> dict[str, int]:
        """Since the start: batches, and hashes in those that were dropped."""
        return {
            "event_batches": self._sent,
            "event_batches_dropped": self._dropped,
            "event_blocks_dropped": self._dropped_blocks,
            "event_batches_replayed": self._replayed,
        }

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch after those before it, or drop it where too many wait. Never blocks."""
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._settings.queue_batches or self._closing.is_set():
            self._dropped += 1
            self._dropped_blocks += sum(
                len(event.block_hashes)
                for event in events
                if not isinstance(event, AllBlocksCleared)
            )
            return
        self._queue.append((number, EventBatch(time.time(), list(events), self._rank)))
        self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, as far as that is possible in time, and close. May be called again."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)

    # The thread's own. It alone touches the sockets once it runs.

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while True:
                closing = self._closing.is_set()
                self._answer()
                self._send(encoder)
                if closing and not self._queue:
                    return
                self._wake.wait(_WAKE_S)
                self._wake.clear()
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _send(self, encoder: msgspec.msgpack.Encoder) -> None:
        topic = self._settings.topic.encode()
        while self._queue:
            number, batch = self._queue.popleft()
            seq, payload = number.to_bytes(8, "big"), encoder.encode(batch)
            # A PUB socket drops for a subscriber that does not keep up, and does not wait for it.
            self._pub.send_multipart((topic, seq, payload))
            self._keep(seq, payload)
            self._sent += 1

    def _keep(self, seq: bytes, payload: bytes) -> None:
        if self._replay is None:
            return
        kept = self._kept
        kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(kept) > self._settings.replay_batches or (
            self._kept_bytes > self._settings.replay_bytes and len(kept) > 1
        ):
            self._kept_bytes -= len(kept.popleft()[1])

    def _answer(self) -> None:
        """Replay for everybody who asked. A request that is none is passed over."""
        replay = self._replay
        while replay is not None and replay.poll(0):
            frames = replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, empty, first = frames
            topic = self._settings.topic.encode()
            for seq, payload in self._kept:
                if seq >= first:
                    replay.send_multipart((client, empty, topic, seq, payload))
                    self._replayed += 1
            replay.send_multipart((client, empty, b"", END, b""))
