"""Names of everything below the url.

    <namespace>/manifest.json                        what the digest stands for
    <namespace>/<2 hex>/<hash hex>_<group>.kvb       blocks
    <namespace>/recency                              when blocks were used; with a capacity only
    ledger/<20 digits>                               what the capacity is used for, by generation
    quarantine/<ns since the epoch>_<name>           objects found wrong
    probe/<random>                                   what a start writes to see what it may do
    doctor/<writer>/<name>                           what a doctor measures with, while it does

The two hex digits come from a hash of the key, so that requests are spread over 256 prefixes
whatever keys look like: stores divide their load by prefix.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Final, NamedTuple

from backends.block import BlockKey
from backends.tier import naming
from backends.tier.naming import Namespace

LEDGER: Final = "ledger"
QUARANTINE: Final = "quarantine"
MANIFEST: Final = "manifest.json"
RECENCY: Final = "recency"
_PROBE: Final = "probe"
_GENERATION = re.compile(r"ledger/([0-9]{20})")


class Place(NamedTuple):
    """Where a block's name says that it belongs. Whether it does, only its header tells."""

    namespace: str
    key: BlockKey


def block_path(namespace: Namespace, key: BlockKey, block_id: int) -> str:
    return f"{namespace.leaf(block_id)}/{naming.block_name(key)}"


def parse_block_path(name: str) -> Place | None:
    """None for what is no block's name."""
    parts = name.split("/")
    if len(parts) != 3 or not naming.is_namespace(parts[0]):
        return None
    key = naming.parse_block_name(parts[2])
    return None if key is None else Place(parts[0], key)


def generation_path(number: int) -> str:
    return f"{LEDGER}/{number:020d}"


def parse_generation(name: str) -> int | None:
    match = _GENERATION.fullmatch(name)
    return int(match[1]) if match else None


def quarantine_path(name: str) -> str:
    return f"{QUARANTINE}/{time.time_ns():020d}_{name.rsplit('/', 1)[-1]}"


def probe_path() -> str:
    return f"{_PROBE}/{secrets.token_hex(8)}"
