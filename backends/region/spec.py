"""What a region is: identity, backing and byte layout. Pure arithmetic, no memory is touched.

    page 0 | row 0 | row 1 | ... | row rows-1
    row    = 4 KiB header | slot 0 | slot 1 | ... | slot local_world_size-1 | padding to 4 KiB

A row's header is that of the stored block, so that a row goes to a lower tier as one aligned write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.errors import RegionError

PAGE_BYTES = 4096
HEADER_BYTES = 4096
ROW_HEADER_BYTES = 4096
SLOT_ALIGN_BYTES = 64
BACKINGS = ("memfd", "shm")
HUGE_PAGES = ("off", "try", "require")
NAME_PREFIX = "kvquay_"
SHM_DIRECTORY = "/dev/shm"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def row_bytes_for(slot_bytes: int, local_world_size: int) -> int:
    """Bytes of one row: header, slots and padding."""
    return round_up(ROW_HEADER_BYTES + slot_bytes * local_world_size, PAGE_BYTES)


def rows_for_size(size_bytes: int, slot_bytes: int, local_world_size: int) -> int:
    """The most rows whose region, page 0 included, is not larger than `size_bytes`; may be 0."""
    if slot_bytes < 1 or local_world_size < 1:
        raise RegionError(
            f"slot_bytes is {slot_bytes} and local_world_size {local_world_size}, "
            "expected both at least 1"
        )
    return max(0, size_bytes - HEADER_BYTES) // row_bytes_for(slot_bytes, local_world_size)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One replica's region on one node; creator and peers hold equal ones.

    `slot_bytes` is the largest worker's slot (pipeline stages may differ) and a multiple of 64.
    `geometry_digest` is a digest in lower-case hex over all that decides the bytes of a slot.
    `persist_name` keeps a shm file's name while its owner lives. `numa_node` asks for memory of
    one node; None asks for nothing. Raises RegionError where a value cannot be right.
    """

    engine_id: str
    run_id: str
    backing: str
    rows: int
    slot_bytes: int
    local_world_size: int
    geometry_digest: str
    persist_name: bool = False
    huge_pages: str = "off"
    numa_node: int | None = None

    def __post_init__(self) -> None:
        for name, text in (("engine_id", self.engine_id), ("run_id", self.run_id)):
            if not _ID.fullmatch(text):
                raise RegionError(
                    f"{name} is {text!r}, expected 1 to 128 of A-Z a-z 0-9 _ . - and a letter or "
                    "digit first, because it becomes part of a file name"
                )
        if not _DIGEST.fullmatch(self.geometry_digest):
            raise RegionError(
                f"geometry_digest is {self.geometry_digest!r}, expected 8 to 128 lower-case hex "
                "digits"
            )
        for name, value, allowed in (
            ("backing", self.backing, BACKINGS),
            ("huge_pages", self.huge_pages, HUGE_PAGES),
        ):
            if value not in allowed:
                raise RegionError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
        if self.rows < 1 or self.local_world_size < 1:
            raise RegionError(
                f"rows is {self.rows} and local_world_size {self.local_world_size}, expected both "
                "at least 1; give the region more room or make the chunk smaller"
            )
        if self.slot_bytes < SLOT_ALIGN_BYTES or self.slot_bytes % SLOT_ALIGN_BYTES:
            raise RegionError(
                f"slot_bytes is {self.slot_bytes}, expected a positive multiple of "
                f"{SLOT_ALIGN_BYTES}; round it up to "
                f"{max(SLOT_ALIGN_BYTES, round_up(self.slot_bytes, SLOT_ALIGN_BYTES))}"
            )
        if self.persist_name and self.backing != "shm":
            raise RegionError(
                f"persist_name is set, but a {self.backing} region has no name to keep; "
                "use backing shm or leave persist_name off"
            )
        if self.numa_node is not None and self.numa_node < 0:
            raise RegionError(f"numa_node is {self.numa_node}, expected a node number or None")

    @property
    def name(self) -> str:
        """Name of the shm file under /dev/shm; a label only for memfd."""
        return f"{NAME_PREFIX}{self.engine_id}"

    @property
    def row_bytes(self) -> int:
        return row_bytes_for(self.slot_bytes, self.local_world_size)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.rows * self.row_bytes

    def row_offset(self, row: int) -> int:
        """Byte offset of a row, its header first, from the start of the region."""
        if not 0 <= row < self.rows:
            raise RegionError(f"row is {row}, expected 0 <= row < {self.rows}")
        return HEADER_BYTES + row * self.row_bytes

    def slot_offset(self, row: int, local_rank: int) -> int:
        """Byte offset of a worker's slot in a row from the start of the region."""
        return self.row_offset(row) + self.slot_offset_in_row(local_rank)

    def slot_offset_in_row(self, local_rank: int) -> int:
        if not 0 <= local_rank < self.local_world_size:
            raise RegionError(
                f"local_rank is {local_rank}, expected 0 <= local_rank < {self.local_world_size}; "
                "it is the worker's index among its replica's workers on this node"
            )
        return ROW_HEADER_BYTES + local_rank * self.slot_bytes
