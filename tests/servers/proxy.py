"""Between a client and an HTTP server on 127.0.0.1: passes everything on, or fails as it is told.

Not a server of its own: every right answer comes from the real one behind it. What goes through is
counted, which is how a test knows how often something was really uploaded.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Final
from urllib.parse import urlsplit

_PIECE_BYTES: Final = 64 << 10
_NO_BODY: Final = (204, 304)


class Kind(enum.Enum):
    """What happens to an exchange."""

    STATUS = "answered with an error by the proxy, the request goes no further"
    RESET = "the connection is reset, the request goes no further"
    HANG = "no answer comes, until the fault is mended"
    SLOW = "the answer's body comes in pieces, with a wait before each"
    CUT = "the connection ends in the middle of the answer's body"
    FLIP = "a bit in the middle of the answer's body is another"
    FLIP_UPLOAD = "a bit in the middle of the request's body is another"
    LOST_ANSWER = "the server does what it is asked, and the connection is reset"


@dataclass(frozen=True, slots=True)
class Fault:
    """`methods` None: all; `contains`: of the request's target. `status` for STATUS, `seconds` for
    SLOW, before each 64 KiB."""

    kind: Kind
    methods: tuple[str, ...] | None = None
    contains: str = ""
    status: int = 503
    seconds: float = 0.0

    def hits(self, method: str, target: str) -> bool:
        return (self.methods is None or method in self.methods) and self.contains in target


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what the client was answered; status 0 where there was no answer."""

    method: str
    target: str
    status: int
    fault: Kind | None


@dataclass(slots=True)
class _Plan:
    fault: Fault
    left: int


