"""What the filesystem tier's tests share: ways around the tier, and a filesystem that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from backends.block import BlockKey
from backends.testing import (
    FINGERPRINT,
    ContractBroken,
    Opener,
    RowBuffer,
    TierBench,
    TierHarness,
    make_context,
)
from backends.tier.base import Tier, TierContext
from backends.tier.filesystem import FilesystemSettings, naming, native
from backends.tier.filesystem.io import OsIo
from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.native import NativeIo
from backends.tier.filesystem.tier import FilesystemTier

ROW_BYTES = 16384
# The suite counts blocks exactly, so nothing is evicted before it must be.
EXACT = {"high_watermark": 1.0, "low_watermark": 1.0, "probe_interval_s": 0.05}

_stalls: dict[str, threading.Event] = {}


def make_settings(path: Path | str, **changes: Any) -> FilesystemSettings:
    given: dict[str, Any] = {"paths": (str(path),), "capacity": 1 << 30, **EXACT, **changes}
    return FilesystemSettings(**given)


class _Hooked:
    """`hook(name)` is called before each call and may wait or raise."""

    _hook: Callable[[str], None]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or name == "close" or not callable(value):
            return value
        hook = super().__getattribute__("_hook")

        def call(*args: Any, **named: Any) -> Any:
            if name != "finish":
                hook(name)
                return value(*args, **named)
            # The kernel takes the descriptor back, also where it complains.
            value(*args, **named)
            return hook(name)

        return call


class HookedIo(_Hooked, OsIo):
    """The real filesystem, call by call."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        super().__init__()
        self._hook = hook


class HookedNativeIo(_Hooked, NativeIo):
    """The real filesystem as it is used, where the calls for whole files are one."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        compiled = native.compiled()
        assert compiled is not None
        super().__init__(compiled)
        self._hook = hook


def open_tier(settings: FilesystemSettings, context: TierContext) -> Tier:
    """For other processes: a module's function can be pickled."""
    running = _stalls.get(settings.paths[0])
    if running is None:
        return FilesystemTier(context, settings)
    return FilesystemTier(context, settings, io=HookedNativeIo(lambda _: (running.wait(), None)[1]))


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
        # both of two passes was there together, at the moment between them. A file that is held
        # open keeps its inode's number to itself until the second pass is over.
        with contextlib.ExitStack() as held:
            first = self._pass(held)
            second = self._pass(held)
        return {name: size for name, size in first.items() if name in second}

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                return (path / block_path(fingerprint, key)).read_bytes()
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

    def _pass(self, held: contextlib.ExitStack) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self.paths:
            for file in (*leftovers(path), *block_files(path)):
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(file, os.O_PATH | os.O_NOFOLLOW)
                    held.callback(os.close, fd)
                    status = os.fstat(fd)
                    # Blocks are whole pages; a ledger or a manifest on its way is not of the count.
                    whole = status.st_size % 4096 == 0 and file.name != naming.LEDGER
                    if stat.S_ISREG(status.st_mode) and whole:
                        found[f"{path.name}:{status.st_ino}"] = status.st_size
        return found


class BufferedHarness(FilesystemHarness):
    """Through the page cache, whatever the disk takes."""

    changes: ClassVar[Mapping[str, Any]] = {"direct": "off"}


class TwoPathsHarness(FilesystemHarness):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.paths = [directory / "disk", directory / "disk1"]


def block_path(fingerprint: bytes, key: BlockKey, replica: int | None = None) -> Path:
    """Where a block stands, relative to its path."""
    space = Namespace(naming.namespace_name(fingerprint, replica))
    return Path(space.leaf(space.block_id(key))) / naming.block_name(key)


def files_below(path: Path) -> list[Path]:
    """All that is no directory, also while directories come and go."""
    return sorted(Path(place) / name for place, _, names in os.walk(path) for name in names)


