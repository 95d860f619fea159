"""What a start has to find out: whether the store can be used, and whether it puts create-only.

Everything that the tier will ever ask for is asked for once, so that a missing right shows at the
start, with its name and its fix, and not as misses later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from backends.errors import TierError
from backends.tier.health import Breaker
from backends.tier.manifest import MANIFEST_BYTES_MAX, fits_manifest
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Absent, Denied, Exists, NoBucket, NoRoom, Refused
from backends.tier.object.names import MANIFEST, probe_path
from backends.tier.object.requests import Requests
from backends.tier.object.settings import ObjectSettings

_Answer = TypeVar("_Answer")
_PROBE: Final = b"kvquay writes and deletes this when it starts\n"
_RIGHTS: Final = {
    "write": "s3:PutObject",
    "read": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}


class Opening:
    """One attempt after another at using a store. Methods raise TierError for what no second
    attempt mends, and Sick."""

    def __init__(
        self, client: ObjectClient, requests: Requests, settings: ObjectSettings, breaker: Breaker
    ) -> None:
        self._client = client
        self._requests = requests
        self._settings = settings
        self._breaker = breaker

    def open(self, namespace: str, manifest: bytes, row_bytes: int) -> bool:
        """Whether create-only puts work here. Writes the manifest if there is none."""
        conditional = self.try_rights(namespace)
        self._write_manifest(f"{namespace}/{MANIFEST}", manifest, row_bytes, conditional)
        return conditional

    def try_rights(self, prefix: str, name: str = "") -> bool:
        """Write, read, delete an object and list a prefix; whether create-only puts work here.

        The object is called `name`, or as nobody else's, and is gone again.
        """
        conditional = self._probe(name or probe_path())
        self._ask("list", lambda: next(self._client.pages(prefix), None))
        return conditional

    def _probe(self, name: str) -> bool:
        settings = self._settings
        if settings.conditional == "off":
            self._ask("write", lambda: self._client.put(name, _PROBE))
            conditional = False
        else:
            conditional = self._creates_only(name)
        self._ask("read", lambda: self._client.fetch(name, len(_PROBE)))
        self._ask("delete", lambda: self._client.delete([name]))
        if settings.conditional == "on" and not conditional:
            raise TierError(
                f"{settings.url} overwrites where a put should only create, and conditional is on; "
                "use a store with conditional writes (If-None-Match), or set conditional to auto"
            )
        return conditional

    def _creates_only(self, name: str) -> bool:
        try:
            self._requests.ask(lambda: self._client.create(name, _PROBE), self._breaker, retries=0)
        except (Refused, Exists):
            # It does not know the condition, or, for a name that nobody else has, makes it up.
            self._ask("write", lambda: self._client.put(name, _PROBE))
            return False
        except (Denied, NoBucket, NoRoom) as error:
            raise self._told("write", error) from None
        try:
            self._ask("write", lambda: self._client.create(name, _PROBE))
        except Exists:
            return True
        return False

    def _write_manifest(
        self, name: str, manifest: bytes, row_bytes: int, conditional: bool
    ) -> None:
        where = f"{self._settings.url}/{name}"
        with contextlib.suppress(Absent):
            found = self._ask("read", lambda: self._client.front(name, MANIFEST_BYTES_MAX))
            if fits_manifest(found.data.tobytes(), row_bytes, where):
                return
            self._ask("write", lambda: self._client.put(name, manifest))
            return
        if not conditional:
            self._ask("write", lambda: self._client.put(name, manifest))
            return
        # Another process may be first, and then says the same.
        with contextlib.suppress(Exists):
            self._ask("write", lambda: self._client.create(name, manifest))

    def _ask(self, what: str, call: Callable[[], _Answer]) -> _Answer:
        try:
            return self._requests.ask(call, self._breaker, retries=0)
        except (Denied, NoBucket, NoRoom, Refused) as error:
            raise self._told(what, error) from None

    def _told(self, what: str, error: Denied | NoBucket | NoRoom | Refused) -> TierError:
        url, bucket = self._settings.url, self._settings.bucket
        if isinstance(error, NoBucket):
            return TierError(
                f"{url}: there is no bucket {bucket!r} at {self._settings.endpoint or 'its '}"
                f"{'' if self._settings.endpoint else 'provider'}; make it, or correct url, "
                "endpoint or region"
            )
        if isinstance(error, Denied):
            return TierError(
                f"{url}: may not {what}: {error}; give credentials in the environment "
                f"(for s3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role) that are allowed "
                f"{_RIGHTS[what]} there, and check the clock and the region"
            )
        return TierError(f"{url}: cannot {what}: {error}; check url, endpoint and region")
