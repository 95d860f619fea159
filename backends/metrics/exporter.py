"""Serves a replica's last snapshot over HTTP, from threads of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backends.errors import KvquayError
from backends.metrics.families import families
from backends.metrics.snapshot import ReplicaSnapshot

_CLIENT_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1  # what closing may take


class MetricsError(KvquayError):
    """The port for metrics cannot be opened."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without asking for the host's name, which may take its time where there is none."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not worth a line."""


class _Values(Collector):
    """One snapshot, as a registry's only collector."""

    def __init__(self, snapshot: ReplicaSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return families(self._snapshot)


class _Answer:
    """An answer's body that tells when it has been given away."""

    def __init__(self, body: Iterable[bytes], sent: Callable[[], None]) -> None:
        self._body = body
        self._sent = sent

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        self._sent()


class Exporter:
    """`show` may be called by any one thread, and takes no longer than an assignment."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Binds; port 0 lets the system choose. Raises MetricsError, with the port."""
        self._snapshot: ReplicaSnapshot | None = None
        self._read_to_the_end = threading.Event()
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            raise MetricsError(
                f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port or "
                "address, or turn metrics off"
            ) from error
        self._server.set_app(self._serve)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def show(self, snapshot: ReplicaSnapshot) -> None:
        """What a scrape gets from now on."""
        self._snapshot = snapshot

    def wait_read(self, timeout_s: float) -> bool:
        """Wait until somebody has been given the last values, those of a replica that `ended`."""
        return self._read_to_the_end.wait(timeout_s)

    def _serve(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        # Read once: the leader puts another one here at any time.
        snapshot = self._snapshot
        registry = CollectorRegistry()
        if snapshot is not None:
            registry.register(_Values(snapshot))
        body = make_wsgi_app(registry)(environ, start)
        ended = snapshot is not None and snapshot.ended and environ["REQUEST_METHOD"] == "GET"
        return _Answer(body, self._read_to_the_end.set if ended else _nothing)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _nothing() -> None:
    pass
