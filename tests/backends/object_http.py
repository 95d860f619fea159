"""A server that speaks as much of S3 as the tier asks for, and misbehaves when it is told to.

It is no stand-in for a real server, which other tests use: it is there for answers that a real one
gives once in a year.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
Fault = tuple[int, str] | str | None
"""A status and an error's code; "reset"; "hang"; or None for a right answer."""


class FaultyS3:
    """Objects by key. `fault(method, key, query, headers)` decides over each request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str, str, Any], Fault] = lambda *_: None
        self.released = threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def count(self, method: str) -> int:
        """Requests for blocks so far."""
        with self.lock:
            return sum(each == method and key.endswith(".kvb") for each, key in self.requests)

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server_of: FaultyS3

    def log_message(self, *_: Any) -> None:
        """Tests' output is theirs."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url, server = urlsplit(self.path), self.server_of
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        with server.lock:
            server.requests.append((self.command, key))
        fault = server.fault(self.command, key, url.query, self.headers)
        if fault == "hang":
            server.released.wait(30)
        if isinstance(fault, str):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
        elif fault is not None:
            status, code = fault
            self._answer(status, f"<Error><Code>{code}</Code><Key>{key}</Key></Error>".encode())
        elif not key or self.command == "POST":
            self._whole_bucket(url.query, body)
        else:
            self._object(key, body)

    do_GET = do_PUT = do_HEAD = do_POST = _serve  # noqa: N815 - the server's own names

    def _object(self, key: str, body: bytes) -> None:
        objects = self.server_of.objects
        if self.command == "PUT":
            with self.server_of.lock:
                exists = key in objects
                if not (exists and self.headers.get("if-none-match") == "*"):
                    source = self.headers.get("x-amz-copy-source")
                    if source:
                        body = objects[unquote(source).lstrip("/").removeprefix(f"{BUCKET}/")]
                    objects[key] = body
                    exists = False
            if exists:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            elif self.headers.get("x-amz-copy-source"):
                self._answer(200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
            else:
                self._answer(200, b"")
        elif key not in objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data = objects[key]
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
            if span is None:
                self._answer(200, data)
                return
            first, last = int(span[1]), min(int(span[2]), len(data) - 1)
            more = {"content-range": f"bytes {first}-{last}/{len(data)}"}
            self._answer(206, data[first : last + 1], more)

    def _whole_bucket(self, query: str, body: bytes) -> None:
        if self.command == "POST":
            gone = re.findall(r"<Key>([^<]+)</Key>", body.decode())
            for key in gone:
                self.server_of.objects.pop(key, None)
            items = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in gone)
            self._answer(200, f"<DeleteResult>{items}</DeleteResult>".encode())
            return
        prefix = parse_qs(query).get("prefix", [""])[0]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key, data in sorted(self.server_of.objects.items())
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self._answer(200, text.encode())

    def _answer(self, status: int, data: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "content-length": str(len(data)),
            "etag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"',
            "last-modified": formatdate(usegmt=True),
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
