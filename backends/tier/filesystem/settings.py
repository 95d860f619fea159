"""What a user may choose about the filesystem tier, checked once and frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from backends.errors import ConfigError
from backends.tier.settings import Size


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """Settings of one filesystem tier.

    paths: directories on the disks to use; missing ones are made, mode 0700.
    capacity: bytes for all paths, all namespaces and all processes together. Every path gets an
        equal part and keeps it on its own.
    high_watermark, low_watermark: parts of the capacity; above the one eviction begins in the
        background, at the other it ends.
    durability: `none` leaves flushing to the kernel; `data` flushes a block before it gets its
        name; `full` also flushes the directories, so that the name survives a power cut.
    threads: I/O threads of each path: the number of blocks in flight there.
    queue_blocks, queue_bytes: stores that may wait or be under way; more are SHED at once.
        `queue_blocks` loads may be so beside them, and more are SHED likewise.
    placement: `shared` lets all replicas use each other's blocks; `per_replica` isolates them.
    affinity: data_parallel_rank_local → the path that this replica stores to first.
    direct: O_DIRECT where a path takes it (`auto`), required (`on`), or never (`off`).
    bounce: with O_DIRECT, move bytes through buffers in huge pages: stores of blocks up to 4 MiB,
        and what else is found to be faster so (`auto`), always (`on`), or never (`off`).
    verify: check the payload's checksum at every load. The header is always checked.
    quarantine_limit_bytes: damaged files kept for inspection, all paths together, inside capacity.
    free_reserve_bytes: free space that is left to others on each disk.
    probe_interval_s: how long "not there" is believed before the disk is asked again.
    stagger_s: what each next replica in a key's order waits before it looks again and writes.
    touch_interval_s: how old the recency that others see, in a file's atime, may become.
    spare_files: the most files of evicted blocks that are kept to be written over, up to a
        minute after the last store; 0: none.
    lease_blocks: the most blocks whose room a writer reserves before it needs it; 0: none.
    snapshot_interval_s: time between snapshots of the index, besides the one at close.
    retry_s, retry_most_s: first and longest pause after a path has failed.
    stuck_s: a path with a call that has not come back for so long is not used.
    close_timeout_s: how long `close` lets work under way end.
    """

    paths: tuple[str, ...]
    capacity: Size
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    durability: Literal["none", "data", "full"] = "none"
    threads: int = 8
    queue_blocks: int = 1024
    queue_bytes: Size = 4 << 30
    placement: Literal["shared", "per_replica"] = "shared"
    affinity: Mapping[int, str] = field(default_factory=dict)
    direct: Literal["auto", "on", "off"] = "auto"
    bounce: Literal["auto", "on", "off"] = "auto"
    verify: bool = True
    quarantine_limit_bytes: Size = 256 << 20
    free_reserve_bytes: Size = 128 << 20
    probe_interval_s: float = 1.0
    stagger_s: float = 0.05
    touch_interval_s: float = 60.0
    spare_files: int = 64
    lease_blocks: int = 16
    snapshot_interval_s: float = 300.0
    retry_s: float = 0.5
    retry_most_s: float = 30.0
    stuck_s: float = 5.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        paths = tuple(os.path.abspath(path) for path in self.paths)
        object.__setattr__(self, "paths", paths)
        affinity = {int(k): os.path.abspath(v) for k, v in self.affinity.items()}
        object.__setattr__(self, "affinity", affinity)
        problems = [text for wrong, text in self._checks() if wrong]
        if problems:
            raise ConfigError("filesystem tier: " + "; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        return [
            (not self.paths, "paths is empty, expected at least one directory"),
            (len(set(self.paths)) != len(self.paths), f"paths repeat: {list(self.paths)}"),
            (self.capacity < 1, f"capacity is {self.capacity} bytes, expected more"),
            (
                not 0 < self.low_watermark <= self.high_watermark <= 1,
                f"watermarks are low {self.low_watermark} and high {self.high_watermark}, expected "
                "0 < low <= high <= 1",
            ),
            *(
                (value < 1, f"{name} is {value}, expected at least 1")
                for name, value in (
                    ("threads", self.threads),
                    ("queue_blocks", self.queue_blocks),
                    ("queue_bytes", self.queue_bytes),
                )
            ),
            *(
                (value < 0, f"{name} is {value}, expected 0 or more")
                for name, value in (
                    ("quarantine_limit_bytes", self.quarantine_limit_bytes),
                    ("free_reserve_bytes", self.free_reserve_bytes),
                    ("probe_interval_s", self.probe_interval_s),
                    ("stagger_s", self.stagger_s),
                    ("touch_interval_s", self.touch_interval_s),
                    ("spare_files", self.spare_files),
                    ("lease_blocks", self.lease_blocks),
                    ("close_timeout_s", self.close_timeout_s),
                )
            ),
            (
                not 0 < self.retry_s <= self.retry_most_s,
                f"retry_s is {self.retry_s}, expected more than 0 and at most retry_most_s "
                f"{self.retry_most_s}",
            ),
            *(
                (value <= 0, f"{name} is {value}, expected more than 0")
                for name, value in (
                    ("snapshot_interval_s", self.snapshot_interval_s),
                    ("stuck_s", self.stuck_s),
                )
            ),
            (
                not set(self.affinity.values()) <= set(self.paths),
                f"affinity names {sorted(set(self.affinity.values()) - set(self.paths))}, which "
                "are not among paths",
            ),
        ]
