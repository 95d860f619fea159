"""Reads a Mooncake trace as a stream of requests with block hashes.

The file is never held whole. What a trace knows of a prompt is one id per 512 tokens; each id is
expanded to `512 / tokens_per_hash` chained hashes, so that engines with smaller blocks find the
same hits. Two limits follow from the trace itself and not from this reader:

- Prefixes are shared in whole ids. Two prompts that part in the middle of 512 tokens have
  different ids there, and share nothing of them here.
- The last id of a prompt is usually partial. What fills it up is not known, so it gives no hash;
  nor does the output, which a trace does not describe.

Ids of two trace files are not comparable. Where both feed one store, give each its own salt.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain as concatenated
from typing import BinaryIO

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.hashing import chain, chain_root, splitter
from orchestrator.workload.request import Request
from orchestrator.workload.trace_line import (
    MAX_LINE_BYTES,
    MOONCAKE_TOKENS_PER_ID,
    BadLineError,
    TraceRecord,
    parse_line,
)

ON_BAD_LINE = ("error", "skip")
KEPT_REASONS = 5
CACHED_HASHES = 1 << 18
"""Bound of the expansion cache: about 25 MB, a quarter of a million hashes of 80 bytes."""


class MooncakeReader:
    """The requests of a trace file, from request `offset` on, at most `requests` of them.

    `offset` and `requests` count good lines. Arrival times count from the first request that is
    given out. Every iteration reads the file anew.

    With `on_bad_line="error"` a bad line raises WorkloadError with file, line number, what was
    found and what was expected; with `"skip"` it is passed over and counted (`skipped`,
    `skip_reasons`). A file that cannot be read, or that has no request to give, always raises.
    """

    def __init__(
        self,
        path: str,
        *,
        tokens_per_hash: int,
        salt: str = "",
        requests: int | None = None,
        offset: int = 0,
        on_bad_line: str = "error",
        cached_hashes: int = CACHED_HASHES,
        partial_ids: bool = False,
    ) -> None:
        """`partial_ids`: give hashes also for the last id, as if it filled up. No engine has those
        hits; figures elsewhere are often counted so."""
        if problem := tokens_per_hash_problem(tokens_per_hash):
            raise WorkloadError(f"tokens_per_hash {problem}")
        if on_bad_line not in ON_BAD_LINE:
            raise WorkloadError(f"on_bad_line is {on_bad_line!r}, expected one of {ON_BAD_LINE}")
        if offset < 0 or (requests is not None and requests < 1):
            raise WorkloadError(
                f"offset is {offset} and requests is {requests}, expected offset >= 0 and "
                "requests >= 1 or None for all"
            )
        self._path = path
        self._requests = requests
        self._offset = offset
        self._on_bad_line = on_bad_line
        self._partial_ids = partial_ids
        self._skipped = 0
        self._reasons: list[str] = []
        self._expander = _Expander(salt, tokens_per_hash, cached_hashes)

    @property
    def skipped(self) -> int:
        """Bad lines passed over so far by the latest iteration."""
        return self._skipped

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """The first few of them: line number, what was found, what was expected."""
        return tuple(self._reasons)

    def __iter__(self) -> Iterator[Request]:
        return self.select(lambda request: True)

    def select(self, wanted: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests that `wanted` accepts; it is called with every one, hashes left empty."""
        expand = self._expander.expand
        for index, (arrival_s, record) in enumerate(self._records()):
            length, output = record.input_length, record.output_length
            if wanted(Request(index, arrival_s, length, output, ())):
                full = length // MOONCAKE_TOKENS_PER_ID
                ids = record.hash_ids if self._partial_ids else record.hash_ids[:full]
                yield Request(index, arrival_s, length, output, expand(ids))

    def _records(self) -> Iterator[tuple[float, TraceRecord]]:
        good = 0
        first_ms: int | float = 0
        for record in self._good_lines():
            good += 1
            if good <= self._offset:
                continue
            if good == self._offset + 1:
                first_ms = record.timestamp_ms
            yield (record.timestamp_ms - first_ms) / 1000, record
            if self._requests is not None and good == self._offset + self._requests:
                return
        if good <= self._offset:
            raise WorkloadError(self._nothing_found(good))

    def _nothing_found(self, good: int) -> str:
        skipped = ""
        if self._skipped:
            skipped = f" and {self._skipped} bad lines, the first: {self._reasons[0]}"
        found = f"{self._path}: found {good} requests{skipped}"
        if good:
            return f"{found}; offset is {self._offset}, it must be less than {good}"
        return f"{found}; expected one JSON object a line (Mooncake format)"

    def _good_lines(self) -> Iterator[TraceRecord]:
        self._skipped = 0
        self._reasons = []
        latest_ms: int | float = 0
        for number, raw in _numbered_lines(self._path):
            try:
                record = parse_line(raw)
                if record.timestamp_ms < latest_ms:
                    raise BadLineError(
                        f"timestamp is {record.timestamp_ms}, expected at least {latest_ms}, "
                        "that of an earlier line"
                    )
            except BadLineError as bad:
                if self._on_bad_line == "error":
                    raise WorkloadError(
                        f"{self._path}:{number}: {bad}. Mend the line, or pass over bad lines "
                        "with on_bad_line=skip"
                    ) from None
                self._skipped += 1
                if len(self._reasons) < KEPT_REASONS:
                    self._reasons.append(f"line {number}: {bad}")
                continue
            latest_ms = record.timestamp_ms
            yield record


