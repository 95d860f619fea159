"""Objects received straight into memory, from a server that does what the test says.

What real servers answer is seen in the tests that run on them; here are the answers that they give
once in a year.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.testing import RowBuffer, TierBench, make_context, make_keys
from backends.tier.base import Bytes, Outcome
from backends.tier.object.direct import DirectReads
from backends.tier.object.faults import Sick
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.tier import ObjectTier
from backends.tier.object.wire import Unclear
from tests.backends.object_http import BUCKET, FaultyS3

SIZE = 1 << 20
DATA = np.random.default_rng(7).integers(0, 256, SIZE, np.uint8).tobytes()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
Reply = Callable[[socket.socket], bool | None]
"""Answers one request; True: the connection ends then."""


class Server:
    """Answers the requests, in the order in which they come, each by the next of `replies`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.replies: list[Reply] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            sock.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            self._sockets.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while request := sock.recv(1 << 16):
                self.requests.append(request)
                if not self.replies or self.replies.pop(0)(sock):
                    break
        except OSError:
            return
        finally:
            sock.close()


class Memory:
    """A target, and what became of it. `wanted` False: it is not to be had."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.row = np.zeros(SIZE, np.uint8)
        self.wanted = wanted
        self.taken = 0
        self.given_back_s: float | None = None
        self.given_back = threading.Event()

    def take(self) -> Bytes | None:
        self.taken += 1
        return self.row if self.wanted else None

    def give_back(self) -> None:
        assert self.given_back_s is None
        self.given_back_s = time.monotonic()
        self.row[:] = 0
        self.given_back.set()


def whole(sock: socket.socket) -> None:
    sock.sendall(OK % SIZE + DATA)


def then_ends(sock: socket.socket) -> bool:
    whole(sock)
    return True


def ends(_: socket.socket) -> bool:
    return True


def saying(answer: bytes) -> Reply:
    return lambda sock: sock.sendall(answer)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def make_reads(server: Server, **changes: float) -> DirectReads:
    settings = ObjectSettings(url="s3://bucket/prefix", **changes)
    return DirectReads(settings, lambda name: f"http://127.0.0.1:{server.port}/b/{name}?secret=1")


@pytest.fixture
def reads(server: Server) -> Iterator[DirectReads]:
    reads = make_reads(server)
    yield reads
    reads.close()


def test_one_connection_fills_one_row_after_another(server: Server, reads: DirectReads) -> None:
    server.replies = [whole] * 3
    for number in range(3):
        memory = Memory()
        found = reads.fetch(str(number), SIZE, memory, None)
        assert found.data is memory.row
        assert found.size == SIZE
        assert memory.row.tobytes() == DATA
        assert memory.given_back_s is None
    assert server.connections == 1
    assert server.requests[1].startswith(b"GET /b/1?secret=1 HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 100])
def test_the_head_may_come_in_pieces(server: Server, reads: DirectReads, pieces: int) -> None:
    def slowly(sock: socket.socket) -> None:
        answer = OK % SIZE + DATA[:40]
        for begin in range(0, len(answer), pieces):
            sock.sendall(answer[begin : begin + pieces])
            time.sleep(0.0005)
        sock.sendall(DATA[40:])

    memory = Memory()
    server.replies = [slowly]
    assert reads.fetch("x", SIZE, memory, None).data is memory.row
    assert memory.row.tobytes() == DATA


@pytest.mark.parametrize("first", [then_ends, whole])
def test_a_connection_that_ended_while_it_was_idle_is_replaced(
    server: Server, reads: DirectReads, first: Reply
) -> None:
    memory = Memory()
    server.replies = [first, *([whole] if first is then_ends else [ends, whole])]
    reads.fetch("x", SIZE, Memory(), None)
    time.sleep(0.05)
    assert reads.fetch("x", SIZE, memory, None).data is memory.row
    assert server.connections == 2


def test_a_new_connection_that_ends_at_once_is_a_sick_server(
    server: Server, reads: DirectReads
) -> None:
    server.replies = [ends]
    with pytest.raises(Sick, match="ends the connection"):
        reads.fetch("x", SIZE, Memory(), None)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", id="absent"),
        pytest.param(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", id="denied"),
        pytest.param(b"HTTP/1.1 307 X\r\nContent-Length: 0\r\nLocation: /\r\n\r\n", id="elsewhere"),
        pytest.param(b"HTTP/1.1 206 Part\r\nContent-Length: 1048576\r\n\r\n", id="a part"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", id="chunked"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1048576\r\n\r\n",
            id="packed",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 1048576\r\n\r\n",
            id="two lengths",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="no length at all"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n", id="an odd length"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 1048576\r\n\r\n", id="an old protocol"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", id="something else"),
        pytest.param(b"HTTP/1.1\r\n\r\n", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10000, id="a head without end"),
    ],
)
def test_what_is_not_plain_is_for_the_client(
    server: Server, reads: DirectReads, answer: bytes
) -> None:
    memory = Memory()
    server.replies = [saying(answer), whole]
    with pytest.raises(Unclear):
        reads.fetch("x", SIZE, memory, None)
    assert memory.taken == 0
    # What is left of such an answer is no other request's.
    assert reads.fetch("x", SIZE, Memory(), None).size == SIZE
    assert server.connections == 2


def test_more_than_was_announced_is_unclear(server: Server, reads: DirectReads) -> None:
    small = b"x" * 100
    server.replies = [saying(OK % len(small) + small + b"more")]
    with pytest.raises(Unclear):
        reads.fetch("x", len(small), Memory(), None)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(503, "SlowDown", "throttled"), (500, "InternalError", "error"), (429, "", "throttled")],
)
def test_what_a_sick_server_says_is_told(
    server: Server, reads: DirectReads, status: int, code: str, kind: str
) -> None:
    body = f"<Error><Code>{code}</Code><Secret>s</Secret></Error>".encode()
    head = b"HTTP/1.1 %d Oh\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    server.replies = [lambda sock: (sock.sendall(head), time.sleep(0.02), sock.sendall(body))[2]]
    with pytest.raises(
        Sick, match=f"^the server answers {status}{f' {code}' if code else ''}$"
    ) as found:
        reads.fetch("x", SIZE, Memory(), None)
    assert found.value.kind == kind


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1, 1 << 40])
def test_an_object_of_another_size_is_not_read(
    server: Server, reads: DirectReads, size: int
) -> None:
    memory = Memory()
    server.replies = [saying(OK % size)]
    assert reads.fetch("x", SIZE, memory, None) == (None, size)
    assert memory.taken == 0


def test_a_body_that_ends_early_is_a_sick_server_and_the_row_is_given_back(
    server: Server, reads: DirectReads
) -> None:
    memory = Memory()
    server.replies = [lambda sock: (sock.sendall(OK % SIZE + DATA[:-1]), True)[1]]
    with pytest.raises(Sick, match="the connection was lost"):
        reads.fetch("x", SIZE, memory, None)
    assert memory.given_back_s is not None


@pytest.mark.parametrize("sent", [0, 20, 5000])
def test_a_server_that_stops_in_the_middle_is_waited_for_a_while(server: Server, sent: int) -> None:
    reads, memory, go = make_reads(server, read_timeout_s=0.2), Memory(), threading.Event()
    server.replies = [lambda sock: (sock.sendall((OK % SIZE + DATA)[:sent]), go.wait(20))[1]]
    with pytest.raises(Sick, match="does not answer in time") as found:
        reads.fetch("x", SIZE, memory, None)
    assert found.value.kind == "timeout"
    assert (memory.given_back_s is not None) == (memory.taken == 1) == (sent == 5000)
    go.set()
    reads.close()


def test_a_body_that_trickles_is_cut_off_by_the_time_for_the_whole(server: Server) -> None:
    reads, memory = make_reads(server, request_timeout_s=0.3, read_timeout_s=5.0), Memory()

    def trickle(sock: socket.socket) -> None:
        sock.sendall(OK % SIZE)
        for _ in range(2000):
            sock.sendall(b"x")
            time.sleep(0.01)

    server.replies = [trickle]
    with pytest.raises(Sick, match="does not answer in time"):
        reads.fetch("x", SIZE, memory, None)
    assert memory.given_back_s is not None
    reads.close()


def test_at_the_deadline_the_row_is_given_back_and_stays_untouched(
    server: Server, reads: DirectReads
) -> None:
    memory = Memory()

    def stop_in_the_middle(sock: socket.socket) -> None:
        sock.sendall(OK % SIZE + DATA[:5000])
        memory.given_back.wait(20)
        sock.sendall(DATA[5000:])

    server.replies = [stop_in_the_middle, whole]
    deadline_s = time.monotonic() + 0.2
    assert reads.fetch("x", SIZE, memory, deadline_s) == (None, SIZE)
    assert memory.given_back_s is not None
    assert memory.given_back_s >= deadline_s
    assert not memory.row.any()
    # The answer was read to its end, so the connection serves on.
    assert reads.fetch("x", SIZE, Memory(), None).size == SIZE
    assert server.connections == 1


def test_a_row_that_is_not_wanted_any_more_is_not_touched(
    server: Server, reads: DirectReads
) -> None:
    memory = Memory(wanted=False)
    server.replies = [whole]
    assert reads.fetch("x", SIZE, memory, None) == (None, SIZE)
    assert not memory.row.any()
    assert memory.given_back_s is None


def test_closing_ends_what_is_under_way(server: Server) -> None:
    reads, memory, go = make_reads(server, read_timeout_s=20), Memory(), threading.Event()
    server.replies = [lambda sock: (sock.sendall(OK % SIZE + DATA[:5000]), go.wait(20))[1]]
    began_s = time.monotonic()
    threading.Timer(0.1, reads.close).start()
    with pytest.raises(Sick):
        reads.fetch("x", SIZE, memory, None)
    assert time.monotonic() - began_s < 10
    assert memory.given_back_s is not None
    with pytest.raises(Sick, match="closed"):
        reads.fetch("x", SIZE, Memory(), None)
    go.set()


def test_nobody_listens(server: Server) -> None:
    reads = make_reads(server)
    server.close()
    with pytest.raises(Sick, match="no connection to the server"):
        reads.fetch("x", SIZE, Memory(), None)


def test_where_a_proxy_is_to_be_used_the_client_asks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(Unclear):
        make_reads(server).fetch("x", SIZE, Memory(), None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.replies = [whole]
    reads = make_reads(server)
    assert reads.fetch("x", SIZE, Memory(), None).size == SIZE
    reads.close()


def test_what_cannot_be_signed_is_for_the_client(server: Server) -> None:
    def sign(_: str) -> str:
        raise ValueError("secret")

    settings = ObjectSettings(url="s3://bucket/prefix")
    with pytest.raises(Unclear):
        DirectReads(settings, sign).fetch("x", SIZE, Memory(), None)


def test_whom_to_trust_is_for_the_client(server: Server, tmp_path: Path) -> None:
    """Certificates that cannot be read, and a server that does not speak TLS."""
    own = tmp_path / "own.pem"
    own.write_text("no certificate")

    def sign(name: str) -> str:
        return f"https://127.0.0.1:{server.port}/{name}?"

    for ca_bundle in (str(own), None):
        settings = ObjectSettings(url="s3://bucket/prefix", ca_bundle=ca_bundle)
        with pytest.raises(Unclear):
            DirectReads(settings, sign).fetch("x", SIZE, Memory(), None)
    assert server.connections == 1


# The tier on it.

ROW_BYTES = 1 << 16


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    server = FaultyS3()
    yield server
    server.close()


def open_bench(s3: FaultyS3, **changes: object) -> TierBench:
    settings = ObjectSettings(
        f"s3://{BUCKET}/pre", endpoint=s3.endpoint, allow_http=True, absent_ttl_s=0.05
    )
    buffer = RowBuffer(16, ROW_BYTES)
    settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    return TierBench(ObjectTier(make_context(buffer), settings), buffer)


def signed_in_the_url(query: str) -> bool:
    return re.search(r"(^|&)X-Amz-Signature=", query) is not None


@pytest.mark.parametrize("direct", [True, False])
def test_loads_are_direct_unless_they_are_not_to_be(s3: FaultyS3, direct: bool) -> None:
    seen: list[bool] = []

    def watch(method: str, key: str, query: str, headers: object) -> None:
        if method == "GET" and key.endswith(".kvb") and "range" not in headers:  # type: ignore[operator]
            seen.append(signed_in_the_url(query))

    s3.fault = watch
    bench = open_bench(s3, direct_reads=direct)
    keys = make_keys("loads", 8)
    assert bench.store(keys) == [Outcome.DONE] * 8
    assert bench.load(keys) == [Outcome.DONE] * 8
    assert seen == [direct] * 8
    bench.close()


def test_where_only_the_client_gets_through_no_more_is_tried(s3: FaultyS3) -> None:
    tried = 0

    def refuse(method: str, key: str, query: str, _: object) -> tuple[int, str] | None:
        nonlocal tried
        if method == "GET" and key.endswith(".kvb") and signed_in_the_url(query):
            tried += 1
            return 403, "AccessDenied"
        return None

    s3.fault = refuse
    bench = open_bench(s3)
    keys = make_keys("loads", 8)
    assert bench.store(keys) == [Outcome.DONE] * 8
    for key in keys:
        assert bench.load([key]) == [Outcome.DONE]
    assert tried == 3
    assert "loads pass through the client" in bench.tier.describe()[0]  # type: ignore[attr-defined]
    assert bench.tier.counters()["denied"] == 0
    bench.close()


def test_a_load_whose_bytes_stop_coming_is_late_in_time_and_its_row_is_free(
    server: Server, s3: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its thread touches the row no more, though the rest comes in the end."""
    bench = open_bench(s3)
    [key] = make_keys("late", 1)
    assert bench.store([key]) == [Outcome.DONE]
    block = next(data for name, data in s3.objects.items() if name.endswith(".kvb"))
    go = threading.Event()
    server.replies = [
        lambda sock: (
            sock.sendall(OK % len(block) + block[:9000]),
            go.wait(20),
            sock.sendall(block[9000:]),
        )[2]
    ]
    direct = bench.tier._client._direct  # type: ignore[attr-defined]
    monkeypatch.setattr(direct, "_sign", lambda name: f"http://127.0.0.1:{server.port}/{name}?")
    began_s = time.monotonic()
    job = bench.submit_load([key], deadline_s=began_s + 0.2)
    assert bench.outcomes(job) == [Outcome.LATE]
    assert 0.2 <= time.monotonic() - began_s < 4
    go.set()
    bench.until(lambda: bool(direct._idle), "the rest of the answer is not read")
    bench.check_free_rows()
    server.replies = [lambda sock: sock.sendall(OK % len(block) + block)]
    assert bench.load([key]) == [Outcome.DONE]
    bench.close()
