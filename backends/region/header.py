"""Page 0 of a region: who made it, and what for. Packed, unpacked and checked, nothing else.

Whoever attaches compares all of it with what it expects, so that a region of another engine, run,
geometry or format is refused instead of read. Little-endian, zero-padded to 4 KiB:

    magic 8s | version u32 | header bytes u32 | checksum 16s (BLAKE2b of the page, this field zero)
    engine_id 128s | run_id 128s | geometry digest 128s
    owner pid, owner start time, pid namespace, generation, rows, slot_bytes, local_world_size,
    row_bytes, nbytes: u64 each
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from backends.errors import RegionError
from backends.region.spec import HEADER_BYTES, RegionSpec

MAGIC = b"KVQUAYRG"
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sII16s")
_BODY = struct.Struct("<128s128s128s9Q")
_CHECKSUM_AT = slice(16, 32)


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Contents of page 0. `generation` is drawn anew by every creation: two are never equal.

    `owner_start_time` is in clock ticks after boot (proc(5), stat, field 22); pids compare only
    within one `pid_namespace`.
    """

    engine_id: str
    run_id: str
    geometry_digest: str
    owner_pid: int
    owner_start_time: int
    pid_namespace: int
    generation: int
    rows: int
    slot_bytes: int
    local_world_size: int
    row_bytes: int
    nbytes: int

    @classmethod
    def of(
        cls,
        spec: RegionSpec,
        owner_pid: int,
        owner_start_time: int,
        pid_namespace: int,
        generation: int,
    ) -> RegionHeader:
        return cls(
            engine_id=spec.engine_id,
            run_id=spec.run_id,
            geometry_digest=spec.geometry_digest,
            owner_pid=owner_pid,
            owner_start_time=owner_start_time,
            pid_namespace=pid_namespace,
            generation=generation,
            rows=spec.rows,
            slot_bytes=spec.slot_bytes,
            local_world_size=spec.local_world_size,
            row_bytes=spec.row_bytes,
            nbytes=spec.nbytes,
        )


def pack(header: RegionHeader) -> bytes:
    """The 4096 bytes of page 0."""
    body = _BODY.pack(
        header.engine_id.encode("ascii"),
        header.run_id.encode("ascii"),
        header.geometry_digest.encode("ascii"),
        header.owner_pid,
        header.owner_start_time,
        header.pid_namespace,
        header.generation,
        header.rows,
        header.slot_bytes,
        header.local_world_size,
        header.row_bytes,
        header.nbytes,
    )
    page = bytearray(_PREFIX.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, bytes(16)) + body)
    page.extend(bytes(HEADER_BYTES - len(page)))
    page[_CHECKSUM_AT] = _checksum(page)
    return bytes(page)


def unpack(page: bytes, where: str) -> RegionHeader:
    """Read page 0 back. `where` names the file in errors.

    Raises RegionError where it is no region, of another format, or damaged.
    """
    if len(page) < HEADER_BYTES:
        raise RegionError(
            f"{where}: page 0 holds {len(page)} bytes, expected {HEADER_BYTES}; "
            "it is not a finished region"
        )
    magic, version, header_bytes, checksum = _PREFIX.unpack_from(page)
    if magic != MAGIC:
        raise RegionError(
            f"{where}: found magic {magic!r}, expected {MAGIC!r}; it is not a region of kvquay"
        )
    if (version, header_bytes) != (FORMAT_VERSION, HEADER_BYTES):
        raise RegionError(
            f"{where}: region format {version} with a header of {header_bytes} bytes, expected "
            f"format {FORMAT_VERSION} with {HEADER_BYTES}; run one version of kvquay on both sides"
        )
    if checksum != _checksum(page):
        raise RegionError(
            f"{where}: the checksum of page 0 does not fit its contents; the header is damaged, "
            "create the region anew"
        )
    engine_id, run_id, digest, *numbers = _BODY.unpack_from(page, _PREFIX.size)
    return RegionHeader(_string(engine_id), _string(run_id), _string(digest), *numbers)


def check(header: RegionHeader, spec: RegionSpec, where: str) -> None:
    """Raise RegionError listing every field in which a region differs from what is expected."""
    expected = {
        "engine_id": spec.engine_id,
        "run_id": spec.run_id,
        "geometry_digest": spec.geometry_digest,
        "rows": spec.rows,
        "slot_bytes": spec.slot_bytes,
        "local_world_size": spec.local_world_size,
        "row_bytes": spec.row_bytes,
        "nbytes": spec.nbytes,
    }
    wrong = [
        f"{name} found {getattr(header, name)!r} expected {value!r}"
        for name, value in expected.items()
        if getattr(header, name) != value
    ]
    if wrong:
        raise RegionError(
            f"{where}: this region is not the expected one: {'; '.join(wrong)}. All workers of a "
            "replica must have the same plan; end the other run or choose another engine_id"
        )


def _string(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", errors="replace")


def _checksum(page: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(page[: _CHECKSUM_AT.start])
    digest.update(bytes(16))
    digest.update(page[_CHECKSUM_AT.stop : HEADER_BYTES])
    return digest.digest()
