"""What a copy answers: its figures, and a handle for one that is still under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CopyStats:
    """Figures of one batch.

    `bytes` counts the KV bytes moved (skipped blocks and zeroes that were written do not count),
    `seconds` the time the batch was being copied (not the time it waited for its turn), `chunks`
    the rows named in the batch.
    """

    bytes: int
    seconds: float
    chunks: int


class CopyHandle(Protocol):
    """A batch under way. Until it is done its rows and blocks must be left alone."""

    def done(self) -> bool:
        """True once every byte has arrived. Never blocks."""
        ...

    def wait(self) -> CopyStats:
        """Blocks until every byte has arrived. May be called again."""
        ...
