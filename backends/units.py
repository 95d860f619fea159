"""Sizes as people write them."""

from __future__ import annotations

import re

_BINARY = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZE = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GB` or a plain number of bytes, in bytes, rounded down.

    Raises ValueError that says what was found and what is understood.
    """
    match = _SIZE.fullmatch(text.strip())
    units = _BINARY | _DECIMAL
    if match is None or match[3].upper() not in units:
        raise ValueError(
            f"{text!r} is not a size: expected a number and a unit, such as 512MiB, 8GiB or 2TB"
        )
    whole, part = match[1], match[2] or ""
    scale: int = 10 ** len(part)
    return int(whole + part) * units[match[3].upper()] // scale


def format_size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps a number of at least 1."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1023.95 or unit == "PiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value == int(value) else 2 if value < 10 else 1
    return f"{value:.{digits}f} {unit}"
