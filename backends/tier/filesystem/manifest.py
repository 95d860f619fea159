"""`manifest.json` beside the blocks of a namespace on one path."""

from __future__ import annotations

import contextlib

from backends.tier.filesystem.naming import MANIFEST
from backends.tier.filesystem.place import Place
from backends.tier.manifest import fits_manifest, pack_manifest


def write_manifest(
    place: Place, namespace: str, fingerprint: bytes, row_bytes: int, made_of: dict[str, object]
) -> None:
    """Write it unless it is there. Raises TierError if blocks of another size are, and OSError."""
    with contextlib.suppress(FileNotFoundError):
        found = place.read_file(namespace, MANIFEST)
        if fits_manifest(found, row_bytes, f"{place.path}/{namespace}"):
            return
    place.write_file(namespace, MANIFEST, pack_manifest(fingerprint, row_bytes, made_of))
