"""`doctor.json`: what a machine and its tiers were found to do, for people and for the simulator.

Sizes are bytes, times seconds, rates bytes per second. A figure that could not be measured is null,
and a check says why. docs/doctor.md explains every check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from backends.errors import KvquayError

FILE: Final = "doctor.json"
FORMAT: Final = 2

Verdict = Literal["ok", "warn", "fail"]


class DoctorError(KvquayError):
    """A `doctor.json` is missing, damaged, or of another format."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `where` is the path, URL or address that it is about, "" for
    the machine; `expected` and `fix` are "" where nothing is to be mended."""

    name: str
    verdict: Verdict
    found: str
    where: str = ""
    expected: str = ""
    fix: str = ""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of single transfers or requests; exact, not in buckets."""

    p50: float
    p99: float
    mean: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of so many blocks: how many of them were measured, and what they took."""

    blocks: int
    count: int
    mean: float
    p50: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of a batch by its number of blocks, with a pause before each batch. `points` ascend;
    `fixed_s + blocks * per_block_s` is the line through them."""

    fixed_s: float
    per_block_s: float
    points: tuple[Point, ...]


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Stores and loads of whole blocks, `depth` of them under way at a time.

    A rate is of all of them together, a latency that of one.
    """

    depth: int
    store_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    store_latency_s: Latency | None = None
    load_latency_s: Latency | None = None


class MachineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. `memory_limit_bytes` is the least of its memory and of every cgroup's limit;
    `page_lock_bytes` is null where locking memory has no limit."""

    host: str
    system: str
    architecture: str
    cpu: str
    cpus: int
    memory_bytes: int
    memory_limit_bytes: int
    memory_available_bytes: int
    numa_nodes: int
    cuda_devices: int
    shm_bytes: int
    shm_free_bytes: int
    huge_page_bytes: int
    huge_pages_free_bytes: int
    page_lock_bytes: int | None


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's chunk, `chunk_bytes`, between its paged KV tensors and its slot of a row, by the
    copy kernel and threads of the configuration.

    `store` is tensors to row, `load` row to tensors, each of chunks one after another;
    `copy_bytes_per_s` is that of as many bytes stored as loaded. `together_bytes_per_s` is that of
    `workers` at once, all of this node's: what they do to each other is in it.

    `load_curve` is what a step's loads take, by chunks of `step_chunk_bytes`, with `step_workers`
    at once: the ranks of one replica on this node, each a process; null for CUDA devices.
    """

    chunk_bytes: int
    kernel: str
    threads: int
    workers: int
    copy_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    together_bytes_per_s: float | None = None
    store_latency_s: Latency | None = None
    load_latency_s: Latency | None = None
    step_workers: int | None = None
    step_chunk_bytes: int | None = None
    load_curve: Curve | None = None


class PathFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of the filesystem tier: blocks written, sealed and named, read cold and checked
    as the tier does it, at the tier's depth; `alone` is the same with one at a time.

    `fsync_s` is what flushing one block to the disk takes, the median.
    """

    path: str
    o_direct: bool
    free_bytes: int | None = None
    depth: int | None = None
    store_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    store_latency_s: Latency | None = None
    load_latency_s: Latency | None = None
    fsync_s: float | None = None
    alone: Transfers | None = None


class FsFigures(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="fs"):
    """The filesystem tier, path by path, measured one after another. `load_curve` is the tier's own
    latency, all paths together, in batches."""

    block_bytes: int
    paths: tuple[PathFigures, ...] = ()
    load_curve: Curve | None = None


class ObjectFigures(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="object"):
    """The object tier: whole blocks at the tier's depth; `alone` is the same with one at a time.

    `latency_s` is of a request for a block's size, which is what a lookup costs. `clock_skew_s` is
    the store's clock less this machine's; the store may tell whole seconds only. `load_curve` is
    the tier's own latency, in batches.
    """

    url: str
    block_bytes: int
    depth: int | None = None
    latency_s: Latency | None = None
    store_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    store_latency_s: Latency | None = None
    load_latency_s: Latency | None = None
    conditional_put: bool | None = None
    clock_skew_s: float | None = None
    alone: Transfers | None = None
    load_curve: Curve | None = None


TierFigures = FsFigures | ObjectFigures


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All of `doctor.json`. `tiers` are those under the region, nearest first; each has its `name`.

    `plan_digest` is that of `plan.json` for the same configuration: block size and depth are its.
    """

    format: int
    version: str
    run_id: str
    created_s: float
    seconds: float
    plan_digest: str
    reproduce: str
    machine: MachineFigures
    memory: MemoryFigures | None
    tiers: tuple[TierFigures, ...]
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all checks."""
        verdicts = {check.verdict for check in self.checks}
        return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


class _Stamp(msgspec.Struct):
    """The part of the file that every format has."""

    format: int


def encode(result: Result) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2)


def read_result(path: Path) -> Result:
    """Read a `doctor.json`, or the one in a run directory. Raises DoctorError."""
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
        stamp = msgspec.json.decode(data, type=_Stamp)
        if stamp.format != FORMAT:
            raise DoctorError(
                f"{path}: has format {stamp.format}, expected {FORMAT}; measure again with "
                "action=doctor of this version"
            )
        return msgspec.json.decode(data, type=Result)
    except OSError as error:
        raise DoctorError(
            f"{path}: cannot be read: {error.strerror}; write one with action=doctor"
        ) from error
    except msgspec.DecodeError as error:
        raise DoctorError(
            f"{path}: is not a doctor.json: {error}; write one with action=doctor"
        ) from error
