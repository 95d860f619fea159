"""Row numbers by key, for batches of keys: compiled where the extension is built, else a dict.

Keys are hashes, made of what strangers send, and the table is asked for many of them at every step
of the engine. `backends/table/_table.c` says what the compiled one does about either. One thread
uses a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final, Protocol


class KeyTable(Protocol):
    """From keys, `bytes` of any length, to row numbers of 32 bits. It keeps the key objects that it
    was given. `keys` of one call are a list, or another sequence; nothing is done where one of them
    is not bytes."""

    def contains_all(self, keys: Sequence[bytes], /) -> bool: ...

    def isdisjoint(self, keys: Sequence[bytes], /) -> bool:
        """Whether none of these is there."""

    def contains(self, keys: Sequence[bytes], /) -> list[bool]:
        """Of each key, whether it is there."""

    def rows(self, keys: Sequence[bytes], /) -> list[int]:
        """Raises KeyError with the first key that is not there."""

    def rows_or(self, keys: Sequence[bytes], absent: int, /) -> list[int]:
        """Rows, `absent` for a key that is not there."""

    def add(self, keys: Sequence[bytes], rows: Sequence[int], /) -> int:
        """Put in, or give another row; how many were not there. Raises ValueError where these are
        not as many rows as keys."""

    def pop(self, keys: Sequence[bytes], /) -> list[int]:
        """Take out; their rows. Raises KeyError with the first that is not there: those before it
        are gone then."""

    def pop_or(self, keys: Sequence[bytes], absent: int, /) -> list[int]:
        """Take out those that are there; rows as `rows_or` has them."""

    def keys(self) -> list[bytes]:
        """All, in no order."""

    def values(self) -> list[int]:
        """Rows in the order of `keys`."""

    def items(self) -> list[tuple[bytes, int]]:
        """Both, in the order of `keys`."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes, /) -> bool: ...


class DictTable:
    """The same over a dict: Python draws the secrets of its hashes."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}

    def contains_all(self, keys: Sequence[bytes], /) -> bool:
        return all(map(self._rows.__contains__, keys))

    def isdisjoint(self, keys: Sequence[bytes], /) -> bool:
        return self._rows.keys().isdisjoint(keys)

    def contains(self, keys: Sequence[bytes], /) -> list[bool]:
        return list(map(self._rows.__contains__, keys))

    def rows(self, keys: Sequence[bytes], /) -> list[int]:
        return list(map(self._rows.__getitem__, keys))

    def rows_or(self, keys: Sequence[bytes], absent: int, /) -> list[int]:
        return list(map(self._rows.get, keys, repeat(absent)))

    def add(self, keys: Sequence[bytes], rows: Sequence[int], /) -> int:
        before, new = len(self._rows), dict(zip(keys, rows, strict=True))
        if not {bytes}.issuperset(map(type, new)):
            raise TypeError(f"keys are {sorted({type(k).__name__ for k in new})}, expected bytes")
        self._rows.update(new)
        return len(self._rows) - before

    def pop(self, keys: Sequence[bytes], /) -> list[int]:
        return list(map(self._rows.pop, keys))

    def pop_or(self, keys: Sequence[bytes], absent: int, /) -> list[int]:
        return list(map(self._rows.pop, keys, repeat(absent)))

    def keys(self) -> list[bytes]:
        return list(self._rows)

    def values(self) -> list[int]:
        return list(self._rows.values())

    def items(self) -> list[tuple[bytes, int]]:
        return list(self._rows.items())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes, /) -> bool:
        return key in self._rows


COMPILED: Final = "compiled"
DICT: Final = "dict"


def kinds() -> dict[str, Callable[[], KeyTable]]:
    """The tables that there are here by name, best first."""
    try:
        from backends.table._table import Table
    except ImportError:
        return {DICT: DictTable}
    return {COMPILED: Table, DICT: DictTable}


def open_table() -> KeyTable:
    """An empty table of the best kind that there is here."""
    return next(iter(kinds().values()))()
