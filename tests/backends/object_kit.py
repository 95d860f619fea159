"""What the object tier's tests share: ways around the tier, and a store that fails when told to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import obstore

from backends.block import BlockKey
from backends.testing import Opener, TierHarness
from backends.tier.base import Tier, TierContext
from backends.tier.naming import Namespace, block_name, namespace_name
from backends.tier.object import ObjectSettings
from backends.tier.object.client import ObjectClient
from backends.tier.object.tier import ObjectTier

ROW_BYTES = 16384
UNLIMITED_BYTES = 1 << 30
# The suite counts blocks exactly, so nothing is evicted before it must be.
EXACT = {"high_watermark": 1.0, "low_watermark": 1.0, "absent_ttl_s": 0.05, "stagger_s": 0.05}

_stalls: dict[str, threading.Event] = {}
_shared: dict[str, ObjectClient] = {}


def make_settings(url: str, **changes: Any) -> ObjectSettings:
    return ObjectSettings(**{"url": url, **EXACT, **changes})


def path_of(fingerprint: bytes, key: BlockKey) -> str:
    """Where the tier looks for a block, relative to the url."""
    namespace = Namespace(namespace_name(fingerprint, None))
    return f"{namespace.leaf(namespace.block_id(key))}/{block_name(key)}"


class HookedClient(ObjectClient):
    """The real store, but `hook(operation, name)` is called before each request; it may wait or
    raise what the client raises."""

    def __init__(self, settings: ObjectSettings, hook: Callable[[str, str], None]) -> None:
        super().__init__(settings)
        self.hook = hook

    def _ask(self, operation: str, name: str, call: Callable[[], Any]) -> Any:
        def hooked() -> Any:
            self.hook(operation, name)
            return call()

        return super()._ask(operation, name, hooked)


def open_tier(settings: ObjectSettings, context: TierContext, place: str) -> Tier:
    """For other processes: a module's function can be pickled."""
    running = _stalls.get(place)
    if running is None:
        return ObjectTier(context, settings)
    client = HookedClient(settings, lambda *_: (running.wait(), None)[1])
    if settings.scheme == "memory":
        client._store = _shared.setdefault(place, client)._store
    return ObjectTier(context, settings, client=client)


class ObjectHarness(TierHarness):
    """A store of its own in a directory of this machine."""

    capabilities = ObjectTier.capabilities
    can_stall = True
    changes: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._running = threading.Event()
        self._running.set()
        _stalls[str(directory)] = self._running

    @property
    def url(self) -> str:
        return f"file://{self.directory}/store"

    def settings(self, capacity_bytes: int | None) -> ObjectSettings:
        more = {} if capacity_bytes is None else {"capacity": capacity_bytes}
        return make_settings(self.url, **{**self.changes, **more})

    def opener(self, capacity_bytes: int | None = None) -> Opener:
        return partial(_open, self.settings(capacity_bytes), str(self.directory))

    def raw_list(self) -> Mapping[str, int]:
        # Files come, go and get second names while directories are read one by one. What was there
        # in both of two passes was there together, at the moment between them.
        first, second = self._pass(), self._pass()
        return {name: size for name, size in first.items() if name in second}

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        file = self.directory / "store" / path_of(fingerprint, key)
        with contextlib.suppress(FileNotFoundError):
            return file.read_bytes()
        return None

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        file = self.directory / "store" / path_of(fingerprint, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def stall(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def close(self) -> None:
        super().close()
        _stalls.pop(str(self.directory), None)
        _shared.pop(str(self.directory), None)

    def _pass(self) -> dict[str, int]:
        """By inode: an unfinished file and the block that it becomes are one for a moment."""
        found: dict[str, int] = {}
        for directory, _, names in os.walk(self.directory / "store"):
            for name in names:
                if ".kvb" not in name or "quarantine" in directory:
                    continue
                try:
                    entry = os.stat(Path(directory, name))
                except FileNotFoundError:
                    continue
                found[str(entry.st_ino)] = entry.st_size
        return found


class MemoryHarness(ObjectHarness):
    """A store in this process's memory, shared by all tiers that one test opens."""

    capabilities = dataclasses.replace(ObjectTier.capabilities, persistent=False, shared=False)

    @property
    def url(self) -> str:
        return "memory:///"

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        try:
            found = obstore.get(self._store(), path_of(fingerprint, key))
        except FileNotFoundError:
            return None
        return bytes(found.bytes())

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        obstore.put(self._store(), path_of(fingerprint, key), data)

    def _store(self) -> Any:
        return _shared[str(self.directory)]._store


def _open(settings: ObjectSettings, place: str, context: TierContext) -> Tier:
    return open_tier(settings, context, place)
