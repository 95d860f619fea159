"""`manifest.json`: what a namespace's digest stands for, in words, beside its blocks."""

from __future__ import annotations

import contextlib
import json

from backends.config import BLOCK_FORMAT_VERSION
from backends.errors import TierError
from backends.tier.filesystem.naming import MANIFEST
from backends.tier.filesystem.place import Place


def write_manifest(
    place: Place, namespace: str, fingerprint: bytes, row_bytes: int, made_of: dict[str, object]
) -> None:
    """Write it unless it is there. Raises TierError if blocks of another size are, and OSError."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(place.read_file(namespace, MANIFEST))
        if isinstance(found, dict) and isinstance(found.get("row_bytes"), int):
            if found["row_bytes"] != row_bytes:
                raise TierError(
                    f"{place.path}/{namespace} holds blocks of {found['row_bytes']} bytes, "
                    f"expected {row_bytes}: what decides a block's size is not in the fingerprint; "
                    "use another path"
                )
            return
    document = {
        "fingerprint": fingerprint.hex(),
        "format_version": BLOCK_FORMAT_VERSION,
        "row_bytes": row_bytes,
        "made_of": made_of,
    }
    text = json.dumps(document, indent=2, sort_keys=True, default=str) + "\n"
    place.write_file(namespace, MANIFEST, text.encode())
