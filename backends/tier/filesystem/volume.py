"""One path: blocks of one namespace are written, read, found and taken away here.

Blocking code for I/O threads. Nothing here knows jobs, queues or the index.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from backends import block
from backends.block import BlockKey
from backends.config import BLOCK_FORMAT_VERSION
from backends.errors import TierError
from backends.tier.filesystem import naming
from backends.tier.filesystem.health import Breaker
from backends.tier.filesystem.io import ALIGNMENT_BYTES, DIRECTORY, Bytes, Io
from backends.tier.filesystem.ledger import QUARANTINE_SHARD, Ledger, Totals
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.probe import Direct, probe_direct
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.transfer import Scratch, read_row, write_row
from backends.tier.filesystem.writer import Writer, parse_writer

# What open gives for a name that is no regular file: a link, a directory, a socket, a device.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
_LOAD_FAILURES: Final = 3
_ROOM_TIMEOUT_S: Final = 1.0
_ROOM_STEP_S: Final = 0.002
_FOREIGN_AGE_S: Final = 3600.0


class NoRoom(Exception):
    """A block does not fit, and nothing could be evicted for it."""


class BlockWrong(Exception):
    """What stands under a block's name is not that block; it is out of the way now."""


class Taken(Exception):
    """A right block of this key came first."""


class Room(enum.Enum):
    """What became of an attempt to make room."""

    MADE = "made"
    LATER = "later"  # somebody else is about it
    NONE = "none"


class Removal(NamedTuple):
    """Bytes freed. `used_ns`: it stays, because it was used then; None: it is gone."""

    freed_bytes: int
    used_ns: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A block's format, the same for all blocks of a tier."""

    namespace: Namespace
    fingerprint: bytes
    row_bytes: int
    manifest: dict[str, object]


