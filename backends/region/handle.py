"""What a creator tells its peers so that they can map its region: plain values, no open file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from backends.errors import RegionError


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """Where the creator's file is, and enough about it to know it again.

    `fd` is the creator's number for the memory file; it is open as long as the creator's Region is.
    `file_bytes` is the size of the file: `nbytes`, rounded up where it has huge pages.
    `huge_pages` says how it got huge pages (off, none, pool, collapse) and `page_bytes` their size.
    """

    backing: str
    name: str
    creator_pid: int
    creator_start_time: int
    host: str
    uid: int
    fd: int
    device: int
    inode: int
    nbytes: int
    file_bytes: int
    huge_pages: str
    page_bytes: int
    generation: int

    def to_dict(self) -> dict[str, str | int]:
        """Plain JSON types, to be broadcast over a process group."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RegionHandle:
        """Inverse of to_dict. Raises RegionError where a field is missing, unknown or mistyped."""
        types = {field.name: str if field.type == "str" else int for field in fields(cls)}
        wrong = [f"{name} is missing" for name in types if name not in values]
        wrong += [f"{name} is unknown" for name in values if name not in types]
        wrong += [
            f"{name} is {values[name]!r}, expected {kind.__name__}"
            for name, kind in types.items()
            if name in values and type(values[name]) is not kind
        ]
        if wrong:
            raise RegionError(
                f"not a region handle: {'; '.join(wrong)}; creator and peers must run one version"
            )
        return cls(**values)
