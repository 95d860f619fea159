"""Huge pages for a region: what can be had, and what was got, measured and not assumed.

Two ways, tried in this order. The pool of reserved pages (hugetlb): certain, but an administrator
must have filled it. Collapsing: MADV_COLLAPSE makes 2 MiB pages out of allocated small ones when a
process asks for them by name, also where the kernel does not do so by itself; it needs Linux 6.1,
a setting other than `deny`, and unfragmented memory.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from backends import machine
from backends.errors import RegionError
from backends.region import memory
from backends.region.spec import round_up

SMALL_PAGE_BYTES = 4096
# One call works for long, so it is cut to let signals in.
_COLLAPSE_STEP_BYTES = 64 << 20
# The kernel answers these when it has no huge page just now, or the page is in use.
_TRANSIENT = (errno.ENOMEM, errno.EAGAIN, errno.EBUSY)


@dataclass(frozen=True, slots=True)
class HugePageReport:
    """`got` is off, pool, collapse or none; `page_bytes` the page size of the pages then."""

    asked: str
    got: str
    page_bytes: int
    reason: str


def plan(asked: str, nbytes: int, backing: str, offer: machine.HugePages) -> HugePageReport:
    """Which way suits a region of `nbytes`. `collapse` is a plan only: a probe must follow.

    Raises RegionError if huge pages are required and no way is open.
    """
    if asked == "off":
        return HugePageReport(asked, "off", SMALL_PAGE_BYTES, "not asked for")
    reasons = []
    if backing == "memfd":
        needed = round_up(nbytes, offer.default_bytes) if offer.default_bytes else 0
        if needed and needed <= offer.free_bytes:
            return HugePageReport(asked, "pool", offer.default_bytes, "")
        reasons.append(f"the pool has {offer.free_bytes} free bytes (vm.nr_hugepages)")
    if offer.shmem_thp in ("", "deny"):
        reasons.append(f"transparent ones are {offer.shmem_thp or 'absent'} for shared memory")
    elif nbytes < memory.HUGE_ALIGN_BYTES:
        reasons.append(f"the region of {nbytes} bytes is smaller than one")
    else:
        return HugePageReport(asked, "collapse", memory.HUGE_ALIGN_BYTES, "; ".join(reasons))
    return none_granted(asked, "; ".join(reasons))


def none_granted(asked: str, reason: str) -> HugePageReport:
    """The report of a region that has small pages. Raises RegionError if huge ones are required."""
    if asked == "require":
        raise RegionError(
            f"huge_pages is 'require', but none are granted: {reason}. Fill the pool "
            "(vm.nr_hugepages) or set huge_pages to 'try'"
        )
    return HugePageReport(asked, "none", SMALL_PAGE_BYTES, reason)


def collapse(address: int, nbytes: int) -> tuple[int, str]:
    """Turn the pages of a mapped range into huge ones: bytes asked of the kernel, and why not all.

    `address` is a multiple of 2 MiB; an end that fills no huge page is left as it is. Contents do
    not change, and others may use the memory meanwhile. A step that fails is passed over.
    """
    done, reason = 0, ""
    usable = nbytes // memory.HUGE_ALIGN_BYTES * memory.HUGE_ALIGN_BYTES
    for offset in range(0, usable, _COLLAPSE_STEP_BYTES):
        step = min(_COLLAPSE_STEP_BYTES, usable - offset)
        try:
            memory.madvise(address + offset, step, memory.MADV_COLLAPSE)
            done += step
        except OSError as error:
            reason = f"the kernel collapses no pages here: {error.strerror}"
            if error.errno not in _TRANSIENT:
                break
    return done, reason


def huge_bytes_mapped(address: int, smaps: Path = machine.PROC / "self/smaps") -> int:
    """Bytes of the mapping at `address` that this process has mapped by huge pages just now."""
    found = False
    total = 0
    start = f"{address:x}-"
    with smaps.open() as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                if found:
                    break
                found = line.lstrip("0").startswith(start)
            elif found and re.match(
                r"ShmemPmdMapped:|FilePmdMapped:|Shared_Hugetlb:|Private_Hugetlb:", line
            ):
                total += int(line.split()[1]) * 1024
    return total
