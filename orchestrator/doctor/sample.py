"""Blocks to measure with: as large as those of the plan, sealed and checked as a tier does it."""

from __future__ import annotations

import secrets
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from backends import block, machine
from backends.block import BlockKey
from orchestrator.plan import Plan

_PAGE_WORDS: Final = 512
_KEY_BYTES: Final = 8
_MEMORY_SHARE: Final = 4

Bytes = npt.NDArray[np.uint8]


class Sample:
    """Blocks by number. No two hold the same page, and nothing of one can be made smaller."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.block_bytes = plan.region.row_bytes
        self._fingerprint = bytes.fromhex(plan.fingerprint)
        self._slots = [plan.region.slot_bytes] * plan.slots
        self._token = secrets.token_bytes(_KEY_BYTES)
        payload_bytes = self.block_bytes - block.HEADER_BYTES
        self._payload = np.frombuffer(np.random.default_rng().bytes(payload_bytes), np.uint8)

    def depth(self, wanted: int) -> int:
        """How many blocks at a time there is memory for: `wanted`, or fewer; at least one."""
        room = machine.memory_available_bytes() // _MEMORY_SHARE
        return max(1, min(wanted, room // self.block_bytes))

    def fill(self, row: Bytes, number: int) -> None:
        """Make a row, uint8 [block_bytes], the block of a number, ready to be written.

        A row that held a block before is changed where blocks differ.
        """
        if not row[:_KEY_BYTES].any():
            row[block.HEADER_BYTES :] = self._payload
        row[block.HEADER_BYTES :].view(np.uint64)[::_PAGE_WORDS] = number
        block.write_header(
            row,
            self.key(number),
            fingerprint=self._fingerprint,
            slot_lengths=self._slots,
            created_ns=time.time_ns(),
            state=block.COMPLETE,
        )
        block.seal(row, row.size - block.HEADER_BYTES)

    def wrong(self, row: Bytes, number: int) -> str | None:
        """Why what was read is not the block of a number; None if it is, to the last byte."""
        stored_bytes = self.block_bytes - block.HEADER_BYTES
        return block.check(row, self.key(number), self._fingerprint, stored_bytes)

    def key(self, number: int) -> BlockKey:
        return BlockKey(self._token + number.to_bytes(_KEY_BYTES, "little"), 0)
