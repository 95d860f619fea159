from collections.abc import Sequence

def announce(
    address: int,
    stride_bytes: int,
    count: int,
    form: bytes,
    keys: Sequence[bytes],
    rows: Sequence[int],
    created_ns: int,
    /,
) -> None:
    """Fill these rows' headers from `form`, the beginning that they have in common.

    `count` headers of 4 KiB stand `stride_bytes` apart from `address` on, which is trusted. Raises
    IndexError for a row that is not one of them, ValueError for a key of more than 64 bytes or as
    many keys as there are not rows; nothing is written then.
    """

def set_states(
    address: int, stride_bytes: int, count: int, rows: Sequence[int], state: int, /
) -> None:
    """Change these rows' state, and nothing else. Raises IndexError."""

def clear(
    address: int, stride_bytes: int, count: int, first_byte: int, rows: Sequence[int], /
) -> None:
    """Zero these rows' headers from this byte on. Raises IndexError."""
