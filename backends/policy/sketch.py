"""How often keys were lately seen, in little memory: a count-min sketch that forgets by halves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from struct import Struct
from types import ModuleType
from typing import Final

from backends.errors import ConfigError

_MOST: Final = 15
_HALVES: Final = bytes(value >> 1 for value in range(256))
_SEEN_PER_KEY: Final = 10
_NUMBERS: Final = Struct("<4I")


class FrequencySketch:
    """Four rows of counters up to 15; all are halved after ten sights an expected key. The sketch
    and its ageing are TinyLFU's: Einziger, Friedman and Manes, ACM ToS 2017.

    Keys are digests, so their first 16 bytes are four independent hashes already. The same in every
    process.
    """

    def __init__(self, keys: int, *, compiled: bool = True) -> None:
        """`keys` is about how many different ones are to be told apart. `compiled` False: counted
        by Python, which is what a machine without the compiled part has."""
        width = 1 << max(6, (keys - 1).bit_length() + 1)
        self._mask = width - 1
        self._counters = bytearray(4 * width)
        self._rows = tuple(range(0, 4 * width, width))  # where each of the four begins
        self._left = self._every = _SEEN_PER_KEY * max(1, keys)
        self._native = _native() if compiled else None

    def add(self, keys: Iterable[bytes]) -> None:
        """Count a sight of each. Only the smallest counters of a key grow (conservative update)."""
        every = list(keys)
        if min(map(len, every), default=_NUMBERS.size) < _NUMBERS.size:
            deque(map(_digest, every), 0)
        start = 0
        while start < len(every):
            end = min(len(every), start + self._left)
            if self._native is not None:
                self._native.add(self._counters, every, start, end, _MOST)
            else:
                self._add(every[start:end])
            self._left -= end - start
            start = end
            if not self._left:
                self._left = self._every
                self._counters = self._counters.translate(_HALVES)

    def _add(self, keys: Sequence[bytes]) -> None:
        counters, mask, unpack = self._counters, self._mask, _NUMBERS.unpack_from
        for key in keys:
            places = [
                (number & mask) + row for number, row in zip(unpack(key), self._rows, strict=True)
            ]
            least = min(map(counters.__getitem__, places))
            if least < _MOST:
                for place in places:
                    if counters[place] == least:
                        counters[place] += 1

    def count(self, key: bytes) -> int:
        """About how often, 0 to 15; seldom too much, never too little within one halving."""
        if self._native is not None:
            return int(self._native.count(self._counters, _digest(key)))
        mask = self._mask
        numbers = zip(_NUMBERS.unpack_from(_digest(key)), self._rows, strict=True)
        return int(min(self._counters[(number & mask) + row] for number, row in numbers))


def _native() -> ModuleType | None:
    try:
        from backends.policy import _sketch
    except ImportError:
        return None
    return _sketch


def _digest(key: bytes) -> bytes:
    if len(key) < _NUMBERS.size:
        raise ConfigError(
            f"a key of {len(key)} bytes was given, expected a digest of at least {_NUMBERS.size}"
        )
    return key