def statuses(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Of those that are still there: a tier renames and deletes while somebody looks."""
    found = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.lstat()
    return found


def block_files(path: Path) -> list[Path]:
    kept = path / naming.QUARANTINE
    return [p for p in files_below(path) if p.suffix == ".kvb" and p.parent != kept]


def leftovers(path: Path) -> list[Path]:
    """Unfinished files."""
    return files_below(path / naming.WRITERS)


def oserror(number: int) -> OSError:
    return OSError(number, os.strerror(number) + " (injected)")


ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOENT)


class Faults:
    """A hook that fails calls of given names, the nth ones or all from the nth on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.hits = 0
        self._lock = threading.Lock()
        self._plans: list[tuple[str, int, int, int]] = []

    def fail(self, name: str, number: int, *, after: int = 0, times: int = 1 << 30) -> None:
        """Of the calls of `name` (`*`: any), after the next `after`, `times` raise `number`."""
        with self._lock:
            begin = self._count(name) + after
            self._plans.append((name, number, begin, begin + times))

    def end(self) -> None:
        """All is well again."""
        with self._lock:
            self._plans.clear()

    def __call__(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
            for wanted, number, begin, end in self._plans:
                if wanted in ("*", name) and begin < self._count(wanted) <= end:
                    self.hits += 1
                    raise oserror(number)

    def _count(self, name: str) -> int:
        return self.calls.total() if name == "*" else self.calls[name]


class Sites:
    """A hook that knows where in the tier a call comes from, and acts at some such places, once."""

    def __init__(self, acts: Mapping[str, Callable[[], None]]) -> None:
        self.seen: Counter[str] = Counter()
        self.fired: list[str] = []
        self._acts = dict(acts)
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        frame, places = sys._getframe(2), []
        while frame is not None and len(places) < 3:
            _, found, file = frame.f_code.co_filename.partition("/backends/tier/")
            if found:
                places.append(f"{file}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        site = " < ".join((name, *places))
        with self._lock:
            self.seen[site] += 1
            act = self._acts.pop(site, None)
            if act is None:
                return
            self.fired.append(site)
        act()


class Bench(TierBench):
    """A bench on a filesystem tier, with what its tests ask most."""

    def __init__(
        self,
        settings: FilesystemSettings,
        *,
        io: OsIo | None = None,
        rows: int = 32,
        row_bytes: int = ROW_BYTES,
        fingerprint: bytes = FINGERPRINT,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        buffer = RowBuffer(rows, row_bytes, fingerprint)
        context = make_context(buffer, data_parallel_index=replica, data_parallel_size=replicas)
        self.fs = FilesystemTier(context, settings, io=io)
        super().__init__(self.fs, buffer)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.tier.close()

    def count(self, name: str) -> int:
        return self.fs.counters()[name]

    def ready(self) -> Bench:
        """Wait until all that stood there is known and counted."""
        assert self.fs.wait_until_known(self.patience_s, scanned=True)
        return self


def ledger_of(tier: FilesystemTier, path: int = 0) -> Ledger:
    return tier._lanes[path].volume.ledger


def assert_counted_right(bench: Bench, path: Path) -> None:
    """The ledger says what stands on the disk, and no reservation of a store has stayed."""
    ledger = ledger_of(bench.fs)
    spares = bench.fs._lanes[0].volume.space.spares
    told: list[str] = []

    def right() -> bool:
        files = block_files(path)
        found = statuses((*files, *(path / naming.QUARANTINE).iterdir())).values()
        held = sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))
        totals, reserved = ledger.totals(), ledger._in_use_bytes - len(spares) * ROW_BYTES
        told[:] = [f"{totals}, {reserved} reserved: {len(files)} blocks, {held} bytes are there"]
        return (totals.bytes, totals.blocks, reserved) == (held, len(files), 0)

    try:
        bench.until(right, "it is not counted right")
    except ContractBroken as error:
        raise AssertionError(f"{error}: {told}") from None
