"""What the filesystem tier's tests share: ways around the tier, and a filesystem that fails."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from backends.block import BlockKey
from backends.testing import Opener, TierHarness
from backends.tier.base import Tier, TierContext
from backends.tier.filesystem import FilesystemSettings, naming
from backends.tier.filesystem.io import OsIo
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.tier import FilesystemTier

ROW_BYTES = 16384
# The suite counts blocks exactly, so nothing is evicted before it must be.
EXACT = {"high_watermark": 1.0, "low_watermark": 1.0, "probe_interval_s": 0.05}

_stalls: dict[str, threading.Event] = {}


def make_settings(path: Path | str, **changes: Any) -> FilesystemSettings:
    given: dict[str, Any] = {"paths": (str(path),), "capacity": 1 << 30, **EXACT, **changes}
    return FilesystemSettings(**given)


class HookedIo(OsIo):
    """The real filesystem, but `hook(name)` is called before each call and may wait or raise."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        super().__init__()
        self._hook = hook

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value):
            return value
        hook = super().__getattribute__("_hook")

        def call(*args: Any, **named: Any) -> Any:
            hook(name)
            return value(*args, **named)

        return call


def open_tier(settings: FilesystemSettings, context: TierContext) -> Tier:
    """For other processes: a module's function can be pickled."""
    running = _stalls.get(settings.paths[0])
    if running is None:
        return FilesystemTier(context, settings)
    return FilesystemTier(context, settings, io=HookedIo(lambda _: (running.wait(), None)[1]))


class FilesystemHarness(TierHarness):
    """One directory on this machine's disk."""

    capabilities = FilesystemTier.capabilities
    can_stall = True
    changes: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.paths = [directory / "disk"]
        self._running = threading.Event()
        self._running.set()
        _stalls[str(self.paths[0])] = self._running

    def opener(self, capacity_bytes: int | None = None) -> Opener:
        settings = make_settings(
            self.paths[0], **{"capacity": capacity_bytes or 1 << 30, **self.changes}
        )
        paths = tuple(map(str, self.paths))
        return partial(open_tier, dataclasses.replace(settings, paths=paths))

    def raw_list(self) -> Mapping[str, int]:
        # Files come, go and are renamed while directories are read one by one. What was there in
        # both of two passes was there together, at the moment between them.
        first, second = self._pass(), self._pass()
        return {name: size for name, size in first.items() if name in second}

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        for path in self.paths:
            file = path / block_path(fingerprint, key)
            if file.exists():
                return file.read_bytes()
        return None

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        for path in self.paths:
            file = path / block_path(fingerprint, key)
            if file.exists() or path is self.paths[-1]:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                return

    def stall(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def close(self) -> None:
        super().close()
        _stalls.pop(str(self.paths[0]), None)

    def _pass(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self.paths:
            for place in (path / naming.WRITERS, path):
                for file in place.rglob("*"):
                    relative = file.relative_to(path)
                    ours = relative.suffix == ".kvb" or relative.parts[0] == naming.WRITERS
                    if not ours or relative.parts[0] == naming.QUARANTINE:
                        continue
                    try:
                        status = file.lstat()
                    except FileNotFoundError:
                        continue
                    if file.is_file():
                        found[f"{path.name}:{status.st_ino}"] = status.st_size
        return found


def block_path(fingerprint: bytes, key: BlockKey, replica: int | None = None) -> Path:
    """Where a block stands, relative to its path."""
    space = Namespace(naming.namespace_name(fingerprint, replica))
    return Path(space.leaf(space.block_id(key))) / naming.block_name(key)


def block_files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*.kvb") if naming.QUARANTINE not in p.parts)


def leftovers(path: Path) -> list[Path]:
    """Unfinished files."""
    return [file for file in (path / naming.WRITERS).rglob("*") if file.is_file()]


def oserror(number: int) -> OSError:
    return OSError(number, os.strerror(number) + " (injected)")


ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOENT)
