"""One block, one file: written whole or not at all, read and checked, found, put away.

Blocking code for I/O threads. Methods raise OSError.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from backends import block
from backends.block import BlockKey
from backends.tier.base import Bytes
from backends.tier.filesystem import naming
from backends.tier.filesystem.bounce import Bounce
from backends.tier.filesystem.form import BlockFormat
from backends.tier.filesystem.io import FileRead, FileToRead, FileWrite
from backends.tier.filesystem.leaves import Leaves
from backends.tier.filesystem.ledger import Ledger
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.probe import Direct
from backends.tier.filesystem.quarantine import Quarantine, Seen
from backends.tier.filesystem.room import Space
from backends.tier.filesystem.transfer import ALIGNMENT_BYTES, Scratch, read_row

# What open gives for a name that is no regular file: a link, a directory, a socket, a device.
_NO_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
_Opened = TypeVar("_Opened")


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


class Wanted(NamedTuple):
    """A block that is to be read into a row, uint8 [row_bytes]; the times as in `FileToRead`."""

    key: BlockKey
    block_id: int
    row: Bytes
    used_ns: int
    before_ns: int


class Draft(NamedTuple):
    """A block's file before it is written."""

    file: Unpublished
    content: FileWrite


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
        bounce: Bounce,
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
        self._bounce = bounce
        self._may_skip_atime = True
        self.direct = Direct(False, "not opened yet")

    def settle(self, key: BlockKey, block_id: int) -> bool:
        """Whether the right block is there already; something wrong in its place is put away.

        "Right" costs no reading of the payload as long as the file's mtime is the creation time in
        its header, which is what this tier sets: nobody has written to it since. Damage that comes
        about without writing is found by the checksum when the block is loaded.
        """
        try:
            fd = self._open_to_read(self._path(key, block_id))
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

    def draft(
        self, key: BlockKey, block_id: int, row: Bytes, used_ns: int, spare: str | None
    ) -> Draft:
        """What makes a file that nobody sees of a row whose header is COMPLETE.

        `spare` is what was obtained: the name of a spare file, or None for a new one.
        """
        name = spare or self._place.new_name()
        try:
            created_ns = _file_time_ns(row)
        except BaseException:
            self._space.discard(name)
            raise
        flags = os.O_WRONLY | (os.O_DIRECT if self.direct.on else 0)
        flags |= 0 if spare else os.O_CREAT | os.O_EXCL
        return Draft(
            Unpublished(key, block_id, name), FileWrite(name, flags, row, used_ns, created_ns)
        )

    def write(self, drafts: Sequence[Draft]) -> list[OSError | None]:
        """Seal blocks, write files, and flush them as they have to be; what went wrong with each.

        What could not be written is deleted.
        """
        contents = [draft.content for draft in drafts]
        way, nbytes = self._bounce.stores, 0
        buffer = self._bounce.take(way) if self.direct.on else None
        began_s = time.perf_counter()
        try:
            results = self._io.write_files(
                self._place.temporary, contents, self._form.durability, buffer
            )
            if not any(results):
                nbytes = len(drafts) * self._form.row_bytes
        except BaseException:
            for draft in drafts:
                self._space.discard(draft.file.temporary)
            raise
        finally:
            self._bounce.give_back(buffer, way, nbytes, time.perf_counter() - began_s)
        for draft, wrong in zip(drafts, results, strict=True):
            if wrong is not None:
                self._space.discard(draft.file.temporary)
        return results

    def publish(self, batch: Sequence[Unpublished]) -> list[OSError | None]:
        """Give files their names, each if nobody has it: what went wrong, None where nothing did.

        FileExistsError: another writer was first. What has not got its name is deleted.
        """
        results: list[OSError | None] = [None] * len(batch)
        named = [False] * len(batch)
        counted = True
        try:
            with self._ledger.counting() as counts:
                results = self._give_names(batch)
                named = [result is None for result in results]
                shards = [naming.shard_of(f.block_id) for f in itertools.compress(batch, named)]
                counts.add_all(shards, [self._form.row_bytes] * len(shards), 1)
                counts.released_bytes = len(shards) * self._form.row_bytes
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

    def load_all(self, wanted: Sequence[Wanted]) -> list[int | None]:
        """`load` each where nothing is the matter; None: what the matter is has to be found out."""
        files = [
            FileToRead(self._path(one.key, one.block_id), one.row, one.used_ns, one.before_ns)
            for one in wanted
        ]
        return [
            None
            if isinstance(found, OSError)
            or found.error is not None
            or self._wrong_read(found, one.key, one.block_id, one.row) is not None
            else found.st_atime_ns
            for one, found in zip(wanted, self._read_all(files, self._flags()), strict=True)
        ]

    def load(self, wanted: Wanted) -> int:
        """Read a block into a row and check it. Raises BlockWrong.

        Shows others that it was used at `used_ns`, if what they were shown last is older than
        `before_ns`. Gives the time that others see now.
        """
        key, block_id, row, used_ns, before_ns = wanted
        path = self._path(key, block_id)
        found: FileRead | None = None
        try:
            found = self._read(FileToRead(path, row, used_ns, before_ns))
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            wrong = "is not a file"
        else:
            if found.error is not None:
                raise found.error
            problem = self._wrong_read(found, key, block_id, row)
            if problem is None:
                return found.st_atime_ns
            wrong = problem
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

    def put_away(self, key: BlockKey, block_id: int, seen: Seen | None = None) -> bool:
        """Quarantine what has this key's name, if it is still what was `seen`."""
        leaf, shard = self._form.namespace.leaf(block_id), naming.shard_of(block_id)
        name, row_bytes = naming.block_name(key), self._form.row_bytes
        return self._quarantine.put(leaf, name, shard, row_bytes, seen)

    # Pieces of these.

    def _path(self, key: BlockKey, block_id: int) -> str:
        return f"{self._form.namespace.leaf(block_id)}/{naming.block_name(key)}"

    def _read(self, file: FileToRead) -> FileRead:
        def read(flags: int) -> FileRead:
            [found] = self._read_all([file], flags)
            if isinstance(found, OSError):
                raise found
            return found

        return self._opened(file.path, read)

    def _read_all(self, files: Sequence[FileToRead], flags: int) -> list[FileRead | OSError]:
        way, nbytes = self._bounce.loads, 0
        buffer = self._bounce.take(way) if self.direct.on else None
        began_s = time.perf_counter()
        try:
            read = self._io.read_files(
                self._place.root, flags, files, buffer, summed=self._form.verify
            )
            nbytes = sum(found.got for found in read if isinstance(found, FileRead))
            return read
        finally:
            self._bounce.give_back(buffer, way, nbytes, time.perf_counter() - began_s)

    def _wrong_read(self, found: FileRead, key: BlockKey, block_id: int, row: Bytes) -> str | None:
        """Why what was read into a row is not the block."""
        wrong = self._wrong_file(found) or self._wrong_bytes(row[: found.got], key, found)
        if wrong is None and not self._form.verify:
            # Without a checksum, only this tells that it was not written over meanwhile.
            wrong = self._wrong_name(key, block_id, found)
        return wrong

    def _wrong_name(self, key: BlockKey, block_id: int, seen: FileRead) -> str | None:
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

    def _give_names(self, batch: Sequence[Unpublished]) -> list[OSError | None]:
        """Rename each into its directory; what went wrong with it."""
        shards = [naming.shard_of(file.block_id) for file in batch]
        leaves: list[tuple[int, int]] = []
        try:
            try:
                for shard in shards:
                    leaves.append((shard, self._leaves.take(shard)))
            except OSError:
                # One directory's trouble is that of its own files.
                return [self._give_name(file) for file in batch]
            names = [
                (file.temporary, leaf, naming.block_name(file.key))
                for file, (_, leaf) in zip(batch, leaves, strict=True)
            ]
            results = self._io.publish_all(self._place.temporary, names)
        finally:
            for shard, leaf in leaves:
                self._leaves.give_back(shard, leaf)
        return [
            self._give_name(file) if isinstance(result, FileNotFoundError) else result
            for file, result in zip(batch, results, strict=True)
        ]

    def _give_name(self, file: Unpublished) -> OSError | None:
        """As `_give_names`, and makes the directory anew where it has gone."""
        shard, name = naming.shard_of(file.block_id), naming.block_name(file.key)
        try:
            for removed in (False, True):
                if removed:
                    self._leaves.renew(shard)
                leaf = self._leaves.take(shard)
                try:
                    self._io.publish(self._place.temporary, file.temporary, leaf, name)
                    return None
                except FileNotFoundError:
                    if removed:
                        raise
                finally:
                    self._leaves.give_back(shard, leaf)
        except OSError as error:
            return error
        return None

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
            if found.st_mtime_ns == _file_time_ns(page):
                return block.check_row(page, key, self._form.fingerprint) is None
            row = self._rows.get()
            return block.check(row[: read_row(self._io, fd, row)], *self._expected(key)) is None
        except OSError as error:
            # A sector that cannot be read is as good as wrong: the block is written elsewhere.
            if error.errno == errno.EIO:
                return False
            raise

    def _open_to_read(self, path: str) -> int:
        return self._opened(path, lambda flags: self._io.open(self._place.root, path, flags))

    def _opened(self, path: str, opens: Callable[[int], _Opened]) -> _Opened:
        """What `opens` gives, which is called with the flags to read a block's file."""
        if self._may_skip_atime:
            try:
                return opens(self._flags())
            except PermissionError:
                self._may_skip_atime = False  # A file of another user.
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct.on:
                    self._refuse_what_is_no_file(self._place.root, path)
                raise
        return opens(self._flags())

    def _flags(self) -> int:
        """To open a block with that is to be read."""
        # O_NONBLOCK: whoever opens a FIFO that was put in a block's place must not wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        flags |= os.O_DIRECT if self.direct.on else 0
        # The atime says what this tier says of its use, and not when the kernel saw it read.
        return flags | (os.O_NOATIME if self._may_skip_atime else 0)

    def _refuse_what_is_no_file(self, directory: int, name: str) -> None:
        """A directory cannot be opened with O_DIRECT, and the error does not say that it is one."""
        fd = self._io.open(directory, name, os.O_PATH | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(self._io.fstat(fd).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        finally:
            self._io.close(fd)

    def _wrong_file(self, found: FileRead | os.stat_result) -> str | None:
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_size != self._form.row_bytes:
            return f"is {found.st_size} bytes long, expected {self._form.row_bytes}"
        return None

    def _wrong_bytes(self, data: Bytes, key: BlockKey, found: FileRead) -> str | None:
        if self._form.verify:
            return block.check(data, *self._expected(key), found.payload_sum)
        if data.size != self._form.row_bytes:
            return f"is {data.size} bytes long, expected {self._form.row_bytes}: truncated"
        return block.check_row(data, key, self._form.fingerprint)

    def _expected(self, key: BlockKey) -> tuple[BlockKey, bytes, int]:
        return key, self._form.fingerprint, self._form.row_bytes - block.HEADER_BYTES


def _file_time_ns(header: Bytes) -> int:
    """The mtime of a file that nobody has written to since its block was made."""
    return min(block.created_ns(header), 2**62)
