"""The bytes of a node's index: page 0 of a region, then one section for each replica of the node.

A section is a row of that "region": a head of 4 KiB, and behind it, as little-endian u64:

    versions  rows               odd: the row may be read
    uses      USES x 2           ring: start of a run, replica, row | version
    table     buckets x WAYS x 4 two words of tag | state, row | time of the claim, ns

Head: epoch (0: closed), uses written since the epoch began, length of the handle | the handle.
Each section is written by its replica's leader alone; everybody reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from backends.region.node.spec import ENTRY_WORDS, USES, WAYS, NodeIndexSpec
from backends.region.spec import HEADER_BYTES, ROW_HEADER_BYTES

EMPTY: Final = 0
CLAIMED: Final = 1
READY: Final = 2
ROW_BITS: Final = 32
EPOCH, USES_WRITTEN, HANDLE_LENGTH = range(3)  # words of a head
HEAD_WORDS: Final = 8
HANDLE_AT: Final = 8 * HEAD_WORDS
HANDLE_MOST: Final = ROW_HEADER_BYTES - HANDLE_AT

Words = npt.NDArray[np.uint64]


class Sections:
    """A mapped index as arrays, the first axis of each being the replica."""

    def __init__(self, flat: npt.NDArray[np.uint8], spec: NodeIndexSpec) -> None:
        file, rows = spec.file_spec, spec.rows
        sections = flat[HEADER_BYTES : file.nbytes].reshape(spec.replicas, file.row_bytes)
        self.head: Words = sections[:, :HANDLE_AT].view(np.uint64)
        self.handle = sections[:, HANDLE_AT:ROW_HEADER_BYTES]
        body: Words = sections[:, ROW_HEADER_BYTES:].view(np.uint64)
        uses = rows + 2 * USES
        end = uses + spec.buckets * WAYS * ENTRY_WORDS
        self.versions: Words = body[:, :rows]
        self.uses: Words = body[:, rows:uses].reshape(spec.replicas, USES, 2)
        self.table: Words = body[:, uses:end].reshape(
            spec.replicas, spec.buckets, WAYS, ENTRY_WORDS
        )


def tags(keys: Sequence[bytes], group: int) -> Words:
    """What names blocks in a table: u64 [n, 2]. A row's header tells those that collide apart."""
    digests = b"".join([xxhash.xxh3_128_digest(key, seed=group) for key in keys])
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)