class Proxy:
    """One address for clients, `endpoint`, and one server behind it. A context manager.

    The `Host` that a client sends is passed on as it is, so that signatures hold.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Condition()
        self._exchanges: list[Exchange] = []
        self._plans: list[_Plan] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._hits = 0
        self._closed = False
        self._spawn(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fail(self, fault: Fault, times: int = 1 << 30) -> None:
        """From the next request on, `times` requests that it hits. The first such fault counts."""
        with self._lock:
            self._plans.append(_Plan(fault, times))

    def mend(self) -> None:
        """No faults any more. What hangs is cut off."""
        with self._lock:
            self._plans.clear()
            self._lock.notify_all()

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        self.fail(fault)
        try:
            yield
        finally:
            self.mend()

    @property
    def exchanges(self) -> list[Exchange]:
        with self._lock:
            return list(self._exchanges)

    def count(self, method: str, *, contains: str = "", status: int | None = None) -> int:
        """How many requests there were of this kind."""
        return sum(
            each.method == method
            and contains in each.target
            and (status is None or each.status == status)
            for each in self.exchanges
        )

    def hits(self) -> int:
        """How many exchanges a fault was at, those included that hang."""
        with self._lock:
            return self._hits

    def forget(self) -> None:
        with self._lock:
            self._exchanges.clear()

    def close(self) -> None:
        """Cut off everybody and wait for the threads. May be called again."""
        with self._lock:
            self._closed = True
            self._plans.clear()
            self._lock.notify_all()
            for each in (self._listener, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, EOFError):
            reader = self._hold(held, client)
            server: tuple[socket.socket, BinaryIO] | None = None
            while request := _read_message(reader, client):
                fault = self._fault_for(request)
                kind = fault.kind if fault else None
                status, goes_on = 0, False
                try:
                    if fault and kind is Kind.STATUS:
                        client.sendall(_refusal(fault.status, request.method))
                        status, goes_on = fault.status, True
                    elif fault and kind is Kind.HANG:
                        self._hang(fault)
                    elif kind is Kind.RESET:
                        _will_reset(client)
                    else:
                        if server is None:
                            upstream = socket.create_connection(self._upstream)
                            server = upstream, self._hold(held, upstream)
                        server[0].sendall(request.raw(flip=kind is Kind.FLIP_UPLOAD))
                        answer = _read_message(server[1], None, request.method)
                        if answer is None:
                            raise EOFError
                        status = 0 if kind is Kind.LOST_ANSWER else answer.status
                        goes_on = self._answer(client, answer, fault)
                except (OSError, EOFError):
                    # As if the client had talked to the server itself.
                    _will_reset(client)
                with self._lock:
                    self._exchanges.append(Exchange(request.method, request.target, status, kind))
                if not goes_on:
                    return

    def _answer(self, client: socket.socket, answer: _Message, fault: Fault | None) -> bool:
        """Whether the connection goes on."""
        kind = fault.kind if fault else None
        if kind is Kind.LOST_ANSWER:
            _will_reset(client)
            return False
        if kind is Kind.CUT:
            client.sendall(answer.head + answer.body[: len(answer.body) // 2])
            return False
        if fault and kind is Kind.SLOW:
            client.sendall(answer.head)
            for begin in range(0, len(answer.body), _PIECE_BYTES):
                time.sleep(fault.seconds)
                client.sendall(answer.body[begin : begin + _PIECE_BYTES])
        else:
            client.sendall(answer.raw(flip=kind is Kind.FLIP))
        return not answer.ends_connection

    def _fault_for(self, request: _Message) -> Fault | None:
        with self._lock:
            for plan in self._plans:
                if plan.left > 0 and plan.fault.hits(request.method, request.target):
                    plan.left -= 1
                    self._hits += 1
                    return plan.fault
        return None

    def _hang(self, fault: Fault) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not any(plan.fault is fault for plan in self._plans))

    def _hold(self, held: contextlib.ExitStack, connection: socket.socket) -> BinaryIO:
        """What to read it with. `close` shuts it down, and `held` closes it."""
        held.enter_context(connection)
        with self._lock:
            if self._closed:
                raise EOFError
            self._sockets.add(connection)
        held.callback(self._forget_socket, connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return held.enter_context(connection.makefile("rb"))

    def _forget_socket(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)


@dataclass(frozen=True, slots=True)
class _Message:
    """A request or an answer, as it came: its first lines, and its body with all its framing.

    `ends_connection`: nothing comes behind it.
    """

    head: bytes
    body: bytes
    ends_connection: bool

    @property
    def _words(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    @property
    def method(self) -> str:
        return self._words[0]

    @property
    def target(self) -> str:
        return self._words[1]

    @property
    def status(self) -> int:
        return int(self._words[1])

    def raw(self, *, flip: bool) -> bytes:
        if not flip or not self.body:
            return self.head + self.body
        middle = len(self.body) // 2
        return b"".join(
            (
                self.head,
                self.body[:middle],
                bytes([self.body[middle] ^ 0x10]),
                self.body[middle + 1 :],
            )
        )


def _read_message(
    reader: BinaryIO, to_encourage: socket.socket | None, method: str | None = None
) -> _Message | None:
    """The next one, None at the end. `method` is that of the request that is answered.

    A client that asks whether to send a body is told so through `to_encourage`.
    """
    lines = []
    while line := reader.readline():
        if line == b"\r\n":
            break
        lines.append(line)
    else:
        return None
    head = b"".join(lines)
    if method is not None and head.split(b" ", 2)[1] == b"100":
        return _read_message(reader, None, method)
    if _field(head, b"expect").lower() == b"100-continue":
        head = b"".join(each for each in lines if not each.lower().startswith(b"expect:"))
        if to_encourage is not None:
            to_encourage.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    head += b"\r\n"
    ends = _field(head, b"connection").lower() == b"close"
    if method == "HEAD" or (method is not None and int(head.split(b" ", 2)[1]) in _NO_BODY):
        return _Message(head, b"", ends)
    if b"chunked" in _field(head, b"transfer-encoding").lower():
        return _Message(head, b"".join(_chunks(reader)), ends)
    length = _field(head, b"content-length")
    if length:
        return _Message(head, _exactly(reader, int(length)), ends)
    if method is None:
        return _Message(head, b"", ends)
    return _Message(head, reader.read(), True)


def _chunks(reader: BinaryIO) -> Iterator[bytes]:
    while True:
        line = reader.readline()
        yield line
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        yield _exactly(reader, size + 2)
    while line := reader.readline():
        yield line
        if line == b"\r\n":
            return
    raise EOFError


def _exactly(reader: BinaryIO, count: int) -> bytes:
    data = reader.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _field(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _refusal(status: int, method: str) -> bytes:
    code = {503: "SlowDown", 429: "TooManyRequests", 500: "InternalError"}.get(status, "Refused")
    body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)


def _will_reset(connection: socket.socket) -> None:
    """The other side is to see a reset when it is closed, not an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
