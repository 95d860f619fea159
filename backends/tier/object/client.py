"""The few requests that the tier makes of a store, each one an attempt that works or says why not.

Blocking, for I/O threads. Methods raise StoreFault. Whatever comes back is the store's word and is
checked by the caller.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

import numpy as np
import obstore

from backends.tier.base import Bytes
from backends.tier.object.connect import connect
from backends.tier.object.direct import DirectReads, Received, Target
from backends.tier.object.faults import Absent, Denied, Expired, NoRange, classify
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.wire import Unclear

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Store

_Answer = TypeVar("_Answer")
_PARTS_AT_ONCE: Final = 4
PAGE_NAMES: Final = 1000
_SIGNED_FOR: Final = timedelta(minutes=5)
_PANIC: Final = "PanicException"


class Listed(NamedTuple):
    """An object as a listing shows it. Nothing of it is to be believed."""

    name: str
    size: int
    modified_ns: int


class Fetched(NamedTuple):
    """An object, or its front: uint8 [n], read-only. `size` is that of the whole."""

    data: Bytes
    size: int


class ObjectClient:
    """A store, by names relative to the settings' url."""

    def __init__(self, settings: ObjectSettings) -> None:
        """Raises TierError. Makes no request."""
        self._settings = settings
        self._renewing = threading.Lock()
        self._store: ObjectStore = connect(settings)
        direct = settings.scheme == "s3" and settings.direct_reads
        self._direct = DirectReads(settings, self._sign) if direct else None

    def create(self, name: str, data: Bytes | bytes) -> None:
        """Put an object where there is none. Raises Exists."""
        body = self._body(data)
        self._ask(
            "create",
            name,
            lambda: obstore.put(self._store, name, body, mode="create", use_multipart=False),
        )

    def put(self, name: str, data: Bytes | bytes) -> None:
        """Put an object, whatever is there."""
        body = self._body(data)
        self._ask("put", name, lambda: obstore.put(self._store, name, body, use_multipart=False))

    def put_parts(self, name: str, data: Bytes, part_bytes: int) -> None:
        """Put a big object in parts, whatever is there. If it fails the parts are dropped."""
        body = self._body(data)
        self._ask(
            "put_parts",
            name,
            lambda: obstore.put(
                self._store,
                name,
                body,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            ),
        )

    def fetch(self, name: str, most_bytes: int) -> Fetched:
        """A whole object; only its size where it is larger than `most_bytes`. Raises Absent."""

        def get() -> Fetched:
            found = obstore.get(self._store, name)
            size = found.meta["size"]
            data = np.empty(0, np.uint8) if size > most_bytes else _array(found.bytes())
            return Fetched(data, size)

        return self._ask("fetch", name, get)

    def fetch_into(
        self, name: str, row_bytes: int, target: Target, deadline_s: float | None
    ) -> Received:
        """A whole object of `row_bytes`, in the memory of `target`. Raises Absent.

        The target is taken when bytes come, and given back where that fails or `deadline_s`, on
        time.monotonic's clock, passes on the way.
        """

        def get() -> Received:
            direct = self._direct if self.reads_directly else None
            if direct is not None:
                with contextlib.suppress(Unclear):
                    return direct.fetch(name, row_bytes, target, deadline_s)
            found = obstore.get(self._store, name)
            size = found.meta["size"]
            if size != row_bytes:
                return Received(None, size)
            data = _array(found.bytes())
            if direct is not None:
                direct.was_vain()
            row = target.take()
            if row is not None:
                row[:] = data
            return Received(row, size)

        return self._ask("fetch", name, get)

    @property
    def reads_directly(self) -> bool:
        """Whether `fetch_into` does without memory of the client's, as far as is known."""
        return self._direct is not None and self._direct.useful

    def front(self, name: str, count: int) -> Fetched:
        """The first `count` bytes, or fewer where it is shorter. Raises Absent."""

        def get() -> Fetched:
            found = obstore.get(self._store, name, options={"range": (0, count)})
            return Fetched(_array(found.bytes()), found.meta["size"])

        with contextlib.suppress(NoRange):
            return self._ask("front", name, get)
        # An empty object has no range at all, and some stores send a small one whole.
        whole = self.fetch(name, sys.maxsize)
        return Fetched(whole.data[:count], whole.size)

    def size(self, name: str) -> int:
        """Bytes of an object. Raises Absent."""
        return self._ask("size", name, lambda: obstore.head(self._store, name)["size"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there too."""
        if len(names) > 1 and self._settings.scheme == "s3":
            self._ask("delete", names[0], lambda: obstore.delete(self._store, list(names)))
            return
        for name in names:
            try:
                self._ask("delete", name, partial(obstore.delete, self._store, name))
            except Absent:
                continue

    def copy(self, name: str, to: str) -> None:
        """Copy an object inside the store. Raises Absent."""
        self._ask("copy", name, lambda: obstore.copy(self._store, name, to))

    def pages(self, prefix: str | None) -> Iterator[list[Listed]]:
        """All objects below a prefix, by pages; "a/b" is below "a" and "ab" is not."""
        where = prefix or ""
        stream = self._ask(
            "list",
            where,
            lambda: iter(obstore.list(self._store, prefix, chunk_size=PAGE_NAMES)),
        )
        while True:
            page = self._ask("list", where, lambda: next(stream, None))
            if page is None:
                return
            yield [
                Listed(
                    str(item["path"]),
                    int(item["size"]),
                    int(item["last_modified"].timestamp() * 1e9),
                )
                for item in page
            ]

    def _renew(self, failed: ObjectStore) -> None:
        """Forget connections and credentials: the next request finds them anew."""
        with self._renewing:
            # Many requests fail of one expired token; the first of them renews it.
            if self._settings.is_remote and self._store is failed:
                self._store = connect(self._settings)

    def close(self) -> None:
        """Give up connections. No request may follow, unless the store is in this process."""
        self.interrupt()
        if self._settings.is_remote:
            del self._store

    def interrupt(self) -> None:
        """What is being received into somebody's memory fails now, and nothing is any more."""
        if self._direct is not None:
            self._direct.close()

    def _sign(self, name: str) -> str:
        return obstore.sign(cast("S3Store", self._store), "GET", name, _SIGNED_FOR)

    def _ask(self, operation: str, name: str, call: Callable[[], _Answer]) -> _Answer:
        """One attempt. `operation` and `name` are for who watches: tests that inject faults."""
        store = self._store
        try:
            return call()
        # The client documents neither all its types nor their sources, and a panic inside it is
        # no Exception at all.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            fault = classify(error)
            if isinstance(fault, Expired) or (isinstance(fault, Denied) and fault.replaced):
                self._renew(store)
            # Not "from error": its text may hold secrets, and a traceback would show it.
            raise fault from None

    def _body(self, data: Bytes | bytes) -> Bytes | bytes:
        if self._settings.scheme == "memory" and not isinstance(data, bytes):
            # That store keeps the caller's own memory, which is about to be used again.
            return data.tobytes()
        return data


def _array(data: obstore.Bytes) -> Bytes:
    return np.frombuffer(memoryview(data), np.uint8) if len(data) else np.empty(0, np.uint8)
