"""What `action=doctor` asks about an object store.

What it measures with stands below `doctor/<owner>/` and goes again; what a doctor left that was
killed, the next one finds by its owner's name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from backends.errors import TierError
from backends.tier.base import Bytes
from backends.tier.counters import Counters
from backends.tier.health import Breaker
from backends.tier.object import environment
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Denied, NoBucket, NoRoom, StoreFault
from backends.tier.object.lifecycle import lifecycle_rule
from backends.tier.object.opening import Opening
from backends.tier.object.requests import COUNTS, Requests
from backends.tier.object.settings import ObjectSettings

__all__ = [
    "CannotList",
    "Leftover",
    "NoAccess",
    "ObjectBench",
    "abort_rule",
    "leftovers",
    "lifecycle_rule",
    "why_no_connection",
]

_ROOT: Final = "doctor"
_PORTS: Final = {"http": 80, "https": 443}
_NS_PER_S: Final = 1_000_000_000


class CannotList(TierError):
    """This kind of store tells nobody what uploads are unfinished."""


class NoAccess(TierError):
    """The store does not let the tier do its work, and will not by itself."""

    def __init__(self, text: str, kind: Literal["bucket", "credentials", "room", "other"]) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something unfinished. `age_s` is how long ago it was begun, or last written to."""

    name: str
    age_s: float
    what: str


def leftovers(settings: ObjectSettings) -> list[Leftover]:
    """Unfinished uploads below the url: they are paid for, and seen in no listing of objects.

    Those of writers that are at work now are among them. Raises CannotList where this kind of store
    lists none, and TierError where they cannot be listed now.
    """
    now_s = time.time()
    if settings.scheme == "s3":
        from backends.tier.object.uploads import list_uploads

        return [
            Leftover(upload.name, max(0.0, now_s - upload.began_s), "upload in parts")
            for upload in list_uploads(settings)
        ]
    if settings.scheme == "file":
        from backends.tier.object.leftovers import staged_files

        try:
            return [
                Leftover(path, max(0.0, now_s - found.st_mtime), "unfinished file")
                for path, found in staged_files(settings.prefix)
            ]
        except OSError as error:
            raise TierError(
                f"{settings.url} cannot be read: {error.strerror}; run it as the tier's user"
            ) from None
    if settings.is_remote:
        raise CannotList(
            f"{settings.url}: unfinished uploads cannot be listed on this store; "
            f"{abort_rule(settings)}"
        )
    return []


def abort_rule(settings: ObjectSettings) -> str:
    """What rule removes uploads that nobody finishes; "" where a store needs none."""
    rules = {
        "s3": "AbortIncompleteMultipartUpload with DaysAfterInitiation 1",
        "gs": "AbortIncompleteMultipartUpload with an age of 1 day",
        # Parts that were never committed are no blobs, and no rule names them.
        "az": "a delete of old blobs; uncommitted parts Azure drops after a week by itself",
    }
    rule = rules.get(settings.scheme)
    return f"set a lifecycle rule on {settings.bucket}: {rule}" if rule else ""


def why_no_connection(settings: ObjectSettings, timeout_s: float) -> str:
    """In words, why the store's server is not reached; "" where it is, or where that is not known,
    as for a provider's own servers."""
    given = settings.endpoint or (environment.endpoint() if settings.scheme == "s3" else None)
    if not settings.is_remote or given is None:
        return ""
    url = urlsplit(given)
    where = (url.hostname or "", url.port or _PORTS.get(url.scheme, 0))
    told = f"{where[0]}:{where[1]}"
    try:
        socket.create_connection(where, timeout_s).close()
    except socket.gaierror:
        return f"the name {where[0]} is not known"
    except ConnectionRefusedError:
        return f"nobody listens at {told} (connection refused)"
    except TimeoutError:
        return f"{told} does not answer"
    except OSError as error:
        return f"{told} cannot be reached: {error.strerror}"
    return ""


