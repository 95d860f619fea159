"""`manifest.json`: what a namespace's digest stands for, in words, beside its blocks."""

from __future__ import annotations

import json

import msgspec

from backends.config import BLOCK_FORMAT_VERSION
from backends.errors import TierError

MANIFEST_BYTES_MAX = 1 << 20


class _Manifest(msgspec.Struct, frozen=True):
    """What of a manifest means something to a program."""

    row_bytes: int


def pack_manifest(fingerprint: bytes, row_bytes: int, made_of: dict[str, object]) -> bytes:
    """The file's contents. `made_of` is what went into the fingerprint."""
    document = {
        "fingerprint": fingerprint.hex(),
        "format_version": BLOCK_FORMAT_VERSION,
        "row_bytes": row_bytes,
        "made_of": made_of,
    }
    text = json.dumps(document, indent=2, sort_keys=True, default=str) + "\n"
    return text.encode()


def fits_manifest(data: bytes, row_bytes: int, where: str) -> bool:
    """Whether a manifest that stands there is one; False if it is to be written anew.

    Raises TierError where it says that blocks have another size.
    """
    try:
        found = msgspec.json.decode(data[:MANIFEST_BYTES_MAX], type=_Manifest)
    except msgspec.DecodeError:
        return False
    if found.row_bytes != row_bytes:
        raise TierError(
            f"{where} holds blocks of {found.row_bytes} bytes, expected {row_bytes}: what decides "
            "a block's size is not in the fingerprint; use another place"
        )
    return True
