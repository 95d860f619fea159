"""Numbers as people read them, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from backends.units import format_size

NOTHING: Final = "–"  # noqa: RUF001 - an en dash, where a hyphen would be a minus
_GAP: Final = "\u00a0"  # a number and its unit stay on one line

Format = Callable[[float], str]


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def compact(value: float) -> str:
    """`950`, `12.5 k`, `3.4 M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{_short(value / limit)}{_GAP}{unit}"
    return _short(value)


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def size(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else format_size(nbytes)


def rate(bytes_per_s: float | None) -> str:
    """Decimal, as storage is sold and as the console shows it."""
    if bytes_per_s is None:
        return NOTHING
    for limit, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if abs(bytes_per_s) >= limit:
            return f"{_short(bytes_per_s / limit)}{_GAP}{unit}"
    return f"{_short(bytes_per_s)}{_GAP}B/s"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= 120:
        return f"{int(value // 60)}m{_GAP}{int(value % 60)}s"
    for limit, scale, unit in ((1, 1, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "µs")):
        if value >= limit:
            return f"{_short(value * scale)}{_GAP}{unit}"
    return f"0{_GAP}s" if value == 0 else f"{value * 1e6:.2f}{_GAP}µs"


def clock(seconds_passed: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, left = divmod(int(max(0.0, seconds_passed)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _short(value: float) -> str:
    """Three digits that mean something, and no zeros behind them."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def ticks(top: float, about: int = 4, form: Format | None = None) -> list[float]:
    """Round numbers from 0 on, the last of which is not below `top`; 0 and 1 where it is 0. Those
    that `size` writes are round in its units."""
    if not top > 0:
        return [0.0, 1.0]
    if form is size and top >= 1024:
        unit = 1024.0 ** math.floor(math.log(top, 1024))
        return [unit * tick for tick in ticks(top / unit, about)]
    step = 10.0 ** math.floor(math.log10(top / about))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if top <= factor * step * about)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]
