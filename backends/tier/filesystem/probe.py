"""Find out whether a directory's filesystem takes O_DIRECT, by using it."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

import numpy as np

from backends.tier.filesystem.io import Io
from backends.tier.filesystem.transfer import ALIGNMENT_BYTES, Scratch, read_row, write_row

_NAME = "probe"


class Direct(NamedTuple):
    """Whether blocks bypass the page cache here, and why or why not."""

    on: bool
    reason: str


def probe_direct(io: Io, directory: int, mode: str) -> Direct:
    """Write and read one page with O_DIRECT in `directory`. Raises OSError for other trouble."""
    if mode == "off":
        return Direct(False, "buffered: direct is off in the settings")
    # Some filesystems take the flag and fail at the first transfer, so the flag proves nothing.
    page = Scratch(ALIGNMENT_BYTES).get()
    page[:] = np.arange(ALIGNMENT_BYTES, dtype=np.uint32).astype(np.uint8)
    expected = page.copy()
    with contextlib.suppress(FileNotFoundError):
        io.unlink(directory, _NAME)
    try:
        fd = io.open(directory, _NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    except OSError as error:
        return _refused(error, "open")
    try:
        write_row(io, fd, page)
        page[:] = 0
        read_row(io, fd, page)
        if not np.array_equal(page, expected):
            return Direct(False, "buffered: a page came back different through O_DIRECT")
    except OSError as error:
        return _refused(error, "transfer")
    finally:
        io.close(fd)
        io.unlink(directory, _NAME)
    return Direct(True, "direct: a page went there and back through O_DIRECT")


def _refused(error: OSError, step: str) -> Direct:
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        return Direct(False, f"buffered: {step} with O_DIRECT gives {error.strerror}")
    raise error