class ObjectBench:
    """Objects of one measurement, below `doctor/<owner>/`; `owner` names who lives while it does.

    Blocking; threads may share it. Methods raise StoreFault.
    """

    def __init__(self, settings: ObjectSettings, owner: str) -> None:
        """Raises TierError. Makes no request."""
        self._settings = settings
        self._client = ObjectClient(settings)
        self._prefix = f"{_ROOT}/{owner}"
        self._conditional = False
        self._names: list[str] = []

    def try_access(self) -> bool:
        """Do once all that the tier does; whether create-only puts work. Raises NoAccess."""
        settings = self._settings
        counters = Counters(COUNTS)
        breaker = Breaker(settings.breaker_s, settings.breaker_most_s, settings.breaker_failures)
        opening = Opening(self._client, Requests(settings, counters), settings, breaker)
        name = self._name("access")
        try:
            self._conditional = opening.try_rights(_ROOT, name)
        except StoreFault:
            raise
        except TierError as error:
            # Raised while the store's own word was handled, which says which kind it is.
            fault = error.__context__
            kinds = {NoBucket: "bucket", Denied: "credentials", NoRoom: "room"}
            kind = next((word for cls, word in kinds.items() if isinstance(fault, cls)), "other")
            raise NoAccess(str(error), kind) from None  # type: ignore[arg-type]
        self._names.remove(name)
        return self._conditional

    def clock_skew_s(self) -> float | None:
        """The store's clock less this machine's, None where a new object is not listed at once.

        To half a second where the store tells whole ones.
        """
        name = self._name("clock")
        before_ns = time.time_ns()
        self._client.put(name, b"kvquay\n")
        after_ns = time.time_ns()
        for page in self._client.pages(self._prefix):
            for found in page:
                if found.name == name:
                    rounded_ns = 0 if found.modified_ns % _NS_PER_S else _NS_PER_S // 2
                    middle_ns = (before_ns + after_ns) // 2
                    return (found.modified_ns + rounded_ns - middle_ns) / _NS_PER_S
        return None

    def store(self, number: int, row: Bytes) -> None:
        """Put a sealed row as the tier would."""
        name, settings = self._name(str(number)), self._settings
        if row.size > settings.multipart_threshold:
            self._client.put_parts(name, row, settings.multipart_part)
        elif self._conditional:
            self._client.create(name, row)
        else:
            self._client.put(name, row)

    def load(self, number: int, most_bytes: int) -> Bytes:
        """A row that was stored. Raises Absent."""
        return self._client.fetch(f"{self._prefix}/{number}", most_bytes).data

    def size(self, number: int) -> int:
        """What a lookup asks for. Raises Absent."""
        return self._client.size(f"{self._prefix}/{number}")

    @property
    def names(self) -> tuple[str, ...]:
        """Every object that there may be."""
        return tuple(self._names)

    def listed(self) -> tuple[str, ...]:
        """Every object of this owner that the store lists, whoever put it."""
        return tuple(found.name for page in self._client.pages(self._prefix) for found in page)

    def delete(self, names: Sequence[str]) -> None:
        """Those that are not there too."""
        self._client.delete(names)

    def sweep(self, is_dead: Callable[[str, float], bool]) -> int:
        """Delete what the doctors of dead owners left; how many objects.

        `is_dead(owner, age_s)` gets the age of the owner's newest object by the store's clock.
        """
        newest: dict[str, int] = {}
        names: dict[str, list[str]] = {}
        for page in self._client.pages(_ROOT):
            for found in page:
                owner = found.name.split("/")[1]
                names.setdefault(owner, []).append(found.name)
                newest[owner] = max(newest.get(owner, 0), found.modified_ns)
        swept = 0
        for owner, theirs in names.items():
            if is_dead(owner, time.time() - newest[owner] / _NS_PER_S):
                self._client.delete(theirs)
                self._remove_directory(owner)
                swept += len(theirs)
        return swept

    def close(self) -> None:
        """Give up connections, and directories where the store is one. Deletes no object."""
        self._remove_directory(self._prefix.rpartition("/")[2])
        self._client.close()

    def _name(self, last: str) -> str:
        name = f"{self._prefix}/{last}"
        self._names.append(name)
        return name

    def _remove_directory(self, owner: str) -> None:
        """Of an owner whose objects are gone: the client leaves directories, and half files."""
        if self._settings.scheme != "file":
            return
        root = os.path.join(self._settings.prefix, _ROOT)
        shutil.rmtree(os.path.join(root, owner), ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(root)
