"""Sizes as people write them."""

from __future__ import annotations

import re

_BINARY = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GB` or a plain number of bytes, in bytes.

    Raises ValueError that says what was found and what is understood.
    """
    match = _SIZE.fullmatch(text.strip())
    units = _BINARY | _DECIMAL
    if match is None or match[2].upper() not in units:
        raise ValueError(
            f"{text!r} is not a size: expected a number and a unit, such as 512MiB, 8GiB or 2TB"
        )
    bytes_exact = float(match[1]) * units[match[2].upper()]
    if "." not in match[1]:
        return int(match[1]) * units[match[2].upper()]
    return int(bytes_exact)


def format_size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps a number of at least 1, three digits at most."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value == int(value) else 2 if value < 10 else 1
    return f"{value:.{digits}f} {unit}"
