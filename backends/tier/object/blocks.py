"""One block, one object: put whole or not at all, fetched and checked, put away where it is wrong.

Blocking code for I/O threads. Methods raise StoreFault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from backends import block
from backends.block import HEADER_BYTES, BlockKey
from backends.tier.base import Bytes
from backends.tier.health import Breaker
from backends.tier.naming import Namespace
from backends.tier.object.client import ObjectClient
from backends.tier.object.direct import Target
from backends.tier.object.faults import Absent, Exists, Refused
from backends.tier.object.names import block_path
from backends.tier.object.quarantine import Quarantine
from backends.tier.object.requests import Requests

_TRIES: Final = 3


class BlockWrong(Exception):
    """What stands under a block's name is not that block."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of a tier have in common, and how they are treated.

    `threshold_bytes`: larger blocks are put in parts of `part_bytes`.
    """

    namespace: Namespace
    fingerprint: bytes
    row_bytes: int
    verify: bool
    threshold_bytes: int
    part_bytes: int

    @property
    def in_parts(self) -> bool:
        """Such an upload has no condition, so that what is there is looked for before."""
        return self.row_bytes > self.threshold_bytes


class ObjectBlocks:
    """The blocks of one namespace. `conditional`: whether the store can put create-only."""

    def __init__(
        self,
        client: ObjectClient,
        requests: Requests,
        quarantine: Quarantine,
        form: BlockFormat,
        reads: Breaker,
        writes: Breaker,
    ) -> None:
        self._client = client
        self._requests = requests
        self._quarantine = quarantine
        self._form = form
        self._reads = reads
        self._writes = writes
        self.conditional = True

    def settle(self, key: BlockKey, block_id: int, deadline_s: float | None = None) -> bool:
        """Whether the right block is there already; something wrong in its place is put away.

        Its header is read for that, in one small request. Damage behind the header is found by the
        checksum when the block is loaded.
        """
        name = block_path(self._form.namespace, key, block_id)
        try:
            found = self._requests.ask(
                lambda: self._client.front(name, HEADER_BYTES), self._reads, deadline_s=deadline_s
            )
        except Absent:
            return False
        if found.data.size == HEADER_BYTES and found.size == self._form.row_bytes:
            front = np.array(found.data)
            if block.check_row(front, key, self._form.fingerprint) is None:
                return True
        self.put_away(key, block_id)
        return False

    def looks_first(self, likely: bool) -> bool:
        """Whether to `settle` before a store. `likely`: somebody may have put it already."""
        return likely or not self.conditional or self._form.in_parts

    def store(self, key: BlockKey, block_id: int, row: Bytes, deadline_s: float | None) -> bool:
        """Put a row whose header is COMPLETE, sealed; False where the block was there already."""
        form = self._form
        block.seal(row, row.size - HEADER_BYTES)
        name = block_path(form.namespace, key, block_id)
        for _ in range(_TRIES):
            try:
                self._requests.ask(
                    lambda: self._put(name, row), self._writes, deadline_s=deadline_s
                )
            except Exists:
                if self.settle(key, block_id, deadline_s):
                    return False
            else:
                return True
        raise Refused("what is wrong in its place cannot be taken away")

    def fetch(
        self, key: BlockKey, block_id: int, target: Target, deadline_s: float | None
    ) -> Bytes | None:
        """What stands where the block should be, in the memory of `target`, uint8 [row_bytes].

        None where that is not wanted any more. Raises Absent, BlockWrong.
        """
        name, row_bytes = block_path(self._form.namespace, key, block_id), self._form.row_bytes
        found = self._requests.ask(
            lambda: self._client.fetch_into(name, row_bytes, target, deadline_s),
            self._reads,
            deadline_s=deadline_s,
        )
        if found.size != row_bytes:
            raise BlockWrong(f"is {found.size} bytes long, expected {row_bytes}")
        return found.data

    def check(self, row: Bytes, key: BlockKey) -> None:
        """Raises BlockWrong where what a row was filled with is not the block."""
        form = self._form
        if form.verify:
            wrong = block.check(row, key, form.fingerprint, form.row_bytes - HEADER_BYTES)
        else:
            wrong = block.check_row(row, key, form.fingerprint)
        if wrong:
            raise BlockWrong(wrong)

    def holds(self, key: BlockKey, block_id: int) -> bool:
        """Whether there is an object of this name and size."""
        name = block_path(self._form.namespace, key, block_id)
        try:
            size = self._requests.ask(lambda: self._client.size(name), self._reads, retries=0)
        except Absent:
            return False
        return size == self._form.row_bytes

    def put_away(self, key: BlockKey, block_id: int) -> None:
        """Quarantine or delete what has this key's name.

        Somebody may have replaced it with the right block a moment ago. That one is lost then,
        which costs a store and never a wrong block.
        """
        name = block_path(self._form.namespace, key, block_id)
        self._requests.ask(lambda: self._quarantine.put(name), self._writes)

    def _put(self, name: str, row: Bytes) -> None:
        if self._form.in_parts:
            self._client.put_parts(name, row, self._form.part_bytes)
        elif self.conditional:
            self._client.create(name, row)
        else:
            self._client.put(name, row)
