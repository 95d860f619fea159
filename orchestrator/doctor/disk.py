"""One directory of the filesystem tier: can blocks stand there, and how fast do they come and go?

Measured as the tier does it, with its own calls, in a writer's directory of its own: whatever a
doctor that was killed leaves there is swept by the next one, and by every tier that is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from backends.tier.filesystem import naming
from backends.tier.filesystem.io import OsIo, words
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.probe import Direct, probe_direct
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.sweep import sweep
from backends.tier.filesystem.writer import this_writer
from backends.units import format_size
from orchestrator.doctor.blockfiles import BlockFiles
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.drive import alternate, rates
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.places import MEMORY_FILESYSTEMS, Directory, filesystem_of
from orchestrator.doctor.result import PathFigures, Transfers
from orchestrator.doctor.sample import Sample

_KEY: Final = "tiers.stack.fs"
_MAKE_ROOM: Final = f"make room on the disk, or name another directory in {_KEY}.paths"
_MOST_BYTES: Final = 512 << 20
_MOST_CACHED_BYTES: Final = 128 << 20
"""Where blocks pass through the page cache, they have to be flushed before they are read cold."""
_FSYNCS: Final = 5
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_DIRECTORY: Final = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def measure_path(
    path: str,
    settings: FilesystemSettings,
    sample: Sample,
    notes: Notes,
    stop: Stop,
    seconds: float,
) -> PathFigures:
    """Everything about one path; reading and writing take about `seconds` each. What is wrong with
    it stands in `notes`, in checks `fs.*`."""
    disk = _Disk(path, settings, sample, notes, stop, seconds)
    try:
        notes.doing("looking at the directory")
        # The tier is given links as well.
        with Directory(os.path.realpath(path)) as directory:
            return disk.measure(directory)
    except OSError as error:
        disk.explain(error)
        return PathFigures(path=path, o_direct=False)


@dataclass(frozen=True, slots=True)
class _Room:
    free_bytes: int
    usable_bytes: int


class _Disk:
    def __init__(
        self,
        path: str,
        settings: FilesystemSettings,
        sample: Sample,
        notes: Notes,
        stop: Stop,
        seconds: float,
    ) -> None:
        self._path = path
        self._settings = settings
        self._sample = sample
        self._notes = notes
        self._stop = stop
        self._seconds = seconds

    def measure(self, directory: Directory) -> PathFigures:
        notes = self._notes
        notes.ok("fs.directory", "can be made" if directory.made else "is there")
        kind = filesystem_of(directory.path)
        self._check_medium(kind)
        notes.doing("sweeping what dead writers left")
        swept = sweep([directory.path])
        removed = f"removed {swept} unfinished files of dead writers"
        notes.ok("fs.leftovers", removed if swept else "no unfinished file of a dead writer")
        room = self._check_room(directory.path)
        if room is None:
            return PathFigures(path=self._path, o_direct=False)
        notes.doing("making a writer's directory")
        with _open_place(directory.path) as place:
            notes.doing("trying O_DIRECT")
            direct = probe_direct(place.io, place.temporary, self._settings.direct)
            self._check_direct(direct, kind)
            return self._transfers(place, direct, room)

    def explain(self, error: OSError) -> None:
        """Turn what ended the measurement into a check."""
        notes, what = self._notes, words(error)
        found = f"{what} while {notes.step}"
        if error.errno in _READ_ONLY:
            name, expected = "fs.directory", "a directory that this user may write to"
            fix = f"give this user the rights, mount it for writing, or change {_KEY}.paths"
        elif error.errno in _NO_DIRECTORY:
            name, expected = "fs.directory", "a directory"
            fix = f"name a directory in {_KEY}.paths"
        elif error.errno in _FULL:
            name, expected, fix = "fs.space", "room for blocks", _MAKE_ROOM
        else:
            name, expected = "fs.io", "a disk that writes and reads"
            fix = (
                "look at the disk and at the kernel's log (dmesg), or leave the path out of "
                f"{_KEY}.paths"
            )
        notes.withdraw(name)
        notes.fail(name, found, expected, fix)

    def _check_medium(self, kind: str) -> None:
        if kind in MEMORY_FILESYSTEMS:
            self._notes.warn(
                "fs.medium",
                f"{kind}, which is this machine's memory",
                "a disk: blocks here take memory from the regions, and go with a restart",
                f"name a directory on a disk in {_KEY}.paths, or make region.size larger instead",
            )
        else:
            self._notes.ok("fs.medium", kind or "not told by the kernel")

    def _check_room(self, directory: str) -> _Room | None:
        """How much may be used now; None where the tier could not store one block."""
        settings, block_bytes, notes = self._settings, self._sample.block_bytes, self._notes
        notes.doing("asking for free space")
        disk = os.statvfs(directory)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if not total:
            notes.fail(
                "fs.space",
                "this filesystem does not tell its size",
                "free space that can be asked for: the tier takes this one for full",
                f"name a directory of another filesystem in {_KEY}.paths",
            )
            return None
        if disk.f_files and not disk.f_favail:
            notes.fail("fs.space", "no inode is free: no file can be made", "some", _MAKE_ROOM)
            return None
        usable = free - settings.free_reserve_bytes
        share = settings.capacity // len(settings.paths)
        has_blocks = os.path.exists(os.path.join(directory, naming.LEDGER))
        told = f"{format_size(free)} free of {format_size(total)}"
        reserve = f"{_KEY}.free_reserve_bytes={format_size(settings.free_reserve_bytes)}"
        if usable < block_bytes:
            notes.fail(
                "fs.space",
                f"the disk is full: {told}",
                f"room for a block of {format_size(block_bytes)} beside {reserve.replace(' ', '')},"
                " which is left to others",
                _MAKE_ROOM,
            )
            return None
        if usable < share and not has_blocks:
            fits = max(usable, block_bytes) * len(settings.paths)
            notes.warn(
                "fs.space",
                told,
                f"{format_size(share)} for blocks, this path's share of {_KEY}.capacity, beside "
                f"{reserve.replace(' ', '')}; blocks will go sooner than the capacity says",
                f"set {_KEY}.capacity={fits >> 20}MiB or less, or make room",
            )
        else:
            earlier = ", and blocks of earlier runs" if has_blocks else ""
            notes.ok("fs.space", f"{told}{earlier}; {format_size(share)} are for the tier")
        return _Room(free, usable)

    def _check_direct(self, direct: Direct, kind: str) -> None:
        if direct.on or self._settings.direct == "off":
            self._notes.ok("fs.o_direct", direct.reason)
            return
        expected = "O_DIRECT, so that blocks take no memory for the page cache"
        fix = f"use a filesystem that has it (xfs, ext4), not {kind or 'this one'}"
        if self._settings.direct == "on":
            fix = f"{fix}; or set {_KEY}.direct=auto, which does without"
            self._notes.fail("fs.o_direct", direct.reason, expected, fix)
        else:
            fix = f"{fix}; or leave it: the tier works, and its blocks go through the page cache"
            self._notes.warn("fs.o_direct", direct.reason, expected, fix)

    def _transfers(self, place: Place, direct: Direct, room: _Room) -> PathFigures:
        notes, settings, stop = self._notes, self._settings, self._stop
        block_bytes, depth = self._sample.block_bytes, self._sample.depth(settings.threads)
        files = BlockFiles(place, self._sample, direct.on, settings.durability)
        budget = min(_MOST_BYTES if direct.on else _MOST_CACHED_BYTES, room.usable_bytes // 2)
        alone, together = alternate(
            files.store,
            files.load,
            depth=depth,
            most=max(1, budget // block_bytes),
            seconds=self._seconds,
            nbytes=block_bytes,
            notes=notes,
            stop=stop,
            prepare=files.prepare,
            between=None if direct.on else lambda count: files.make_cold(count, stop),
        )
        notes.doing("flushing blocks to the disk")
        fsync_s = files.fsync_s(_FSYNCS, stop)
        notes.doing("removing what was measured with")
        if files.wrong:
            notes.fail(
                "fs.bytes",
                f"{len(files.wrong)} blocks came back wrong; the first {files.wrong[0]}",
                "the bytes that were written",
                f"leave this disk out of {_KEY}.paths and have it looked at",
            )
        notes.ok("fs.bandwidth", together.words(block_bytes))
        if fsync_s is not None:
            notes.ok("fs.fsync", f"{fsync_s * 1e3:.2f} ms to flush a block, the median")
        return PathFigures(
            path=self._path,
            o_direct=direct.on,
            free_bytes=room.free_bytes,
            depth=depth,
            fsync_s=fsync_s,
            alone=Transfers(depth=1, **rates(alone)),
            **rates(together),
        )


@contextlib.contextmanager
def _open_place(path: str) -> Iterator[Place]:
    """A path as a tier has it open, with a writer's directory of its own. Raises OSError."""
    made = [
        below
        for name in (naming.WRITERS, naming.QUARANTINE)
        if not os.path.lexists(below := os.path.join(path, name))
    ]
    place = Place(path, this_writer(), OsIo(), flush_directories=False)
    try:
        place.open(make=False)
        yield place
    finally:
        with contextlib.suppress(OSError):
            if place.is_open:
                place.empty_writer(place.writer)
        place.close()
        # Where a tier has come meanwhile, the writers' directory is not empty, and both stay.
        with contextlib.suppress(OSError):
            for below in made:
                os.rmdir(below)
