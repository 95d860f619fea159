"""What the node index's tests share: replicas of one node, each with a real region and stack."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from backends.block import BlockKey
from backends.policy.registry import PolicyRegistry
from backends.region.node.file import NodeFile
from backends.region.node.reader import NodeReader
from backends.region.node.spec import NodeIndexSpec
from backends.region.region import Region
from backends.region.spec import RegionSpec
from backends.stack.headers import RowHeaders
from backends.stack.node import NodeRows
from backends.stack.stack import TierStack
from backends.tier.base import Tier
from tests.backends.region_kit import make_spec

FINGERPRINT = bytes(range(32))
SLOT_BYTES = 8192
ROWS = 8
SHM = Path("/dev/shm")


def index_spec(run_id: str, replicas: int = 2, rows: int = ROWS) -> NodeIndexSpec:
    return NodeIndexSpec(run_id, 0, replicas, rows, FINGERPRINT.hex())


def new_run_id() -> str:
    return f"node{os.getpid()}x{secrets.token_hex(4)}"


def region_spec(run_id: str, replica: int, rows: int = ROWS, backing: str = "memfd") -> RegionSpec:
    return make_spec(
        engine_id=f"{run_id}_dp{replica}",
        run_id=run_id,
        rows=rows,
        slot_bytes=SLOT_BYTES,
        local_world_size=1,
        backing=backing,
    )


def content(key: bytes) -> int:
    """The byte that every byte of a block is; not 0, which is that of memory nobody wrote to."""
    return zlib.crc32(key) % 255 + 1


def keys_of(name: str, count: int, first: int = 0) -> list[bytes]:
    return [f"{n:03d}-{name}".encode().ljust(32, b"!") for n in range(first, first + count)]


class Replica:
    """A leader that is its own only worker."""

    def __init__(
        self,
        run_id: str,
        number: int,
        *,
        rows: int = ROWS,
        replicas: int = 2,
        groups: int = 1,
        backing: str = "memfd",
        tiers: Sequence[Tier] = (),
        policy: str = "lru",
    ) -> None:
        self.pause_s = 0.0
        spec = index_spec(run_id, replicas, rows)
        specs = [region_spec(run_id, n, rows, backing) for n in range(replicas)]
        self.region = Region.create(specs[number])
        self.region.unlink()
        file = NodeFile.join(spec, writable=True)
        self.node = NodeRows(file, number, self.region.handle())
        lengths = [[SLOT_BYTES]] * groups
        self.stack = TierStack(
            rows,
            PolicyRegistry().open(policy, rows),
            tiers,
            groups=groups,
            headers=RowHeaders(self.region.row_headers(), FINGERPRINT, lengths),
            node=self.node,
        )
        seen = NodeFile.join(spec, writable=False)
        self.reader = NodeReader(seen, specs, number, 0, FINGERPRINT)

    def fill(self, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        slots = self.region.slot_view(0)
        for key, row in zip(keys, rows, strict=True):
            slots[row] = content(key)

    def store(self, keys: Sequence[bytes]) -> list[bytes]:
        """Store a run; what was given rows."""
        storing = self.stack.prepare_store(keys)
        for rows in storing.rows:
            self.fill(storing.keys, rows)
        self.stack.complete_store(storing.keys)
        return list(storing.keys)

    def hits(self, keys: Sequence[bytes]) -> int:
        return self.stack.lookup(keys).hits

    def load(self, keys: Sequence[bytes]) -> int:
        """Load what there is of a run, check every byte; how many leading keys were right."""
        found = keys[: self.hits(keys)]
        self.stack.touch(found)
        loading = self.stack.prepare_load(found)
        good = len(found)
        for n, key in enumerate(found):
            for group, of_group in enumerate(loading.rows):
                if n < good and not self._read(key, group, of_group[n]):
                    good = n
        self.stack.complete_load(found, found[good : good + 1])
        self.stack.step()
        return good

    def _read(self, key: bytes, group: int, row: int) -> bool:
        replica, own_row = self.reader.split(row)
        if replica is None:
            copied = self.region.slot_view(0)[own_row].copy()
        else:
            lease = self.reader.lease(row, BlockKey(key, group))
            if lease is None:
                return False
            slot = self.reader.slots(lease)[own_row]
            copied = np.empty_like(slot)
            half = slot.size // 2
            copied[:half] = slot[:half]
            if self.pause_s:
                time.sleep(self.pause_s)
            copied[half:] = slot[half:]
            if self.reader.kept([lease]) == 0:
                return False
        assert np.all(copied == content(key)), f"wrong bytes of {key!r}"
        return True

    def close(self) -> None:
        self.reader.close()
        self.stack.close()
        self.region.close()


@contextlib.contextmanager
def replicas(count: int = 2, **options: object) -> Iterator[list[Replica]]:
    run_id = new_run_id()
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(count):
            replica = Replica(run_id, number, replicas=count, **options)  # type: ignore[arg-type]
            stack.callback(replica.close)
            made.append(replica)
        yield made
    assert not list(SHM.glob(f"kvquay_{run_id}*"))


def maps(region: Region | RegionSpec) -> bool:
    """Whether this process has the memory of a region mapped."""
    spec = region.spec if isinstance(region, Region) else region
    return spec.name in Path("/proc/self/maps").read_text()
