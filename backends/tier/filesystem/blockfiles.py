"""One block, one file: written whole or not at all, read and checked, found, taken away.

Blocking code for I/O threads. Methods raise OSError.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from backends import block
from backends.block import BlockKey
from backends.tier.filesystem import naming
from backends.tier.filesystem.io import ALIGNMENT_BYTES, DIRECTORY, Bytes
from backends.tier.filesystem.leaves import Leaves
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


class Victim(NamedTuple):
    """A block to be evicted, unless it was used later than that."""

    namespace: str
    shard: int
    name: str
    unless_used_after_ns: int


class Removal(NamedTuple):
    """Bytes freed. `used_ns`: it stays, because it was used then; None: it is gone.

    `spare`: its file is a spare now.
    """

    freed_bytes: int
    used_ns: int | None
    spare: bool = False

    def stays(self, victim: Victim) -> Removal:
        return Removal(0, victim.unless_used_after_ns)


class Unpublished(NamedTuple):
    """A finished file that nobody sees: its name in the writer's own directory."""

    key: BlockKey
    block_id: int
    temporary: str


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
        self._making_room = threading.Lock()
        self._leaves = Leaves(place, form.namespace.name)
        self.direct = Direct(False, "not opened yet")

    def settle(self, key: BlockKey, block_id: int) -> bool:
        """Whether the right block is there already; something wrong in its place is put away.

        "Right" costs no reading of the payload as long as the file's mtime is the creation time in
        its header, which is what this tier sets: nobody has written to it since. Damage that comes
        about without writing is found by the checksum when the block is loaded.
        """
        try:
            fd = self._open_to_read(self._place.root, self._path(key, block_id))
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

    def write(
        self,
        key: BlockKey,
        block_id: int,
        row: Bytes,
        used_ns: int,
        make_room: Callable[[int], Room],
    ) -> Unpublished:
        """Write a row whose header is COMPLETE to a file that nobody sees, and seal it.

        `make_room(n)` tries to evict n bytes. Raises NoRoom, and what `make_room` raises.
        """
        spare = self._obtain(make_room)
        try:
            created_ns = _file_time_ns(block.read_header(row))
            block.seal(row, row.size - block.HEADER_BYTES)
            return Unpublished(key, block_id, self._write_file(spare, row, used_ns, created_ns))
        except BaseException:
            self._ledger.release(row.size)
            raise

    def publish(self, batch: Sequence[Unpublished]) -> list[OSError | None]:
        """Give files their names, each if nobody has it: what went wrong, None where nothing did.

        FileExistsError: another writer was first. What has not got its name is deleted.
        """
        results: list[OSError | None] = [None] * len(batch)
        named = [False] * len(batch)
        counted = True
        try:
            with self._ledger.counting() as counts:
                for i, file in enumerate(batch):
                    try:
                        self._give_name(file)
                        named[i] = True
                        counts.add(naming.shard_of(file.block_id), self._form.row_bytes, 1)
                    except OSError as error:
                        results[i] = error
        except OSError as error:
            counted = False
            for i, ok in enumerate(named):
                if not ok and results[i] is None:
                    results[i] = error
        released = 0
        for file, ok in zip(batch, named, strict=True):
            if ok and not counted:
                # It is there but not in the count. Its reservation counts for it until it is.
                self._owed.append(naming.shard_of(file.block_id))
                continue
            released += self._form.row_bytes
            if not ok:
                self._discard(file.temporary)
        if released:
            self._ledger.release(released)
        if self._form.durability == "full":
            self._flush_names(batch, results)
        return results

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
        self, victims: Sequence[Victim], *, spare: bool
    ) -> tuple[list[Removal], OSError | None]:
        """Evict blocks, of any namespace, unless somebody used them later.

        `spare`: keep their files to be written over, where they can be; spares are counted for them
        already. Where something fails, the rest stays, and what failed is given too.
        """
        looks = [self._look(victim) for victim in victims]
        removals = [
            look if look.used_ns is not None or not look.freed_bytes else look.stays(victim)
            for look, victim in zip(looks, victims, strict=True)
        ]
        try:
            with self._ledger.counting() as counts:
                for i, (look, victim) in enumerate(zip(looks, victims, strict=True)):
                    if look.used_ns is not None or not look.freed_bytes:
                        continue
                    removals[i] = self._take_name(victim, look, spare and look.spare)
                    if removals[i].freed_bytes:
                        counts.add(victim.shard, -look.freed_bytes, -1)
        except OSError as error:
            return removals, error
        return removals, None

    def _look(self, victim: Victim) -> Removal:
        """What removing it would free. `spare`: its file can be written over."""
        try:
            directory = self._open_of(victim)
            try:
                found = self._io.stat(directory, victim.name)
            finally:
                self._close_of(victim, directory)
        except FileNotFoundError:
            return Removal(0, None)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # It can be neither judged nor had: others go before it.
            return Removal(0, time.time_ns())
        if found.st_atime_ns > victim.unless_used_after_ns:
            return Removal(0, found.st_atime_ns)
        # Another name of the same file is somebody's copy: it is not to be written over.
        fits = found.st_size == self._form.row_bytes and found.st_nlink == 1
        return Removal(found.st_size, None, fits and stat.S_ISREG(found.st_mode))

    def _take_name(self, victim: Victim, found: Removal, spare: bool) -> Removal:
        try:
            directory = self._open_of(victim)
            try:
                if spare:
                    new = self._place.new_name()
                    self._io.replace(directory, victim.name, self._place.temporary, new)
                    self.spares.put(new)
                else:
                    self._io.unlink(directory, victim.name)
            finally:
                self._close_of(victim, directory)
        except FileNotFoundError:
            return Removal(0, None)
        return found._replace(spare=spare)

    def _open_of(self, victim: Victim) -> int:
        if victim.namespace == self._form.namespace.name:
            return self._leaves.take(victim.shard)
        path = f"{victim.namespace}/{victim.shard:02x}"
        return self._io.open(self._place.root, path, DIRECTORY)

    def _close_of(self, victim: Victim, directory: int) -> None:
        if victim.namespace == self._form.namespace.name:
            self._leaves.give_back(victim.shard, directory)
        else:
            self._io.close(directory)

    def close(self) -> None:
        """Close the directories that were kept open. May be called again."""
        self._leaves.close()

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

    def _give_name(self, file: Unpublished) -> None:
        shard, name = naming.shard_of(file.block_id), naming.block_name(file.key)
        for removed in (False, True):
            if removed:
                self._leaves.renew(shard)
            leaf = self._leaves.take(shard)
            try:
                self._io.publish(self._place.temporary, file.temporary, leaf, name)
                return
            except FileNotFoundError:
                if removed:
                    raise
            finally:
                self._leaves.give_back(shard, leaf)

    def _flush_names(self, batch: Sequence[Unpublished], results: list[OSError | None]) -> None:
        for shard in {naming.shard_of(file.block_id) for file in batch}:
            try:
                with self._leaves.opened(shard) as leaf:
                    self._place.flush_directory(leaf)
            except OSError as error:
                for i, file in enumerate(batch):
                    if naming.shard_of(file.block_id) == shard and results[i] is None:
                        results[i] = error

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

    def _obtain(self, make_room: Callable[[int], Room]) -> str | None:
        """Reserve space for a block: the name of a spare file that has it, or None."""
        if (spare := self._take_spare()) is not None:
            return spare
        nbytes, now_s = self._form.row_bytes, time.monotonic()
        # Where there was no room a moment ago there is no use in asking.
        if now_s >= self._full_until_s and self._ledger.reserve(nbytes, self._limit_bytes) <= 0:
            return None
        while True:
            # One thread makes room for all that wait here.
            with self._making_room:
                if (spare := self._take_spare()) is not None:
                    return spare
                room = make_room(nbytes)
                if self.spares.most:
                    until_s = time.monotonic() + _FULL_S
                    self._full_until_s = until_s if room is Room.MADE else 0.0
                if (spare := self._take_spare()) is not None:
                    return spare
            if self._ledger.reserve(nbytes, self._limit_bytes) <= 0:
                return None
            if room is Room.NONE or time.monotonic() > now_s + _ROOM_TIMEOUT_S:
                break
            if room is Room.LATER:
                time.sleep(_ROOM_STEP_S)
        totals = self._ledger.cached
        limit_bytes = self._limit_bytes(totals)
        raise NoRoom(
            f"{self._place.path}: {totals.all_bytes} of {limit_bytes} bytes are used, and nothing "
            "older can be evicted"
        )

    def _take_spare(self) -> str | None:
        spare = self.spares.take()
        if spare is not None:
            self._ledger.use_spare(self._form.row_bytes)
        return spare

    def _write_file(self, spare: str | None, row: Bytes, used_ns: int, created_ns: int) -> str:
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

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            self._io.unlink(self._place.temporary, temporary)

    def _open_to_read(self, directory: int, name: str) -> int:
        # O_NONBLOCK: whoever opens a FIFO that was put in a block's place must not wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        flags |= os.O_DIRECT if self.direct.on else 0
        if self._may_skip_atime:
            # The atime says what this tier says of its use, and not when the kernel saw it read.
            try:
                return self._io.open(directory, name, flags | os.O_NOATIME)
            except PermissionError:
                self._may_skip_atime = False  # A file of another user.
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct.on:
                    self._refuse_what_is_no_file(directory, name)
                raise
        return self._io.open(directory, name, flags)

    def _refuse_what_is_no_file(self, directory: int, name: str) -> None:
        """A directory cannot be opened with O_DIRECT, and the error does not say that it is one."""
        fd = self._io.open(directory, name, os.O_PATH | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(self._io.fstat(fd).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        finally:
            self._io.close(fd)

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
