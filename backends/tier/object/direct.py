"""Objects of an S3 store, received straight into the caller's memory.

The client hands out bytes of its own, in memory that is new each time, to be copied from there; for
a large block that is a third of the processor's work. Here a request that the client has signed
goes over a connection of our own. What needs more than that is Unclear: then the client asks again,
and says what it means. Of the bytes nothing is believed; they are a block's, with its checksum.
"""

from __future__ import annotations

import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from backends.tier.base import Bytes
from backends.tier.object.faults import Sick
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.wire import Connection, Ended, Unclear, fault_of

_IDLE_S: Final = 20.0
_SCRATCH_BYTES: Final = 256 << 10
_VAIN_MAX: Final = 3


class Target(Protocol):
    """Memory that is the caller's until it is taken, and again when it is given back."""

    def take(self) -> Bytes | None:
        """uint8 [n], contiguous; None where it is not wanted any more."""

    def give_back(self) -> None: ...


class Received(NamedTuple):
    """`data`: the target's memory, filled; None where it was not wanted, or `size` is wrong."""

    data: Bytes | None
    size: int


class DirectReads:
    """Connections to one endpoint, for I/O threads: each call blocks one."""

    def __init__(self, settings: ObjectSettings, sign: Callable[[str], str]) -> None:
        """`sign` gives the URL, good for a while, that reads an object by its name."""
        self._settings = settings
        self._sign = sign
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._tls: ssl.SSLContext | None = None
        self._needs_proxy: dict[str, bool] = {}
        self._vain = 0

    @property
    def useful(self) -> bool:
        """False for good where only the client gets through."""
        return self._vain < _VAIN_MAX

    def was_vain(self) -> None:
        """The client had an answer where this had none."""
        self._vain += 1

    def fetch(
        self, name: str, row_bytes: int, target: Target, deadline_s: float | None
    ) -> Received:
        """A whole object of `row_bytes`. Raises Sick or Unclear, with the target given back.

        At `deadline_s`, on time.monotonic's clock, the target is given back too; the rest of the
        answer is still awaited, so that a sick server is told from a late caller.
        """
        url = self._signed(name)
        end_s = time.monotonic() + self._settings.request_timeout_s
        while True:
            kept = self._kept()
            try:
                with self._held(kept or self._connect(url)) as connection:
                    size, front = connection.ask(url, end_s)
                    if size != row_bytes:
                        connection.close()
                        return Received(None, size)
                    filling = _Filling(target, size, deadline_s)
                    with filling:
                        filling.receive(connection, front, end_s)
                    self._vain = 0
                    return Received(filling.data, size)
            except Ended:
                if kept is None:
                    raise Sick("the server ends the connection") from None
                # It was idle, and the server has ended it meanwhile.

    def close(self) -> None:
        """End all connections; what is under way fails."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._busy:
                connection.shut()

    def _signed(self, name: str) -> SplitResult:
        try:
            url = urlsplit(self._sign(name))
        # The client documents no types here, and its text may hold secrets.
        except Exception:
            raise Unclear from None
        host = url.hostname or ""
        if host not in self._needs_proxy:
            proxies = urllib.request.getproxies()
            named = url.scheme in proxies or "all" in proxies
            self._needs_proxy[host] = named and not urllib.request.proxy_bypass(host)
        if self._needs_proxy[host] or not f"{url.path}{url.query}{url.netloc}".isascii():
            raise Unclear
        return url

    def _connect(self, url: SplitResult) -> Connection:
        tls = self._context() if url.scheme == "https" else None
        settings = self._settings
        return Connection(url, tls, settings.connect_timeout_s, settings.read_timeout_s)

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                context, own = ssl.create_default_context(), self._settings.ca_bundle
                if own is not None:
                    try:
                        context.load_verify_locations(cafile=own)
                    except OSError:
                        raise Unclear from None
                self._tls = context
            return self._tls

    def _kept(self) -> Connection | None:
        """The connection that was used last."""
        with self._lock:
            long_ago_s = time.monotonic() - _IDLE_S
            while self._idle and self._idle[0].used_s < long_ago_s:
                self._idle.pop(0).close()
            return self._idle.pop() if self._idle else None

    @contextmanager
    def _held(self, connection: Connection) -> Iterator[Connection]:
        """For one request; kept for the next one where all of the answer was read."""
        with self._lock:
            closed = self._closed
            self._busy.add(connection)
        try:
            if closed:
                raise Sick("the tier is closed")
            yield connection
        except Ended:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            raise fault_of(error) from None
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if self._closed:
                    connection.close()
                elif connection.is_open:
                    connection.used_s = time.monotonic()
                    self._idle.append(connection)


class _Filling:
    """A target while an answer comes in; given back when its deadline passes, or all fails."""

    def __init__(self, target: Target, size: int, deadline_s: float | None) -> None:
        self._target = target
        self._size = size
        self._deadline_s = deadline_s
        self.data: Bytes | None = None

    def __enter__(self) -> None:
        self.data = self._target.take()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._give_back()

    def receive(self, connection: Connection, front: memoryview, end_s: float) -> None:
        done = len(front)
        if done > self._size:
            raise Unclear
        if self.data is not None:
            self.data.data[:done] = front
        while done < self._size:
            if self._is_late():
                self._give_back()
            if self.data is None:
                place = memoryview(bytearray(min(_SCRATCH_BYTES, self._size - done)))
                done += connection.receive(place, end_s)
                continue
            until_s = end_s if self._deadline_s is None else min(end_s, self._deadline_s)
            try:
                done += connection.receive(self.data.data[done:], until_s)
            except TimeoutError:
                if not self._is_late():
                    raise

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _give_back(self) -> None:
        if self.data is not None:
            self.data = None
            self._target.give_back()
