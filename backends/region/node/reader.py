"""How a worker gets at its neighbours' rows: their regions mapped read-only, each read checked.

Rows of all replicas have one numbering: a replica's own are [0, rows), those of the neighbour with
`data_parallel_rank_local` n are [(1 + n) * rows, (2 + n) * rows).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.block import BlockKey, is_whole, read_header
from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.node.file import NodeFile
from backends.region.node.layout import EPOCH, HANDLE_LENGTH, HANDLE_MOST
from backends.region.node.section import Fence
from backends.region.region import Region
from backends.region.spec import RegionSpec

LOOK_S: Final = 0.25  # how often it is asked whether the owners of what is mapped still live
RETRY_S: Final = 1.0  # after a region could not be mapped


def shared_row(replica: int, row: int, rows: int) -> int:
    """A neighbour's row in the numbering of all."""
    return (1 + replica) * rows + row


class Lease(NamedTuple):
    """A row as it was when its reading began. It keeps nothing in place; see `NodeReader.kept`."""

    replica: int
    row: int
    epoch: int
    version: int


class _Mapped(NamedTuple):
    epoch: int
    region: Region
    headers: npt.NDArray[np.uint8]


class NodeReader:
    """A worker's way to the rows of the other replicas. One thread uses it."""

    def __init__(
        self,
        file: NodeFile,
        specs: Sequence[RegionSpec],
        replica: int,
        slot: int,
        fingerprint: bytes,
    ) -> None:
        """`specs` are those of the regions of all replicas of the node, `replica` is one's own and
        `slot` what this worker has of each row. `file` is closed by `close`."""
        self._file = file
        self._sections = file.sections
        self._specs = specs
        self._replica = replica
        self._slot = slot
        self._fingerprint = fingerprint
        self.rows = file.spec.rows  # of each replica
        self._mapped: dict[int, _Mapped] = {}
        self._retry_at_s: dict[int, float] = {}
        self._look_at_s = 0.0
        self._fence = Fence()
        self.problems: dict[int, str] = {}  # why the region of a replica cannot be mapped

    def split(self, row: int) -> tuple[int | None, int]:
        """Whose row this is, None for one's own, and its number there."""
        whose, row = divmod(row, self.rows)
        return (None if not whose else whose - 1), row

    def lease(self, row: int, key: BlockKey) -> Lease | None:
        """Begin to read a row, in the numbering of all; None if it does not hold this block."""
        replica, row = self.split(row)
        if replica is None or replica == self._replica or replica >= len(self._specs):
            return None
        epoch = int(self._sections.head[replica, EPOCH])
        mapped = self._mapped.get(replica)
        if mapped is None or mapped.epoch != epoch:
            mapped = self._map(replica, epoch)
        if mapped is None:
            return None
        version = int(self._sections.versions[replica, row])
        if not version & 1:
            return None
        self._fence()
        head = mapped.headers[row]
        if not is_whole(head, key) or read_header(head).fingerprint != self._fingerprint:
            return None
        return Lease(replica, row, epoch, version)

    def slots(self, lease: Lease) -> npt.NDArray[np.uint8]:
        """This worker's slots of a leased row's region: uint8 [rows, slot_bytes], read-only."""
        return self._mapped[lease.replica].region.slot_view(self._slot)

    def kept(self, leases: Sequence[Lease]) -> int:
        """How many leading leases still hold: what was copied meanwhile is what was leased."""
        self._fence()
        for n, lease in enumerate(leases):
            head, versions = self._sections.head, self._sections.versions
            if (
                int(versions[lease.replica, lease.row]) != lease.version
                or int(head[lease.replica, EPOCH]) != lease.epoch
            ):
                return n
        return len(leases)

    def sweep(self) -> list[int]:
        """Let go of the regions of replicas that have ended, now and then; which those were."""
        now_s = time.monotonic()
        if now_s < self._look_at_s or not self._mapped:
            return []
        self._look_at_s = now_s + LOOK_S
        gone = [
            replica
            for replica, mapped in self._mapped.items()
            if int(self._sections.head[replica, EPOCH]) != mapped.epoch
            or not self._file.owned(replica)
        ]
        for replica in gone:
            self._drop(replica)
        return gone

    def close(self) -> None:
        """Let go of everything. Views of slots stay valid for as long as they live."""
        for replica in list(self._mapped):
            self._drop(replica)
        self._file.close()

    def _drop(self, replica: int) -> None:
        self._mapped.pop(replica).region.close()

    def _map(self, replica: int, epoch: int) -> _Mapped | None:
        """The region of a replica in this epoch; None if it has none, or it cannot be mapped."""
        now_s = time.monotonic()
        if not epoch or now_s < self._retry_at_s.get(replica, 0.0):
            return None
        try:
            handle = self._handle(replica)
            if handle.generation | 1 != epoch:
                return None
            region = Region.attach_read_only(handle, self._specs[replica])
        except (RegionError, ValueError) as error:
            self.problems[replica] = str(error)
            self._retry_at_s[replica] = now_s + RETRY_S
            return None
        if replica in self._mapped:
            self._drop(replica)
        self.problems.pop(replica, None)
        mapped = self._mapped[replica] = _Mapped(epoch, region, region.row_headers())
        return mapped

    def _handle(self, replica: int) -> RegionHandle:
        """As it stands there: while it is being written it is no handle, or an older one."""
        length = int(self._sections.head[replica, HANDLE_LENGTH])
        told = self._sections.handle[replica, : min(length, HANDLE_MOST)].tobytes()
        return RegionHandle.from_dict(json.loads(told))
