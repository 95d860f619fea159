"""Which node's index, of what size, under what name. Pure arithmetic, no memory is touched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from backends.region.spec import NAME_PREFIX, SLOT_ALIGN_BYTES, RegionSpec, round_up

FORMAT_VERSION: Final = 1
WAYS: Final = 8
USES: Final = 4096
ENTRY_WORDS: Final = 4
_ENTRIES_PER_ROW: Final = 4  # so that a bucket is seldom full: two of eight on average
_MARK: Final = "_node"


@dataclass(frozen=True, slots=True)
class NodeIndexSpec:
    """Which node's index, and for what. All of its users hold equal ones.

    `replicas` are the sections, one for each `data_parallel_rank_local`; `rows` are those of each
    replica's region. `fingerprint` (hex) covers all that decides the bytes of a row.
    """

    run_id: str
    node_rank: int
    replicas: int
    rows: int
    fingerprint: str

    @property
    def buckets(self) -> int:
        """A power of two."""
        return 1 << max(0, (self.rows * _ENTRIES_PER_ROW // WAYS - 1).bit_length())

    @property
    def section_bytes(self) -> int:
        words = self.rows + 2 * USES + self.buckets * WAYS * ENTRY_WORDS
        return round_up(8 * words, SLOT_ALIGN_BYTES)

    @property
    def file_spec(self) -> RegionSpec:
        """The index as a region, which makes it one for whoever lists, checks and reaps those."""
        facts = f"node index {FORMAT_VERSION} {self.rows} {self.fingerprint}"
        return RegionSpec(
            engine_id=f"{self.run_id}{_MARK}{self.node_rank}",
            run_id=self.run_id,
            backing="shm",
            rows=self.replicas,
            slot_bytes=self.section_bytes,
            local_world_size=1,
            geometry_digest=hashlib.sha256(facts.encode()).hexdigest(),
            persist_name=True,
        )

    @property
    def name(self) -> str:
        """Of the file in /dev/shm."""
        return f"{NAME_PREFIX}{self.run_id}{_MARK}{self.node_rank}"

    @property
    def nbytes(self) -> int:
        return self.file_spec.nbytes


def is_index(engine_id: str, run_id: str) -> bool:
    """Whether a file of /dev/shm with these in its page 0 is an index: it has many owners."""
    return engine_id.startswith(f"{run_id}{_MARK}")
