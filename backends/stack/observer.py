"""Who is told what a stack does: a base class that listens to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PRIMARY: Final = "shm"  # the region's name, where the tiers under it have theirs
NODE: Final = "node"  # the regions of other replicas on this node, as a source of blocks


class Observer:
    """Called by the stack's one thread, in the middle of its verbs: it must neither wait nor raise.

    `tier` is a tier's name, PRIMARY for the region. A key stands for a whole entry's block of one
    KV-cache group. The same may be told twice. What was there before the stack was opened, and what
    another process does to a tier that is shared, is not told: who evicts there tells of it.
    """

    def admitted(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Some of a run of one sequence are about to come into the region, `parent` before it."""

    def stored(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        """These are whole in a tier now: computed, brought in from below, or written there."""

    def removed(self, tier: str, group: int, keys: Sequence[bytes]) -> None:
        """These were in a tier, and are not any more."""

    def cleared(self, tier: str) -> None:
        """Any of what was in a tier may have gone: it is not known which."""

    def stepped(self) -> None:
        """The stack has taken in what there was: once or more an engine step."""
