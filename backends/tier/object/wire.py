"""One HTTP/1.1 connection that reads whole objects, and does nothing else (RFC 9112).

Only the plain answer is understood: status 200 and a length. Anything else is Unclear, for somebody
who knows more. What is received goes where the caller wants it; the kernel's copy is the only one.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Final
from urllib.parse import SplitResult

from backends.tier.object.faults import Sick, StoreFault, code_in, of_status, passes

_HEAD_BYTES: Final = 32 << 10
_END: Final = b"\r\n\r\n"
_LATE: Final = "the server does not answer in time"
_NONE: Final = "there is no connection to the server"


class Unclear(Exception):
    """Not the plain answer."""


class Ended(ConnectionError):
    """The server has ended a connection, before it answered anything on it."""


class Connection:
    """Methods raise OSError, and TimeoutError where `read_timeout_s` brings nothing."""

    def __init__(
        self,
        url: SplitResult,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        """Connects. Raises Sick, and Unclear where whom to trust is the question."""
        self._read_timeout_s = read_timeout_s
        self._head = bytearray(_HEAD_BYTES)
        self.used_s = time.monotonic()
        port = url.port or (443 if tls else 80)
        try:
            sock = socket.create_connection((url.hostname or "", port), connect_timeout_s)
        except TimeoutError:
            raise Sick(_NONE, "timeout") from None
        except OSError:
            raise Sick(_NONE) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = tls.wrap_socket(sock, server_hostname=url.hostname) if tls else sock
        except OSError as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise Sick(_NONE, "timeout") from None
            raise Unclear from None

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    def ask(self, url: SplitResult, end_s: float) -> tuple[int, memoryview]:
        """The length of the body that follows, and its front, as much as came with the head.

        Raises Unclear, Ended, and Sick for what the server says of itself.
        """
        head, count, end = self._head, 0, -1
        request = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        try:
            self._wait_until(end_s)
            self._sock.sendall(f"{request}User-Agent: kvquay\r\n\r\n".encode("ascii"))
            while end < 0:
                if count == len(head):
                    raise Unclear
                got = self.receive(memoryview(head)[count:], end_s)
                # Its end may come in two pieces.
                end = head.find(_END, max(0, count - len(_END)), count + got)
                count += got
        except ConnectionError:
            if count:
                raise
            raise Ended from None
        status, size = _parse(bytes(head[:end]))
        front = memoryview(head)[end + len(_END) : count]
        if status == 200:
            return size, front
        if not passes(status):
            raise Unclear
        if len(front) < size:
            count += self.receive(memoryview(head)[count:], end_s)
        raise of_status(status, code_in(head[end:count].decode(errors="replace")))

    def receive(self, place: memoryview, end_s: float) -> int:
        """Wait for bytes, until `end_s` on time.monotonic's clock: how many came."""
        self._wait_until(end_s)
        got = self._sock.recv_into(place)
        if not got:
            raise ConnectionResetError
        return got

    def shut(self) -> None:
        """Whoever waits for it in another thread wakes up."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._sock.close()

    def _wait_until(self, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(min(left_s, self._read_timeout_s))


def fault_of(error: OSError) -> StoreFault | Unclear:
    """What an error of a connection means."""
    if isinstance(error, TimeoutError):
        return Sick(_LATE, "timeout")
    if isinstance(error, ssl.SSLError):
        return Unclear()
    return Sick("the connection was lost")


def _parse(head: bytes) -> tuple[int, int]:
    """Status, and length of the body that follows the head of an answer. Raises Unclear."""
    first, *lines = head.split(b"\r\n")
    protocol, status, *_ = *first.split(b" ", 2), b"", b""
    lengths = []
    for line in lines:
        name, _, value = (part.strip().lower() for part in line.partition(b":"))
        if name == b"content-length":
            lengths.append(value)
        elif name in (b"transfer-encoding", b"content-encoding"):
            raise Unclear
    if protocol != b"HTTP/1.1" or len(lengths) != 1:
        raise Unclear
    if not (status.isdigit() and lengths[0].isdigit()):
        raise Unclear
    return int(status), int(lengths[0])
