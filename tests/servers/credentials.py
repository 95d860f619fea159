"""What a cloud's agent is to a container: hands out credentials that expire soon, over HTTP."""

from __future__ import annotations

import json
import secrets
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.servers.account import REGION, Account


class CredentialService:
    """Gives those of `account`, which a test may replace. A context manager."""

    def __init__(self, directory: Path, account: Account, lifetime_s: float = 120.0) -> None:
        self.account = account
        self.asked = 0
        self._lifetime = timedelta(seconds=lifetime_s)
        self._token = secrets.token_hex(16)
        self._token_file = directory / "agent.token"
        self._token_file.write_text(self._token)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> CredentialService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """What a program is given that is to ask here."""
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self._server.server_port}/",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(self._token_file),
            "AWS_REGION": REGION,
        }

    def _answer(self) -> bytes:
        self.asked += 1
        return json.dumps(
            {
                "AccessKeyId": self.account.access_key,
                "SecretAccessKey": self.account.secret_key,
                "Token": "",  # these accounts have none
                "Expiration": f"{datetime.now(UTC) + self._lifetime:%Y-%m-%dT%H:%M:%SZ}",
            }
        ).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers["Authorization"] == service._token
                body = service._answer() if allowed else b"{}"
                self.send_response(200 if allowed else 403)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nowhere: it would be lost among the tests' output."""

        return Handler
