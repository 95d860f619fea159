"""Page-lock a region for a device's DMA, in pieces of whole rows.

One call for a very large range fails in some drivers, and a driver refuses a copy whose host side
crosses from one locked range into the next: so pieces end where rows end, and a copy of a row or
of a slot never crosses. The calls themselves are the caller's (`cudart.cudaHostRegister`): nothing
here knows a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from backends import machine
from backends.region.spec import HEADER_BYTES, RegionSpec

PIECE_BYTES = 1 << 30
Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class PinReport:
    """What was asked and got. Rows `[0, pinned_rows)` are locked, in pieces of `piece_rows` rows.

    `code` is what the refused call returned, 0 if none was; `reason` says it in words.
    """

    asked_bytes: int
    pinned_bytes: int
    pinned_rows: int
    piece_rows: int
    pieces: int
    code: int
    reason: str


class PinnedRows:
    """The locked pieces of one mapping, to be released before it is unmapped.

    A lock belongs to the process that took it; in a forked child releasing does nothing.
    """

    def __init__(self, pieces: list[int], report: PinReport, unregister: Unregister) -> None:
        self.report = report
        self._pieces = pieces
        self._unregister = unregister
        self._pid = os.getpid()

    def release(self) -> list[int]:
        """Unlock every piece, last first; the codes of those that failed."""
        codes: list[int] = []
        if os.getpid() != self._pid:
            return codes
        while self._pieces:
            code = int(self._unregister(self._pieces.pop()))
            if code:
                codes.append(code)
        return codes


def pin_rows(
    address: int,
    spec: RegionSpec,
    register: Register,
    unregister: Unregister,
    piece_bytes: int = PIECE_BYTES,
) -> PinnedRows:
    """Lock the rows of a region mapped at `address`, first to last, until all are or one fails.

    `register(pointer, nbytes)` and `unregister(pointer)` return 0 for success. What was locked
    before a failure stays locked and is of use: the report says up to which row.
    """
    piece_rows = min(spec.rows, max(1, piece_bytes // spec.row_bytes))
    pieces: list[int] = []
    pinned_rows, code = 0, 0
    for row in range(0, spec.rows, piece_rows):
        count = min(piece_rows, spec.rows - row)
        pointer = address + HEADER_BYTES + row * spec.row_bytes
        code = int(register(pointer, count * spec.row_bytes))
        if code:
            break
        pieces.append(pointer)
        pinned_rows += count
    report = PinReport(
        asked_bytes=spec.rows * spec.row_bytes,
        pinned_bytes=pinned_rows * spec.row_bytes,
        pinned_rows=pinned_rows,
        piece_rows=piece_rows,
        pieces=len(pieces),
        code=code,
        reason=_reason(code, pinned_rows, spec),
    )
    return PinnedRows(pieces, report, unregister)


def _reason(code: int, pinned_rows: int, spec: RegionSpec) -> str:
    if not code:
        return ""
    limit = machine.memlock_limit_bytes()
    limit_text = "unlimited" if limit == machine.UNLIMITED_BYTES else f"{limit} bytes"
    return (
        f"page-locking stopped at row {pinned_rows} of {spec.rows} "
        f"({pinned_rows * spec.row_bytes} of {spec.rows * spec.row_bytes} bytes) with code {code}; "
        f"the locked-memory limit (ulimit -l) is {limit_text}, available memory is "
        f"{machine.memory_available_bytes()} bytes. Rows beyond are copied unlocked, more slowly; "
        "raise the limit or make the region smaller"
    )
