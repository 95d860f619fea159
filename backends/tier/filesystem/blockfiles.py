"""One block, one file: written whole or not at all, read and checked, found, taken away.

Blocking code for I/O threads. Methods raise OSError.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from backends import block
from backends.block import BlockKey
from backends.tier.filesystem import naming
from backends.tier.filesystem.io import ALIGNMENT_BYTES, DIRECTORY, Bytes
from backends.tier.filesystem.ledger import Ledger, Totals
from backends.tier.filesystem.naming import Namespace
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.probe import Direct
from backends.tier.filesystem.quarantine import Quarantine
from backends.tier.filesystem.spares import Spares
from backends.tier.filesystem.transfer import Scratch, read_row, write_row

# What open gives for a name that is no regular file: a link, a directory, a socket, a device.
_NO_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
_ROOM_TIMEOUT_S: Final = 1.0
_ROOM_STEP_S: Final = 0.002
_FULL_S: Final = 0.5


class NoRoom(Exception):
    """A block does not fit, and nothing could be evicted for it."""


class BlockWrong(Exception):
    """What stood under a block's name is not that block; it is out of the way now."""


class Room(enum.Enum):
    """What became of an attempt to make room."""

    MADE = "made"
    LATER = "later"  # somebody else is about it
    NONE = "none"


