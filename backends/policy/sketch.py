"""How often keys were lately seen, in little memory: a count-min sketch that forgets by halves."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
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

    def __init__(self, keys: int) -> None:
        """`keys` is about how many different ones are to be told apart."""
        width = 1 << max(6, (keys - 1).bit_length() + 1)
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(4)]
        self._left = self._every = _SEEN_PER_KEY * max(1, keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Count a sight of each. Only the smallest counters of a key grow (conservative update)."""
        mask, unpack = self._mask, _NUMBERS.unpack_from
        one, two, three, four = self._rows
        for key in keys:
            a, b, c, d = unpack(_digest(key))
            a, b, c, d = a & mask, b & mask, c & mask, d & mask
            least = min(one[a], two[b], three[c], four[d])
            if least < _MOST:
                if one[a] == least:
                    one[a] += 1
                if two[b] == least:
                    two[b] += 1
                if three[c] == least:
                    three[c] += 1
                if four[d] == least:
                    four[d] += 1
            self._left -= 1
            if not self._left:
                self._left = self._every
                self._rows = [row.translate(_HALVES) for row in self._rows]
                one, two, three, four = self._rows

    def count(self, key: bytes) -> int:
        """About how often, 0 to 15; seldom too much, never too little within one halving."""
        mask = self._mask
        one, two, three, four = self._rows
        a, b, c, d = _NUMBERS.unpack_from(_digest(key))
        return int(min(one[a & mask], two[b & mask], three[c & mask], four[d & mask]))


def _digest(key: bytes) -> bytes:
    if len(key) < _NUMBERS.size:
        raise ConfigError(
            f"a key of {len(key)} bytes was given, expected a digest of at least {_NUMBERS.size}"
        )
    return key
