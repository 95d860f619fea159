"""Who writes: one open tier of one process, in a form that tells others whether it still lives.

Pids are used again and mean nothing on another machine, so a writer is host identity, pid, start
time and a random number. Of a writer elsewhere only time can tell.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

import xxhash

from backends import machine

_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,20})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Writer:
    """`host` is a digest of `machine.host_identity`, `start_time` in clock ticks after boot."""

    host: int
    pid: int
    start_time: int
    nonce: int

    @property
    def name(self) -> str:
        return f"{self.host:016x}-{self.pid}-{self.start_time}-{self.nonce:016x}"

    def alive(self, host: int) -> bool | None:
        """Whether its process runs; None if it is not one of `host`, the caller's own."""
        if self.host != host:
            return None
        return machine.process_start_time(self.pid) == self.start_time


def this_writer() -> Writer:
    """A new identity for this process."""
    pid = os.getpid()
    host = xxhash.xxh3_64_intdigest(machine.host_identity().encode())
    return Writer(host, pid, machine.process_start_time(pid) or 0, secrets.randbits(64) | 1)


def parse_writer(name: str) -> Writer | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Writer(int(match[1], 16), int(match[2]), int(match[3]), int(match[4], 16))
