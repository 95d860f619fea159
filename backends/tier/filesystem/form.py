"""What all blocks of a tier have in common, and how they are treated."""

from __future__ import annotations

from dataclasses import dataclass

from backends.tier.filesystem.naming import Namespace


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`verify`, `durability`: see `FilesystemSettings`."""

    namespace: Namespace
    fingerprint: bytes
    row_bytes: int
    verify: bool
    durability: str