class Removal(NamedTuple):
    """Bytes freed. `used_ns`: it stays, because it was used then; None: it is gone.

    `spare`: its file is a spare now.
    """

    freed_bytes: int
    used_ns: int | None
    spare: bool = False


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of a tier have in common, and how they are treated."""

    namespace: Namespace
    fingerprint: bytes
    row_bytes: int
    verify: bool
    durability: str


class BlockFiles:
    """The blocks of one namespace on one path. `direct` may change when a path is opened anew."""

    def __init__(
        self,
        place: Place,
        ledger: Ledger,
        quarantine: Quarantine,
        form: BlockFormat,
        limit_bytes: Callable[[Totals], int],
        spares: Spares,
    ) -> None:
        self._place = place
        self._io = place.io
        self._ledger = ledger
        self._quarantine = quarantine
        self._form = form
        self._limit_bytes = limit_bytes
        self._pages = Scratch(ALIGNMENT_BYTES)
        self._rows = Scratch(form.row_bytes)
        self._owed: list[int] = []
        self.spares = spares
        self._full_until_s = 0.0
        self._may_skip_atime = True
        self.direct = Direct(False, "not opened yet")

    def store(
        self,
        key: BlockKey,
        block_id: int,
        row: Bytes,
        used_ns: int,
        make_room: Callable[[int], Room],
    ) -> bool:
        """Store a row whose header is COMPLETE: True if it was written, False if it was there.

        `make_room(n)` tries to evict n bytes. Raises NoRoom, and what `make_room` raises.
        """
        name = naming.block_name(key)
        leaf = self._open_leaf(block_id)
        try:
            if self._settle(leaf, name, key, block_id):
                return False
            try:
                self._write(leaf, name, block_id, row, used_ns, make_room)
            except FileExistsError:
                # Another writer was first. If what it wrote is wrong, it is out of the way now.
                if self._settle(leaf, name, key, block_id):
                    return False
                self._write(leaf, name, block_id, row, used_ns, make_room)
            if self._form.durability == "full":
                self._place.flush_directory(leaf)
            return True
        finally:
            self._io.close(leaf)

    def load(
        self, key: BlockKey, block_id: int, row: Bytes, used_ns: int, touch_before_ns: int
    ) -> int:
        """Read a block into a row and check it. Raises BlockWrong.

        Shows others that it was used at `used_ns`, if what they were shown last is older than
        `touch_before_ns`. Gives the time that others see now.
        """
        try:
            fd = self._open_to_read(self._place.root, self._path(key, block_id))
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self.put_away(key, block_id)
            raise BlockWrong("its name belongs to something that is not a file") from None
        try:
            found = self._io.fstat(fd)
            wrong = self._wrong_file(found)
            if wrong is None:
                wrong = self._wrong_bytes(row[: read_row(self._io, fd, row)], key)
            if (
                wrong is None
                and not self._form.verify
                and not self._still_named(key, block_id, found)
            ):
                wrong = "lost its name while it was read"
            if wrong is None:
                if found.st_atime_ns < touch_before_ns:
                    # A read-only disk is no reason to miss.
                    with contextlib.suppress(OSError):
                        self._io.utime(fd, used_ns, found.st_mtime_ns)
                        return used_ns
                return found.st_atime_ns
        finally:
            self._io.close(fd)
        if not self.put_away(key, block_id, found):
            # It lost its name on the way, so it may have been written over: no damage.
            raise FileNotFoundError(errno.ENOENT, "it was evicted while it was read")
        raise BlockWrong(wrong)

    def holds(self, key: BlockKey, block_id: int) -> bool:
        """Whether there is a file of this name and size."""
        flags = os.O_PATH | os.O_NOFOLLOW
        try:
            fd = self._io.open(self._place.root, self._path(key, block_id), flags)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, *_NO_FILE):
                return False
            raise
        try:
            return self._wrong_file(self._io.fstat(fd)) is None
        finally:
            self._io.close(fd)

    def remove(
        self, leaf: str, name: str, shard: int, unless_used_after_ns: int, *, spare: bool
    ) -> Removal:
        """Evict one block of any namespace, unless somebody used it later.

        `spare`: keep its file to be written over, if it can be; a spare is counted for it already.
        """
        try:
            with self._place.directory(leaf) as directory:
                found = self._io.stat(directory, name)
                if found.st_atime_ns > unless_used_after_ns:
                    return Removal(0, found.st_atime_ns)
                # Another name of the same file is somebody's copy of it: not to be written over.
                fits = found.st_size == self._form.row_bytes and found.st_nlink == 1
                new = self._place.new_name() if spare and fits else None
                with self._ledger.shard(shard):
                    if new is None:
                        self._io.unlink(directory, name)
                    else:
                        self._io.replace(directory, name, self._place.temporary, new)
                        self.spares.put(new)
                    self._ledger.add(shard, -found.st_size, -1)
                return Removal(found.st_size, None, new is not None)
        except FileNotFoundError:
            return Removal(0, None)

    def drop_spares(self) -> None:
        """Delete all spare files."""
        for name in self.spares.take_all():
            self._discard(name)
            self._ledger.drop_spares(self._form.row_bytes)

    def put_away(self, key: BlockKey, block_id: int, seen: os.stat_result | None = None) -> bool:
        """Quarantine what has this key's name, if it is still what was `seen`."""
        leaf, shard = self._form.namespace.leaf(block_id), naming.shard_of(block_id)
        name, row_bytes = naming.block_name(key), self._form.row_bytes
        return self._quarantine.put(leaf, name, shard, row_bytes, seen)

    # Blocks that have their name but may not be counted; their reservation stands for them.

    def debts(self) -> list[int]:
        """Shards to be counted, one for each such block."""
        return list(self._owed)

    def pay(self, shard: int) -> None:
        """A shard has been counted: the reservation of one block of it ends."""
        self._owed.remove(shard)
        self._ledger.release(self._form.row_bytes)

    # Pieces of these.

    def _still_named(self, key: BlockKey, block_id: int, seen: os.stat_result) -> bool:
        """Whether a file that was read has its name still: then it was whole all the time."""
        flags = os.O_PATH | os.O_NOFOLLOW
        fd = self._io.open(self._place.root, self._path(key, block_id), flags)
        try:
            now = self._io.fstat(fd)
        finally:
            self._io.close(fd)
        return (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)

    def _path(self, key: BlockKey, block_id: int) -> str:
        return f"{self._form.namespace.leaf(block_id)}/{naming.block_name(key)}"

    def _open_leaf(self, block_id: int) -> int:
        root, path = self._place.root, self._form.namespace.leaf(block_id)
        with contextlib.suppress(FileNotFoundError):
            return self._io.open(root, path, DIRECTORY)
        namespace, _, shard = path.partition("/")
        self._place.make_directory(root, namespace)
        with self._place.directory(namespace) as parent:
            self._place.make_directory(parent, shard)
            return self._io.open(parent, shard, DIRECTORY)

    def _settle(self, leaf: int, name: str, key: BlockKey, block_id: int) -> bool:
        """Whether the right block is there already; something wrong in its place is put away.

        "Right" costs no reading of the payload as long as the file's mtime is the creation time in
        its header, which is what this tier sets: nobody has written to it since. Damage that comes
        about without writing is found by the checksum when the block is loaded.
        """
        try:
            fd = self._open_to_read(leaf, name)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self.put_away(key, block_id)
            return False
        try:
            found = self._io.fstat(fd)
            if self._wrong_file(found) is None and self._right_block(fd, found, key):
                return True
        finally:
            self._io.close(fd)
        self.put_away(key, block_id, found)
        return False

    def _right_block(self, fd: int, found: os.stat_result, key: BlockKey) -> bool:
        page = self._pages.get()
        try:
            if self._io.preadv(fd, [page.data], 0) != page.size:
                return False
            if found.st_mtime_ns == _file_time_ns(block.read_header(page)):
                return block.check_row(page, key, self._form.fingerprint) is None
            row = self._rows.get()
            return block.check(row[: read_row(self._io, fd, row)], *self._expected(key)) is None
        except OSError as error:
            # A sector that cannot be read is as good as wrong: the block is written elsewhere.
            if error.errno == errno.EIO:
                return False
            raise

    def _write(
        self,
        leaf: int,
        name: str,
        block_id: int,
        row: Bytes,
        used_ns: int,
        make_room: Callable[[int], Room],
    ) -> None:
        """Raises FileExistsError if another writer's file has the name by now."""
        spare = self._obtain(make_room)
        counted = True
        try:
            created_ns = _file_time_ns(block.read_header(row))
            block.seal(row, row.size - block.HEADER_BYTES)
            temporary = self._write_temporary(spare, row, used_ns, created_ns)
            counted = self._publish(temporary, leaf, name, naming.shard_of(block_id))
        finally:
            if counted:
                self._ledger.release(row.size)

    def _obtain(self, make_room: Callable[[int], Room]) -> str | None:
        """Reserve space for a block: the name of a spare file that has it, or None."""
        nbytes, now_s = self._form.row_bytes, time.monotonic()
        end_s = now_s + _ROOM_TIMEOUT_S
        # Where the last one found no room, this one need not ask: it evicts at once.
        full = now_s < self._full_until_s
        while True:
            spare = self.spares.take()
            if spare is not None:
                self._ledger.use_spare(nbytes)
                return spare
            short = nbytes if full else self._ledger.reserve(nbytes, self._limit_bytes)
            if short <= 0:
                return None
            room = make_room(short)
            self._full_until_s = time.monotonic() + _FULL_S if room is Room.MADE else 0.0
            full = full and room is Room.MADE
            if room is Room.NONE or time.monotonic() > end_s:
                break
            if room is Room.LATER:
                time.sleep(_ROOM_STEP_S)
        totals = self._ledger.cached
        limit_bytes = self._limit_bytes(totals)
        raise NoRoom(
            f"{self._place.path}: {totals.all_bytes} of {limit_bytes} bytes are used, and nothing "
            "older can be evicted"
        )

    def _write_temporary(self, spare: str | None, row: Bytes, used_ns: int, created_ns: int) -> str:
        """Write a row to a spare or a new file, and flush it as it has to be; its name."""
        flags = os.O_WRONLY | (os.O_DIRECT if self.direct.on else 0)
        name = spare or self._place.new_name()
        try:
            fd = self._io.open(
                self._place.temporary, name, flags if spare else flags | os.O_CREAT | os.O_EXCL
            )
            try:
                write_row(self._io, fd, row)
                self._io.utime(fd, used_ns, created_ns)
                if self._form.durability == "data":
                    self._io.fdatasync(fd)
                elif self._form.durability == "full":
                    self._io.fsync(fd)
            finally:
                self._io.close(fd)
        except BaseException:
            self._discard(name)
            raise
        return name

    def _publish(self, temporary: str, leaf: int, name: str, shard: int) -> bool:
        """Give a finished file its name and count it. False: it may not have been counted."""
        named = False
        try:
            with self._ledger.shard(shard):
                self._io.publish(self._place.temporary, temporary, leaf, name)
                named = True
                self._ledger.add(shard, self._form.row_bytes, 1)
        except OSError:
            if not named:
                self._discard(temporary)
                raise
            # It is there but not in the count. Its reservation counts for it until it is.
            self._owed.append(shard)
            return False
        return True

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            self._io.unlink(self._place.temporary, temporary)

    def _open_to_read(self, directory: int, name: str) -> int:
        # O_NONBLOCK: whoever opens a FIFO that was put in a block's place must not wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | (os.O_DIRECT if self.direct.on else 0)
        if self._may_skip_atime:
            # The atime is what this tier says of the use; the kernel's own would be written as often.
            try:
                return self._io.open(directory, name, flags | os.O_NOATIME)
            except PermissionError:
                self._may_skip_atime = False  # A file of another user.
        return self._io.open(directory, name, flags)

    def _wrong_file(self, found: os.stat_result) -> str | None:
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_size != self._form.row_bytes:
            return f"is {found.st_size} bytes long, expected {self._form.row_bytes}"
        return None

    def _wrong_bytes(self, data: Bytes, key: BlockKey) -> str | None:
        if self._form.verify:
            return block.check(data, *self._expected(key))
        if data.size != self._form.row_bytes:
            return f"is {data.size} bytes long, expected {self._form.row_bytes}: truncated"
        return block.check_row(data, key, self._form.fingerprint)

    def _expected(self, key: BlockKey) -> tuple[BlockKey, bytes, int]:
        return key, self._form.fingerprint, self._form.row_bytes - block.HEADER_BYTES


def _file_time_ns(header: block.BlockHeader) -> int:
    """The mtime of a file that nobody has written to since its block was made."""
    return min(header.created_ns, 2**62)
