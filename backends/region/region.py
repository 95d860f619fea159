"""The region itself: one side creates it, the others attach, all look at it as numpy arrays.

Who keeps unused bytes zero: the kernel hands out zeroed pages, so padding and slots are zero at the
start and padding is never written. A writer that fills a slot only in part zeroes the rest of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from backends import machine
from backends.errors import RegionError
from backends.region import claim, header, hugepages, memfile, memory, numa, reserve, shmfile
from backends.region.handle import RegionHandle
from backends.region.pin import PIECE_BYTES, PinnedRows, PinReport, Register, Unregister, pin_rows
from backends.region.prefault import PrefaultReport, prefault_slots
from backends.region.spec import (
    HEADER_BYTES,
    ROW_HEADER_BYTES,
    SHM_DIRECTORY,
    RegionSpec,
    round_up,
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Owned:
    """What only a creator holds: the file and the claim on engine_id."""

    fd: int
    pid: int
    directory: str
    guard: socket.socket | None


class Region:
    """One replica's shared mapping on this node, as its creator or as a peer that attached.

    Views stay valid after `close` for as long as they live: the memory is unmapped when the last
    array that looks into it is gone. A forked child may use its parent's Region; closing there
    releases the child's part only.
    """

    def __init__(
        self,
        spec: RegionSpec,
        mapping: memory.Mapping,
        head: header.RegionHeader,
        huge: hugepages.HugePageReport,
        node: numa.NumaReport,
        owned: _Owned | None,
    ) -> None:
        """For `create` and `attach`; `owned` is what the creator holds, None for a peer."""
        self.spec = spec
        self.header = head
        self._flat: Bytes | None = np.asarray(mapping)
        self._address = mapping.address
        self._owned = owned
        # Also at a normal exit of a process that forgot to close, so that no name stays.
        self._release = weakref.finalize(self, _release, owned, spec.name) if owned else None
        self._huge = huge
        self._numa = node
        self._prefault: PrefaultReport | None = None
        self._pins: PinnedRows | None = None

    @classmethod
    def create(cls, spec: RegionSpec, *, directory: str = SHM_DIRECTORY) -> Region:
        """Make the region: every byte reserved, header written, and only then findable.

        A stale file of the same name and user is reaped first. `directory` is the tmpfs of backing
        shm. Raises RegionError: no room, name taken, required huge pages not granted.
        """
        guard = claim.claim(spec.engine_id) if spec.backing == "shm" else None
        try:
            with _telling_system_errors(spec, "created"):
                return cls._create_either(spec, directory, guard)
        except BaseException:
            if guard:
                guard.close()
            raise

    @classmethod
    def _create_either(
        cls, spec: RegionSpec, directory: str, guard: socket.socket | None
    ) -> Region:
        if spec.backing == "shm":
            shmfile.refuse_taken_name(directory, spec.name)
        nodes = () if spec.numa_node is None else machine.numa_nodes()
        node = numa.plan(spec.numa_node, spec.nbytes, nodes)
        offer = machine.huge_pages()
        huge = hugepages.plan(spec.huge_pages, spec.nbytes, spec.backing, offer)
        if huge.got == "pool":
            # The pool is shared by all processes and may be empty by now.
            with contextlib.suppress(RegionError):
                return cls._create(spec, directory, guard, node, huge)
            emptied = replace(offer, free_bytes=0)
            huge = hugepages.plan(spec.huge_pages, spec.nbytes, spec.backing, emptied)
        return cls._create(spec, directory, guard, node, huge)

    @classmethod
    def _create(
        cls,
        spec: RegionSpec,
        directory: str,
        guard: socket.socket | None,
        node: numa.NumaReport,
        huge: hugepages.HugePageReport,
    ) -> Region:
        pool = huge.got == "pool"
        file_bytes = round_up(spec.nbytes, huge.page_bytes) if pool else spec.nbytes
        if not pool:
            reserve.check_room(spec.engine_id, file_bytes, spec.backing, directory)
        fd = shmfile.make(directory) if spec.backing == "shm" else memfile.make(spec.name, pool)
        try:
            with numa.allocating_on(node):
                reserve.reserve(
                    fd,
                    file_bytes,
                    engine_id=spec.engine_id,
                    backing=spec.backing,
                    directory=directory,
                    from_pool=pool,
                )
            mapping = _map(fd, file_bytes, huge.page_bytes, spec)
            if huge.got == "collapse":
                huge = _probe_collapse(mapping, huge)
            pid = os.getpid()
            head = header.RegionHeader.of(
                spec,
                owner_pid=pid,
                owner_start_time=_own_start_time(pid),
                pid_namespace=machine.pid_namespace(),
                generation=secrets.randbits(63),
            )
            np.asarray(mapping)[:HEADER_BYTES] = np.frombuffer(header.pack(head), np.uint8)
            if spec.backing == "shm":
                shmfile.publish(fd, directory, spec.name)
            else:
                memfile.seal(fd)
            return cls(spec, mapping, head, huge, node, _Owned(fd, pid, directory, guard))
        except BaseException:
            shmfile.release(fd, os.getpid(), directory, spec.name)
            raise

    def handle(self) -> RegionHandle:
        """What peers need to attach. Good for as long as the creator's Region is open."""
        fd = self._owner("handle").fd
        status = os.fstat(fd)
        return RegionHandle(
            backing=self.spec.backing,
            name=self.spec.name,
            creator_pid=self.header.owner_pid,
            creator_start_time=self.header.owner_start_time,
            host=machine.host_identity(),
            uid=os.geteuid(),
            fd=fd,
            device=status.st_dev,
            inode=status.st_ino,
            nbytes=self.spec.nbytes,
            file_bytes=status.st_size,
            huge_pages=self._huge.got,
            page_bytes=self._huge.page_bytes,
            generation=self.header.generation,
        )

    @classmethod
    def attach(
        cls, handle: RegionHandle, spec: RegionSpec, *, directory: str = SHM_DIRECTORY
    ) -> Region:
        """Map the creator's region, after checking that it is that one and fits `spec`.

        Raises RegionError: dead creator, reused pid, other user, other file, other contents.
        """
        _check_handle(handle, spec)
        with _telling_system_errors(spec, "attached to"):
            if spec.backing == "memfd":
                fd = memfile.open_peer(handle)
                where = f"/proc/{handle.creator_pid}/fd/{handle.fd}"
            else:
                fd = shmfile.open_named(directory, spec)
                where = os.path.join(directory, spec.name)
            return cls._attach(fd, where, spec, handle)

    @classmethod
    def attach_read_only(cls, handle: RegionHandle, spec: RegionSpec) -> Region:
        """Map another replica's region, of either backing, to look at its rows. All views of it are
        read-only arrays.

        Through its creator's descriptor, so that a name that is gone already does not matter.
        Raises RegionError as `attach` does.
        """
        _check_handle(handle, spec)
        with _telling_system_errors(spec, "attached to"):
            fd = memfile.open_peer(handle, read_only=True)
            where = f"/proc/{handle.creator_pid}/fd/{handle.fd}"
            return cls._attach(fd, where, spec, handle, read_only=True)

    @classmethod
    def attach_by_name(cls, spec: RegionSpec, *, directory: str = SHM_DIRECTORY) -> Region:
        """Map a living engine's shm region by its name alone; see `persist_name`.

        Raises RegionError.
        """
        if spec.backing != "shm":
            raise RegionError(
                f"region {spec.name}: backing {spec.backing} has no name to attach by; use the "
                "creator's handle or backing shm"
            )
        with _telling_system_errors(spec, "attached to"):
            fd = shmfile.open_named(directory, spec)
            return cls._attach(fd, os.path.join(directory, spec.name), spec, None)

    @classmethod
    def _attach(
        cls,
        fd: int,
        where: str,
        spec: RegionSpec,
        handle: RegionHandle | None,
        read_only: bool = False,
    ) -> Region:
        try:
            head = header.unpack(os.pread(fd, HEADER_BYTES, 0), where)
            header.check(head, spec, where)
            status = os.fstat(fd)
            if handle is not None:
                _check_same_creation(head, status, handle, where)
            way = handle.huge_pages if handle else _way_by_name(spec)
            huge = hugepages.HugePageReport(
                spec.huge_pages, way, _page_bytes(way, handle), "decided by the creator"
            )
            mapping = _map(fd, status.st_size, huge.page_bytes, spec, writable=not read_only)
        finally:
            os.close(fd)
        node = numa.NumaReport(spec.numa_node, "creator", "decided by the creator")
        return cls(spec, mapping, head, huge, node, None)

    def slot_view(self, local_rank: int) -> Bytes:
        """One worker's slot of every row: uint8 [rows, slot_bytes], strided, writable."""
        start = self.spec.slot_offset_in_row(local_rank)
        return self._rows()[:, start : start + self.spec.slot_bytes]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, header and padding included."""
        return self.spec.row_bytes

    def row_view(self, row: int) -> Bytes:
        """A whole row, header and padding too: uint8 [row_bytes], page-aligned, writable."""
        self.spec.row_offset(row)
        view: Bytes = self._rows()[row]
        return view

    def row_headers(self) -> Bytes:
        """The header of every row: uint8 [rows, 4096], strided, writable; the leader's to fill."""
        return self._rows()[:, :ROW_HEADER_BYTES]

    def prefault(
        self, local_rank: int, *, method: str = "populate", threads: int = 1
    ) -> PrefaultReport:
        """Map this worker's slots of all rows now, so that no copy pays for it. See `prefault`.

        Where the region is to have huge pages by collapsing, this worker's share of that comes
        first: workers share the region out among them, so all of them must call this. Raises
        RegionError, in particular where required huge pages are not granted.
        """
        flat = self._open_flat()
        began = time.perf_counter()
        if self._huge.got == "collapse":
            self._collapse_share(local_rank)
        try:
            done = prefault_slots(flat, self.spec, local_rank, method=method, threads=threads)
        except OSError as error:
            raise RegionError(
                f"region {self.spec.name}: slots of local rank {local_rank} cannot be prefaulted: "
                f"{error.strerror}; turn prefault off or free memory for page tables"
            ) from error
        self._prefault = replace(
            done,
            seconds=time.perf_counter() - began,
            huge_bytes=hugepages.huge_bytes_mapped(self._address)
            if self._huge.got in ("pool", "collapse")
            else 0,
        )
        return self._prefault

    def pin(
        self, register: Register, unregister: Unregister, piece_bytes: int = PIECE_BYTES
    ) -> PinReport:
        """Page-lock all rows for DMA, see `pin_rows`; `close` unlocks them."""
        if self._pins is not None:
            raise RegionError(f"region {self.spec.name} is page-locked already; unpin it first")
        self._open_flat()
        self._pins = pin_rows(self._address, self.spec, register, unregister, piece_bytes)
        return self._pins.report

    def unpin(self) -> None:
        """Release page-locks; no copy may be under way. Raises RegionError if a release fails."""
        pins, self._pins = self._pins, None
        codes = pins.release() if pins else []
        if codes:
            raise RegionError(
                f"region {self.spec.name}: {len(codes)} pieces could not be unlocked, codes "
                f"{codes}; end the process to release them"
            )

    def unlink(self) -> None:
        """Take the shm name away, once all have mapped; later calls, and memfd, do nothing.

        With `persist_name` the name stays until `close`. Only the creating process may do this.
        """
        if self.spec.persist_name or self.spec.backing != "shm":
            return
        owned = self._owner("unlink")
        shmfile.unlink_own(owned.fd, owned.directory, self.spec.name)

    def close(self) -> None:
        """Release page-locks, name, lock and file; may be called again. Views stay valid."""
        if self._flat is None:
            return
        self._flat = None
        try:
            self.unpin()
        finally:
            if self._release:
                self._release()

    def report(self) -> dict[str, Any]:
        """What was asked and what was got, in plain JSON types."""
        return {
            "backing": self.spec.backing,
            "name": self.spec.name,
            "nbytes": self.spec.nbytes,
            "rows": self.spec.rows,
            "row_bytes": self.spec.row_bytes,
            "slot_bytes": self.spec.slot_bytes,
            "local_world_size": self.spec.local_world_size,
            "generation": self.header.generation,
            "huge_pages": asdict(self._huge),
            "numa": asdict(self._numa),
            "prefault": asdict(self._prefault) if self._prefault else None,
            "pinned": asdict(self._pins.report) if self._pins else None,
        }

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _collapse_share(self, local_rank: int) -> None:
        """Collapse this worker's part of the whole region, cut at huge-page boundaries."""
        units = self.spec.nbytes // memory.HUGE_ALIGN_BYTES
        workers = self.spec.local_world_size
        first, last = (units * rank // workers for rank in (local_rank, local_rank + 1))
        asked = (last - first) * memory.HUGE_ALIGN_BYTES
        done, reason = hugepages.collapse(self._address + first * memory.HUGE_ALIGN_BYTES, asked)
        if done < asked and self.spec.huge_pages == "require":
            hugepages.none_granted(
                "require", f"{done} of {asked} bytes of local rank {local_rank}'s share: {reason}"
            )
        self._huge = replace(self._huge, reason=reason or self._huge.reason)

    def _owner(self, what: str) -> _Owned:
        self._open_flat()
        if self._owned is None or os.getpid() != self._owned.pid:
            raise RegionError(
                f"region {self.spec.name}: {what} is for the process that created it "
                f"(pid {self.header.owner_pid}), this is pid {os.getpid()}"
            )
        return self._owned

    def _open_flat(self) -> Bytes:
        if self._flat is None:
            raise RegionError(f"region {self.spec.name} is closed; create or attach it again")
        return self._flat

    def _rows(self) -> Bytes:
        flat = self._open_flat()
        return flat[HEADER_BYTES : self.spec.nbytes].reshape(self.spec.rows, self.spec.row_bytes)


def _check_handle(handle: RegionHandle, spec: RegionSpec) -> None:
    for name, told, mine in (
        ("backing", handle.backing, spec.backing),
        ("name", handle.name, spec.name),
        ("nbytes", handle.nbytes, spec.nbytes),
    ):
        if told != mine:
            raise RegionError(
                f"region {spec.name}: its creator says {name} {told!r}, this worker expects "
                f"{mine!r}; all workers of a replica must have the same plan"
            )


@contextlib.contextmanager
def _telling_system_errors(spec: RegionSpec, verb: str) -> Iterator[None]:
    """What the system refuses outside the steps that have a message of their own."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.EMFILE, errno.ENFILE)
        hint = "; raise the limit of open files (ulimit -n)" if full else ""
        raise RegionError(f"region {spec.name} cannot be {verb}: {error}{hint}") from error


def _release(owned: _Owned, name: str) -> None:
    try:
        shmfile.release(owned.fd, owned.pid, owned.directory, name)
    finally:
        if owned.guard:
            owned.guard.close()


def _map(
    fd: int, file_bytes: int, page_bytes: int, spec: RegionSpec, *, writable: bool = True
) -> memory.Mapping:
    align_bytes = max(page_bytes, memory.HUGE_ALIGN_BYTES)
    try:
        return memory.Mapping(fd, file_bytes, align_bytes, writable=writable)
    except OSError as error:
        raise RegionError(
            f"region {spec.name}: {file_bytes} bytes cannot be mapped: {error.strerror}; look at "
            "the address space limit (ulimit -v) and vm.max_map_count"
        ) from error


def _probe_collapse(
    mapping: memory.Mapping, planned: hugepages.HugePageReport
) -> hugepages.HugePageReport:
    """Collapse the first huge page, to know whether the rest can be asked for."""
    done, reason = hugepages.collapse(mapping.address, memory.HUGE_ALIGN_BYTES)
    np.asarray(mapping)[0] = 0
    if done and hugepages.huge_bytes_mapped(mapping.address):
        return planned
    why = "; ".join(filter(None, (planned.reason, reason or "the kernel left small pages")))
    return hugepages.none_granted(planned.asked, why)


def _own_start_time(pid: int) -> int:
    started = machine.process_start_time(pid)
    if started is None:
        raise RegionError(f"/proc/{pid}/stat cannot be read; mount /proc to make a region")
    return started


def _page_bytes(way: str, handle: RegionHandle | None) -> int:
    if handle is not None:
        return handle.page_bytes
    return memory.HUGE_ALIGN_BYTES if way == "collapse" else hugepages.SMALL_PAGE_BYTES


def _way_by_name(spec: RegionSpec) -> str:
    """A file in /dev/shm is never of the pool; whether it collapses shows when it is tried."""
    return "off" if spec.huge_pages == "off" else "collapse"


def _check_same_creation(
    head: header.RegionHeader, status: os.stat_result, handle: RegionHandle, where: str
) -> None:
    found = {
        "generation": head.generation,
        "owner_pid": head.owner_pid,
        "owner_start_time": head.owner_start_time,
        "device": status.st_dev,
        "inode": status.st_ino,
        "file_bytes": status.st_size,
    }
    expected = {
        "generation": handle.generation,
        "owner_pid": handle.creator_pid,
        "owner_start_time": handle.creator_start_time,
        "device": handle.device,
        "inode": handle.inode,
        "file_bytes": handle.file_bytes,
    }
    wrong = [
        f"{name} found {found[name]} expected {value}"
        for name, value in expected.items()
        if found[name] != value
    ]
    if wrong:
        raise RegionError(
            f"{where}: another region has been made since this handle was: {'; '.join(wrong)}; "
            "attach with the handle of the current one"
        )
