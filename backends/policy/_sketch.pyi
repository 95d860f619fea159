def add(counters: bytearray, keys: list[bytes], first: int, end: int, most: int, /) -> None:
    """Count a sight of each of `keys[first:end]`, up to `most`.

    `counters` are four rows of a power of two. Only the smallest of a key's four grow. Raises
    ValueError, and counts nothing, where a key has not at least 16 bytes.
    """

def count(counters: bytearray, key: bytes, /) -> int:
    """The smallest of a key's four counters. Raises ValueError as `add` does."""
