"""One block, one file: written whole or not at all, read and checked, found, put away.

Blocking code for I/O threads. Methods raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from backends import block
from backends.block import BlockKey
from backends.tier.filesystem import naming
from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import ALIGNMENT_BYTES, Bytes
from backends.tier.filesystem.leaves import Leaves
from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.probe import Direct
from backends.tier.filesystem.quarantine import Quarantine
from backends.tier.filesystem.room import Room, Space
from backends.tier.filesystem.transfer import Scratch, read_row, write_row

# What open gives for a name that is no regular file: a link, a directory, a socket, a device.
_NO_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)


class BlockWrong(Exception):
    """What stands under a block's name is not that block. `moved`: it is out of the way now."""

    def __init__(self, why: str, moved: bool) -> None:
        super().__init__(why)
        self.moved = moved


class Unpublished(NamedTuple):
    """A finished file that nobody sees: its name in the writer's own directory."""

    key: BlockKey
    block_id: int
    temporary: str


class BlockFiles:
    """The blocks of one namespace on one path. `direct` may change when a path is opened anew."""

    def __init__(
        self,
        place: Place,
        ledger: Ledger,
        quarantine: Quarantine,
        form: BlockFormat,
        leaves: Leaves,
        space: Space,
    ) -> None:
        self._place = place
        self._io = place.io
        self._ledger = ledger
        self._quarantine = quarantine
        self._form = form
        self._pages = Scratch(ALIGNMENT_BYTES)
        self._rows = Scratch(form.row_bytes)
        self._leaves = leaves
        self._space = space
        self._may_skip_atime = True
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

        `make_room(n)` tries to evict n bytes. Raises NoRoom, NotCounted, and what `make_room` does.
        """
        spare = self._space.obtain(make_room)
        name = spare or self._place.new_name()
        try:
            created_ns = _file_time_ns(block.read_header(row))
            block.seal(row, row.size - block.HEADER_BYTES)
            self._write_file(name, spare is None, row, used_ns, created_ns)
        except BaseException:
            self._space.discard(name)
            raise
        return Unpublished(key, block_id, name)

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
                        counts.released_bytes += self._form.row_bytes
                    except OSError as error:
                        results[i] = error
        except OSError as error:
            counted = False
            for i, ok in enumerate(named):
                if not ok and results[i] is None:
                    results[i] = error
        owed = 0
        for file, ok in zip(batch, named, strict=True):
            if not ok:
                self._space.discard(file.temporary)
            elif not counted:
                # It is there but not in the count. Its reservation counts for it until it is.
                owed += 1
        if owed:
            self._space.owe(owed)
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
        found: os.stat_result | None = None
        try:
            fd = self._open_to_read(self._place.root, self._path(key, block_id))
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            wrong = "is not a file"
        else:
            try:
                found = self._io.fstat(fd)
                problem = self._read(fd, found, key, block_id, row)
                if problem is None:
                    return self._show_use(fd, found, used_ns, touch_before_ns)
                wrong = problem
            finally:
                self._io.close(fd)
        try:
            moved = self.put_away(key, block_id, found)
        except OSError:
            raise BlockWrong(wrong, False) from None
        if not moved:
            # It lost its name on the way, so it may have been written over: no damage.
            raise FileNotFoundError(errno.ENOENT, "it was evicted while it was read")
        raise BlockWrong(wrong, True)

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

    def put_away(self, key: BlockKey, block_id: int, seen: os.stat_result | None = None) -> bool:
        """Quarantine what has this key's name, if it is still what was `seen`."""
        leaf, shard = self._form.namespace.leaf(block_id), naming.shard_of(block_id)
        name, row_bytes = naming.block_name(key), self._form.row_bytes
        return self._quarantine.put(leaf, name, shard, row_bytes, seen)

    # Pieces of these.

    def _path(self, key: BlockKey, block_id: int) -> str:
        return f"{self._form.namespace.leaf(block_id)}/{naming.block_name(key)}"

    def _read(
        self, fd: int, found: os.stat_result, key: BlockKey, block_id: int, row: Bytes
    ) -> str | None:
        """Fill a row; why what was read is not the block."""
        wrong = self._wrong_file(found)
        if wrong is None:
            wrong = self._wrong_bytes(row[: read_row(self._io, fd, row)], key)
        if wrong is None and not self._form.verify:
            # Without a checksum, only this tells that it was not written over meanwhile.
            wrong = self._wrong_name(key, block_id, found)
        return wrong

    def _wrong_name(self, key: BlockKey, block_id: int, seen: os.stat_result) -> str | None:
        """Whether a file that was read has lost its name meanwhile."""
        flags = os.O_PATH | os.O_NOFOLLOW
        fd = self._io.open(self._place.root, self._path(key, block_id), flags)
        try:
            now = self._io.fstat(fd)
        finally:
            self._io.close(fd)
        if (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino):
            return None
        return "has lost its name while it was read"

    def _show_use(self, fd: int, found: os.stat_result, used_ns: int, touch_before_ns: int) -> int:
        if found.st_atime_ns < touch_before_ns:
            # A read-only disk is no reason to miss.
            with contextlib.suppress(OSError):
                self._io.utime(fd, used_ns, found.st_mtime_ns)
                return used_ns
        return found.st_atime_ns

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

    def _write_file(self, name: str, new: bool, row: Bytes, used_ns: int, created_ns: int) -> None:
        """Write a row to a spare or a new file, and flush it as it has to be."""
        flags = os.O_WRONLY | (os.O_DIRECT if self.direct.on else 0)
        flags |= os.O_CREAT | os.O_EXCL if new else 0
        fd = self._io.open(self._place.temporary, name, flags)
        try:
            write_row(self._io, fd, row)
            self._io.utime(fd, used_ns, created_ns)
            if self._form.durability == "data":
                self._io.fdatasync(fd)
            elif self._form.durability == "full":
                self._io.fsync(fd)
        finally:
            self._io.finish(fd)

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
