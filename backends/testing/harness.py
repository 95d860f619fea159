"""What the conformance suite has to be given for a tier: how to open it, and how to get behind it.

The suite itself is the same for every tier. All that differs stands in a TierHarness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from backends.block import BlockKey
from backends.tier.base import Capabilities, Tier, TierContext

Opener = Callable[[TierContext], Tier]


class TierHarness(ABC):
    """One storage, empty at first, the tiers that are opened on it, and ways around them.

    `capabilities` must be those of the tier: they decide which tests apply. The raw methods reach
    what is stored without the tier, as another program would; they are needed where `capabilities`
    has persistent or corruption.
    """

    capabilities: ClassVar[Capabilities]
    can_stall: ClassVar[bool] = False
    """Whether `stall` works. Without it nothing shows that no method waits for the storage."""

    def __init__(self, directory: Path) -> None:
        """`directory` is empty and this harness's own."""
        self.directory = directory

    @abstractmethod
    def opener(self, capacity_bytes: int | None = None) -> Opener:
        """What opens the tier on this storage, again and again. `capacity_bytes` limits it.

        Where the tier is persistent or shared it is called in other processes too, so it must be
        picklable: a function of a module, or `functools.partial` of one. Make caches of what is
        absent short-lived (a second or less), or the suite takes long.
        """

    def raw_list(self) -> Mapping[str, int]:
        """Everything that counts against the capacity, unfinished or not: name and bytes.

        One entry a block, in a tier at rest; not what is in quarantine.
        """
        raise NotImplementedError(f"{type(self).__name__} has no raw_list")

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        """What stands where the tier would look for this key; None if nothing does."""
        raise NotImplementedError(f"{type(self).__name__} has no raw_read")

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        """Put `data` where the tier would look for this key, replacing what is there."""
        raise NotImplementedError(f"{type(self).__name__} has no raw_write")

    def stall(self) -> None:
        """From now on no access to the storage by this process's tiers comes back."""
        raise NotImplementedError(f"{type(self).__name__} cannot stall")

    def resume(self) -> None:  # noqa: B027 - what cannot stall need not resume
        """End a stall; may be called from another thread, and again."""

    def close(self) -> None:
        """Give back what the harness itself holds. All tiers are closed by then."""
        self.resume()