class _Expander:
    """Ids of a prompt to chained hashes, with what was lately computed kept in a bounded LRU.

    An entry is found by its id and used only if it was made after the same prefix: a trace where
    one id follows two prefixes costs time, never a wrong hash.
    """

    def __init__(self, salt: str, tokens_per_hash: int, cached_hashes: int) -> None:
        hashes_per_id = MOONCAKE_TOKENS_PER_ID // tokens_per_hash
        self._root = chain_root(salt, "mooncake")
        self._split = splitter(hashes_per_id)
        self._capacity = max(1, cached_hashes // hashes_per_id)
        self._made: OrderedDict[int, tuple[bytes, bytes, tuple[bytes, ...]]] = OrderedDict()

    def expand(self, ids: list[int]) -> tuple[bytes, ...]:
        parent = self._root
        made, split = self._made, self._split
        parts = []
        for trace_id in ids:
            entry = made.get(trace_id)
            if entry is None or entry[0] != parent:
                digest = chain(parent, trace_id.to_bytes(8, "little"))
                entry = (parent, digest, split(digest))
                made[trace_id] = entry
                if len(made) > self._capacity:
                    made.popitem(last=False)
            else:
                made.move_to_end(trace_id)
            parent = entry[1]
            parts.append(entry[2])
        return tuple(concatenated.from_iterable(parts))


def tokens_per_hash_problem(tokens_per_hash: int) -> str | None:
    """What is wrong with the unit of hashing for a trace, or None."""
    if tokens_per_hash >= 1 and MOONCAKE_TOKENS_PER_ID % tokens_per_hash == 0:
        return None
    return (
        f"is {tokens_per_hash}, but a trace knows prompts in units of {MOONCAKE_TOKENS_PER_ID} "
        "tokens: use a power of two from 1 to 512 (larger blocks may span several hashes)"
    )


def file_problem(path: str) -> str | None:
    """Why `path` cannot be read as a trace, judged without reading it, or None."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"is {path!r}, which cannot be opened: {reason}; give the path of a trace file"
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        return f"is {path!r}, which is {kind}; every replica reads it, so give a regular file"
    if not os.access(path, os.R_OK):
        return f"is {path!r}, which may not be read by this user; change its mode or owner"
    if found.st_size == 0:
        return f"is {path!r}, which is empty; expected one JSON object a line (Mooncake format)"
    return None


def count_lines(path: str, at_most: int | None = None) -> int:
    """Lines of a file, the last one counted also without a line end; stops at `at_most`."""
    lines, last = 0, b"\n"
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                lines += piece.count(b"\n")
                last = piece[-1:]
                if at_most is not None and lines >= at_most:
                    return at_most
    except OSError as error:
        raise WorkloadError(f"path is {path!r}, reading failed: {error.strerror}") from error
    return lines + (last != b"\n")


def first_line(path: str) -> bytes:
    """The first line, cut one byte after the longest that is allowed. Raises WorkloadError."""
    for _, raw in _numbered_lines(path):
        return raw
    return b""


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 on; one that is too long comes cut, so that memory stays bounded."""
    if problem := file_problem(path):
        raise WorkloadError(f"path {problem}")
    try:
        with open(path, "rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                yield number, raw
                if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    _pass_over_rest(file)
    except OSError as error:
        raise WorkloadError(f"path is {path!r}, reading failed: {error.strerror}") from error


def _pass_over_rest(file: BinaryIO) -> None:
    while piece := file.readline(1 << 20):
        if piece.endswith(b"\n"):
            return