class Volume:
    """One path of the tier. `stores` and `loads` say whether it may be used now."""

    def __init__(
        self, number: int, path: str, settings: FilesystemSettings, stored: Stored, writer: Writer,
        io: Io,
    ) -> None:  # fmt: skip
        self.number = number
        self.path = path
        self.quota_bytes = settings.capacity // len(settings.paths)
        self.stores = Breaker(settings.retry_s, settings.retry_most_s)
        self.loads = Breaker(settings.retry_s, settings.retry_most_s, _LOAD_FAILURES)
        self.direct = Direct(False, "not opened yet")
        self._settings = settings
        self._stored = stored
        self._namespace = stored.namespace
        self._writer = writer
        self._io = io
        self._opening = threading.Lock()
        self._device: int | None = None
        self._root = self._temporary = -1
        self._numbers = itertools.count()
        self._pages = Scratch(ALIGNMENT_BYTES)
        self._rows = Scratch(stored.row_bytes)
        self._owed: list[int] = []
        self._quarantine_limit_bytes = settings.quarantine_limit_bytes // len(settings.paths)
        self.ledger: Ledger | None = None

    # Opening.

    def open(self, *, make: bool) -> None:
        """Open the path, or open it anew after a failure; OSError, or TierError for good.

        Only at the start is the path itself made: later its absence means a disk that is gone, and
        a new directory in its place would fill the disk below it.
        """
        with self._opening:
            if make:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            root = self._io.open_root(self.path)
            try:
                self._check_device(root)
                self._root = self._take_over(self._root, root)
            except BaseException:
                self._io.close(root)
                raise
            for name in (naming.WRITERS, naming.QUARANTINE, self._namespace.name):
                self._make_directory(self._root, name)
            writers = f"{naming.WRITERS}/{self._writer.name}"
            with self._directory(naming.WRITERS) as parent:
                self._make_directory(parent, self._writer.name)
            self._temporary = self._take_over(
                self._temporary, self._io.open(self._root, writers, DIRECTORY)
            )
            if self.ledger is None:
                self.ledger = Ledger(self._io, self._root, self._temporary, self._writer)
            self.ledger.ensure()
            self._write_manifest()
            self.direct = probe_direct(self._io, self._temporary, self._settings.direct)
            if self._settings.direct == "on" and not self.direct.on:
                raise TierError(
                    f"{self.path}: direct is on, but the path cannot: {self.direct.reason}; set "
                    "direct to auto, or use another disk"
                )

    def close(self) -> None:
        """Take this writer's traces away and close everything. May be called again."""
        if self.ledger is not None:
            self.ledger.close()
        if self._temporary >= 0:
            with contextlib.suppress(OSError), self._directory(naming.WRITERS) as parent:
                self._empty_writer(self._writer.name)
                self._io.rmdir(parent, self._writer.name)
        for fd in (self._temporary, self._root):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._io.close(fd)
        self._root = self._temporary = -1

    def needs_opening(self) -> bool:
        """Whether it was never opened, or what was opened is gone. Raises OSError."""
        if not self.is_open:
            return True
        return any(self._io.fstat(fd).st_nlink == 0 for fd in (self._root, self._temporary))

    def is_counted(self) -> bool:
        """Whether stores may begin: what is here has been counted."""
        return self.ledger is not None and self.ledger.cached.counted

    @property
    def is_open(self) -> bool:
        return self._temporary >= 0

    @property
    def root(self) -> int:
        return self._root

    @property
    def counts(self) -> Ledger:
        """The ledger of an opened path."""
        if self.ledger is None:
            raise OSError(errno.ENODEV, "the path has not been opened yet", self.path)
        return self.ledger

    def _check_device(self, root: int) -> None:
        device = self._io.fstat(root).st_dev
        if self._device is None:
            self._device = device
        elif self._device != device:
            try:
                self._io.stat(root, naming.LEDGER)
            except FileNotFoundError:
                text = "another disk is mounted here, or none, and it has none of our files"
                raise OSError(errno.ENODEV, text, self.path) from None
            self._device = device

    def _take_over(self, old: int, new: int) -> int:
        """Put a new descriptor under the old number, which other threads may be using."""
        if old < 0:
            return new
        os.dup2(new, old, inheritable=False)
        self._io.close(new)
        return old

    def _make_directory(self, parent: int, name: str) -> None:
        try:
            self._io.mkdir(parent, name)
        except FileExistsError:
            return
        if self._settings.durability == "full":
            self._sync_directory(parent)

    def _sync_directory(self, directory: int) -> None:
        fd = self._io.open(directory, ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._io.fsync(fd)
        finally:
            self._io.close(fd)

    def _write_manifest(self) -> None:
        found = {
            "fingerprint": self._stored.fingerprint.hex(),
            "format_version": BLOCK_FORMAT_VERSION,
            "row_bytes": self._stored.row_bytes,
        }
        document = {**found, "made_of": self._stored.manifest}
        data = json.dumps(document, indent=2, sort_keys=True, default=str).encode() + b"\n"
        with self._directory(self._namespace.name) as directory:
            old = self._read_manifest(directory)
            if old is not None:
                if old.get("row_bytes") != self._stored.row_bytes:
                    raise TierError(
                        f"{self.path}/{self._namespace.name} holds blocks of "
                        f"{old.get('row_bytes')} bytes, expected {self._stored.row_bytes}: what "
                        "decides a block's size is not in the fingerprint; use another path"
                    )
                return
            self.write_file(directory, naming.MANIFEST, data)

    def _read_manifest(self, directory: int) -> dict[str, object] | None:
        try:
            document = json.loads(self.read_file(directory, naming.MANIFEST))
        except (FileNotFoundError, ValueError):
            return None
        ours = isinstance(document, dict) and "row_bytes" in document
        return document if ours else None

    # Small files.

    def write_file(self, directory: int, name: str, data: bytes) -> None:
        """Put a small file in the place of another, whole or not at all. Raises OSError."""
        temporary = str(next(self._numbers))
        fd = self._io.open(self._temporary, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                view, done = memoryview(data), 0
                while done < len(data):
                    got = os.pwritev(fd, [view[done:]], done)
                    done += got
                if self._settings.durability != "none":
                    self._io.fsync(fd)
            finally:
                self._io.close(fd)
            self._io.replace(self._temporary, temporary, directory, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._io.unlink(self._temporary, temporary)
            raise

    def read_file(self, directory: int, name: str) -> bytes:
        fd = self._io.open(directory, name, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return file.read()

    def write_namespace_file(self, name: str, data: bytes) -> None:
        with self._directory(self._namespace.name) as directory:
            self.write_file(directory, name, data)

    def read_namespace_file(self, name: str) -> bytes:
        with self._directory(self._namespace.name) as directory:
            return self.read_file(directory, name)

    @contextlib.contextmanager
    def _directory(self, name: str) -> Iterator[int]:
        fd = self._io.open(self._root, name, DIRECTORY)
        try:
            yield fd
        finally:
            self._io.close(fd)

    # Blocks.

    def store(
        self,
        key: BlockKey,
        block_id: int,
        row: Bytes,
        used_ns: int,
        make_room: Callable[[int], Room],
    ) -> bool:
        """Store a row whose header is COMPLETE: True if it was written, False if it was there.

        `make_room(n)` tries to evict n bytes. Raises NoRoom and OSError.
        """
        name = naming.block_name(key)
        leaf = self._open_leaf(block_id)
        try:
            if self._settle(leaf, name, key, block_id):
                return False
            self._reserve(make_room)
            release = True
            try:
                created_ns = _file_time_ns(block.read_header(row))
                block.seal(row, row.size - block.HEADER_BYTES)
                temporary = self._write_temporary(row, used_ns, created_ns)
                try:
                    release = self._publish(temporary, leaf, name, key, block_id)
                except Taken:
                    return False
            finally:
                if release:
                    self.counts.release(row.size)
            if self._settings.durability == "full":
                self._sync_directory(leaf)
            return True
        finally:
            self._io.close(leaf)

    def load(
        self, key: BlockKey, block_id: int, row: Bytes, used_ns: int, touch_before_ns: int
    ) -> int:
        """Read a block into a row and check it. Raises BlockWrong and OSError, also "no entry".

        Shows others that it was used at `used_ns`, if what they were shown last is older than
        `touch_before_ns`. Gives the time that others see now.
        """
        leaf_path, name = self._namespace.leaf(block_id), naming.block_name(key)
        try:
            fd = self._io.open(self._root, f"{leaf_path}/{name}", self._read_flags())
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self._put_away(key, block_id, None)
            raise BlockWrong("its name belongs to something that is not a file") from None
        try:
            found = self._io.fstat(fd)
            wrong = self._wrong_file(found)
            if wrong is None:
                got = read_row(self._io, fd, row)
                wrong = self._wrong_bytes(row[:got], key)
            if wrong is None:
                if found.st_atime_ns < touch_before_ns:
                    # A read-only disk is no reason to miss.
                    with contextlib.suppress(OSError):
                        self._io.utime(fd, used_ns, found.st_mtime_ns)
                        return used_ns
                return found.st_atime_ns
        finally:
            self._io.close(fd)
        self._put_away(key, block_id, found)
        raise BlockWrong(wrong)

    def holds(self, key: BlockKey, block_id: int) -> bool:
        """Whether there is a file of this name and size. Raises OSError other than "no entry"."""
        path = f"{self._namespace.leaf(block_id)}/{naming.block_name(key)}"
        try:
            fd = self._io.open(self._root, path, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _NO_FILE:
                return False
            raise
        try:
            return self._wrong_file(self._io.fstat(fd)) is None
        finally:
            self._io.close(fd)

    def remove(self, leaf_path: str, name: str, shard: int, unless_used_after_ns: int) -> Removal:
        """Evict one block of any namespace, unless somebody used it later. Raises OSError."""
        try:
            with self._directory(leaf_path) as leaf:
                found = self._io.stat(leaf, name)
                if found.st_atime_ns > unless_used_after_ns:
                    return Removal(0, found.st_atime_ns)
                with self.counts.shard(shard):
                    self._io.unlink(leaf, name)
                    self.counts.add(shard, -found.st_size, -1)
                return Removal(found.st_size, None)
        except FileNotFoundError:
            return Removal(0, None)

    def put_away(self, key: BlockKey, block_id: int) -> None:
        """Quarantine whatever has this key's name. Raises OSError."""
        self._put_away(key, block_id, None)

    # Pieces of these.

    def _open_leaf(self, block_id: int) -> int:
        path = self._namespace.leaf(block_id)
        with contextlib.suppress(FileNotFoundError):
            return self._io.open(self._root, path, DIRECTORY)
        at = self._root
        try:
            for part in path.split("/"):
                self._make_directory(at, part)
                below = self._io.open(at, part, DIRECTORY)
                if at != self._root:
                    self._io.close(at)
                at = below
        except BaseException:
            if at != self._root:
                self._io.close(at)
            raise
        return at

    def _settle(self, leaf: int, name: str, key: BlockKey, block_id: int) -> bool:
        """Whether the right block is there already; something wrong in its place is put away.

        "Right" costs no reading of the payload as long as the file's mtime is the creation time in
        its header, which is what this tier sets: nobody has written to it since. Damage that comes
        about without writing is found by the checksum when the block is loaded.
        """
        try:
            fd = self._io.open(leaf, name, self._read_flags())
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self._put_away(key, block_id, None)
            return False
        try:
            found = self._io.fstat(fd)
            if self._wrong_file(found) is None and self._right_block(fd, found, key):
                return True
        finally:
            self._io.close(fd)
        self._put_away(key, block_id, found)
        return False

    def _right_block(self, fd: int, found: os.stat_result, key: BlockKey) -> bool:
        page = self._pages.get()
        try:
            if self._io.preadv(fd, [page], 0) != page.size:
                return False
            header = block.read_header(page)
            if not block.check_row(
                page, key, self._stored.fingerprint
            ) and found.st_mtime_ns == _file_time_ns(header):
                return True
            row = self._rows.get()
            return block.check(row[: read_row(self._io, fd, row)], *self._expected(key)) is None
        except OSError as error:
            # A sector that cannot be read is as good as wrong: the block is written elsewhere.
            if error.errno == errno.EIO:
                return False
            raise

    def _write_temporary(self, row: Bytes, used_ns: int, created_ns: int) -> str:
        name = str(next(self._numbers))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct.on else 0)
        fd = self._io.open(self._temporary, name, flags)
        try:
            try:
                write_row(self._io, fd, row)
                self._io.utime(fd, used_ns, created_ns)
                if self._settings.durability == "data":
                    self._io.fdatasync(fd)
                elif self._settings.durability == "full":
                    self._io.fsync(fd)
            finally:
                self._io.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._io.unlink(self._temporary, name)
            raise
        return name

    def _publish(self, temporary: str, leaf: int, name: str, key: BlockKey, block_id: int) -> bool:
        """Give a finished file its name and count it. False: it may not have been counted."""
        shard = naming.shard_of(block_id)
        named = False
        try:
            for attempt in (1, 2):
                try:
                    with self.counts.shard(shard):
                        self._io.publish(self._temporary, temporary, leaf, name)
                        named = True
                        self.counts.add(shard, self._stored.row_bytes, 1)
                    return True
                except FileExistsError:
                    if self._settle(leaf, name, key, block_id):
                        raise Taken from None
                    if attempt == 2:
                        raise
            raise AssertionError("unreachable")
        except OSError:
            if not named:
                raise
            # It is there but not in the count. Its reservation counts for it until it is.
            self._owed.append(shard)
            return False
        finally:
            if not named:
                with contextlib.suppress(OSError):
                    self._io.unlink(self._temporary, temporary)

    def _reserve(self, make_room: Callable[[int], Room]) -> None:
        end_s = time.monotonic() + _ROOM_TIMEOUT_S
        while True:
            short = self.counts.reserve(self._stored.row_bytes, self.limit_bytes)
            if short <= 0:
                return
            room = make_room(short)
            if room is Room.NONE or time.monotonic() > end_s:
                break
            if room is Room.LATER:
                time.sleep(_ROOM_STEP_S)
        totals = self.counts.cached
        raise NoRoom(
            f"{self.path}: {totals.all_bytes} of {self.limit_bytes(totals)} bytes are used, and "
            "nothing can be evicted"
        )

    def limit_bytes(self, totals: Totals) -> int:
        """The most that may be here: the quota, or less where the disk is full. Raises OSError."""
        if not totals.counted:
            raise OSError(errno.EAGAIN, "what is here has not been counted yet", self.path)
        disk = self._io.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize - self._settings.free_reserve_bytes
        return min(self.quota_bytes, totals.bytes + max(0, free))

    def _read_flags(self) -> int:
        # O_NONBLOCK: whoever opens a FIFO that was put in a block's place must not wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        return flags | os.O_DIRECT if self.direct.on else flags

    def _wrong_file(self, found: os.stat_result) -> str | None:
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_size != self._stored.row_bytes:
            return f"is {found.st_size} bytes long, expected {self._stored.row_bytes}"
        return None

    def _wrong_bytes(self, data: Bytes, key: BlockKey) -> str | None:
        if self._settings.verify:
            return block.check(data, *self._expected(key))
        if data.size != self._stored.row_bytes:
            return f"is {data.size} bytes long, expected {self._stored.row_bytes}: truncated"
        return block.check_row(data, key, self._stored.fingerprint)

    def _expected(self, key: BlockKey) -> tuple[BlockKey, bytes, int]:
        return key, self._stored.fingerprint, self._stored.row_bytes - block.HEADER_BYTES

    # Quarantine.

    def _put_away(self, key: BlockKey, block_id: int, seen: os.stat_result | None) -> None:
        """Move a block's file to the quarantine, if it is still the one that was `seen`."""
        name, shard = naming.block_name(key), naming.shard_of(block_id)
        counts = self.counts
        try:
            with (
                self._directory(self._namespace.leaf(block_id)) as leaf,
                self._directory(naming.QUARANTINE) as quarantine,
                counts.shard(QUARANTINE_SHARD),
                counts.shard(shard),
            ):
                now = self._io.stat(leaf, name)
                if seen is not None and (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
                    return
                self._io.replace(leaf, name, quarantine, f"{time.time_ns()}_{name}")
                counts.add(shard, -self._stored.row_bytes, -1)
                self._trim(quarantine)
        except FileNotFoundError:
            return

    def trim_quarantine(self) -> None:
        """Count the quarantine and keep it within its limit; its shard is held. Raises OSError."""
        with self._directory(naming.QUARANTINE) as quarantine:
            self._trim(quarantine)

    def _trim(self, quarantine: int) -> None:
        names = sorted(entry.name for entry in self._io.scandir(quarantine, "."))
        kept_bytes, kept = 0, 0
        for name in reversed(names):
            found = self._io.stat(quarantine, name)
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            if kept_bytes + size <= self._quarantine_limit_bytes:
                kept_bytes, kept = kept_bytes + size, kept + 1
                continue
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(found.st_mode):
                    self._io.rmdir(quarantine, name)
                else:
                    self._io.unlink(quarantine, name)
        self.counts.set_count(QUARANTINE_SHARD, kept_bytes, kept)

    # What dead writers left.

    def sweep(self) -> int:
        """Remove what dead writers were writing; how many files. Raises OSError."""
        names = [entry.name for entry in self._io.scandir(self._root, naming.WRITERS)]
        writers = [writer for name in names if (writer := parse_writer(name)) is not None]
        return sum(self.sweep_writer(writer) for writer in writers if self._is_dead(writer))

    def sweep_writer(self, writer: Writer) -> int:
        try:
            count = self._empty_writer(writer.name)
            with self._directory(naming.WRITERS) as parent:
                self._io.rmdir(parent, writer.name)
        except FileNotFoundError:
            return 0
        return count

    def _is_dead(self, writer: Writer) -> bool:
        alive = writer.alive(self._writer.host)
        if alive is None:
            # Of another machine: the ledger hears of it, so what it does not know has ended.
            with self._directory(naming.WRITERS) as parent:
                age_s = time.time() - self._io.stat(parent, writer.name).st_mtime
            return age_s > _FOREIGN_AGE_S and not self.counts.knows(writer)
        return not alive

    def _empty_writer(self, name: str) -> int:
        with self._directory(f"{naming.WRITERS}/{name}") as directory:
            entries = self._io.scandir(directory, ".")
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    self._io.unlink(directory, entry.name)
        return len(entries)

    # Blocks that have their name but may not be counted; their reservation stands for them.

    def debts(self) -> list[int]:
        """Shards to be counted, one for each such block."""
        return list(self._owed)

    def pay(self, shard: int) -> None:
        """A shard has been counted: the reservation of one block of it ends."""
        self._owed.remove(shard)
        self.counts.release(self._stored.row_bytes)


def _file_time_ns(header: block.BlockHeader) -> int:
    """The mtime of a file that nobody has written to since its block was made."""
    return min(header.created_ns, 2**62)
