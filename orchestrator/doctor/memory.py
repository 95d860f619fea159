"""How fast a worker's KV blocks go to the region and back, by the copy kernel of the configuration.

The tensors are those of the plan's first worker, in their layout; the rows are ordinary memory of
this process, since a region's pages are no faster. Blocks are taken in a random order, as a paged
cache that has run for a while hands them out.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from backends import machine
from backends.copy import GroupCopier, available_kernels
from backends.errors import RegionError
from backends.layout import WorkerGroup, worker_groups
from backends.units import format_size
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.drive import Measured, drive
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import MemoryFigures
from orchestrator.doctor.steps import measure_steps
from orchestrator.engine.kv import PagedKv
from orchestrator.plan import Plan

_TARGET_BYTES: Final = 128 << 20
"""More than the caches of most machines hold. Shared by the workers, but for a least part each."""
_LEAST_BYTES: Final = 8 << 20
_ROOM_SHARE: Final = 16
_BATCH_BYTES: Final = 4 << 20
"""About what an engine copies in one step."""
_FOREVER: Final = 1 << 40


def measure_memory(plan: Plan, notes: Notes, stop: Stop, seconds: float) -> MemoryFigures | None:
    """Copy for about `seconds` each way, then as long with all of this node's workers. None where
    there is nothing to measure with; `notes` has the check `memory.copy`."""
    engine = plan.settings.engine
    if engine.device == "cuda" and not torch.cuda.is_available():
        notes.fail(
            "memory.copy",
            "torch finds no CUDA device here",
            "a device, because engine.device=cuda",
            "install the driver and a torch that was built for CUDA, or set engine.device=cpu",
        )
        return None
    notes.doing("making tensors and rows")
    group = _largest_group(plan)
    chunk_bytes = group.block_bytes * plan.cache.blocks_per_chunk
    room = machine.memory_available_bytes() // 2
    if 2 * chunk_bytes > room:
        notes.warn(
            "memory.copy",
            f"not measured: {format_size(room)} of memory may be used for it",
            f"{format_size(2 * chunk_bytes)}, a chunk and its place in a row",
            "make region.blocks_per_chunk smaller",
        )
        return None
    copies = _make(plan, group)
    one = copies[0]
    nbytes = one.batch_bytes
    notes.doing("copying from tensors to rows")
    measure = partial(drive, depth=1, most=_FOREVER, stop=stop)
    store = measure(one.store, seconds=seconds, nbytes=nbytes)
    notes.doing("copying from rows to tensors")
    load = measure(one.load, seconds=seconds, nbytes=nbytes)
    notes.doing("copying chunk by chunk")
    store_one = measure(one.store_chunk, seconds=seconds / 3, nbytes=one.chunk_bytes)
    load_one = measure(one.load_chunk, seconds=seconds / 3, nbytes=one.chunk_bytes)
    both = _both_ways(store, load)
    together_bytes_per_s = both
    if len(copies) > 1:
        notes.doing(f"copying with {len(copies)} workers at once")
        together = _together(copies, seconds, stop)
        together_bytes_per_s = together.bytes_per_s if together else None
    for each in copies:
        each.close()
    steps = None
    if engine.device == "cpu":
        notes.doing("copying some chunks a step")
        with contextlib.suppress(RegionError):  # no room for another region: no figure
            steps = measure_steps(plan, stop, 3 * seconds)
    figures = MemoryFigures(
        chunk_bytes=one.chunk_bytes,
        kernel=one.kernel,
        threads=engine.copy_threads,
        workers=len(copies),
        copy_bytes_per_s=both,
        store_bytes_per_s=store.bytes_per_s if store else None,
        load_bytes_per_s=load.bytes_per_s if load else None,
        together_bytes_per_s=together_bytes_per_s,
        store_latency_s=store_one.latency_s if store_one else None,
        load_latency_s=load_one.latency_s if load_one else None,
        step_workers=steps.workers if steps else None,
        step_chunk_bytes=steps.chunk_bytes if steps else None,
        load_curve=steps.load if steps else None,
    )
    _tell(figures, notes)
    return figures


class _Copies:
    """One worker's tensors, rows and way between them. The number of a call chooses the rows."""

    def __init__(self, plan: Plan, group: WorkerGroup, target_bytes: int) -> None:
        settings = plan.settings
        device = torch.device(settings.engine.device)
        per_chunk = plan.cache.blocks_per_chunk
        self.chunk_bytes = group.block_bytes * per_chunk
        self._batch = max(1, _BATCH_BYTES // self.chunk_bytes)
        rows = max(self._batch, target_bytes // self.chunk_bytes)
        self._rows = rows // self._batch * self._batch
        self.batch_bytes = self._batch * self.chunk_bytes
        blocks = self._rows * per_chunk
        dtype = getattr(torch, plan.model.dtype)
        kv = PagedKv(group, blocks, dtype, settings.engine.layout, device)
        for tensor in kv.tensors:
            tensor.fill_(1)  # zeroes are no memory yet
        order = np.random.default_rng(0).permutation(blocks).astype(np.int64)
        self._ids = order.reshape(self._rows, per_chunk)
        self._numbers = np.arange(self._rows, dtype=np.int64)
        self._copier = GroupCopier(
            kv.tensors,
            block_dim=0,
            slot=_slot(self._rows, plan.region.slot_bytes, pinned=device.type == "cuda"),
            blocks_per_chunk=per_chunk,
            threads=settings.engine.copy_threads,
            kernel=settings.engine.copy_kernel,
        )
        self.kernel = self._copier.kernel
        for first in range(0, self._rows, self._batch):
            self.store(first // self._batch)

    def store(self, number: int) -> None:
        self._copier.store(*self._choose(number * self._batch, self._batch))

    def load(self, number: int) -> None:
        self._copier.load(*self._choose(number * self._batch, self._batch))

    def store_chunk(self, number: int) -> None:
        self._copier.store(*self._choose(number, 1))

    def load_chunk(self, number: int) -> None:
        self._copier.load(*self._choose(number, 1))

    def close(self) -> None:
        self._copier.close()

    def _choose(self, row: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        at = slice(row % self._rows, row % self._rows + count)
        return self._ids[at], self._numbers[at]


def _slot(rows: int, slot_bytes: int, *, pinned: bool) -> npt.NDArray[np.uint8]:
    """uint8 [rows, slot_bytes]: page-locked where a device is to reach it."""
    if pinned:
        return torch.empty((rows, slot_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    memory = np.frombuffer(mmap.mmap(-1, rows * slot_bytes), dtype=np.uint8)
    return memory.reshape(rows, slot_bytes)


def _largest_group(plan: Plan) -> WorkerGroup:
    """Of the first worker."""
    config = plan.offload_config(0, 0)
    groups = worker_groups(config.groups, config.model, config.cache, config.parallel)
    return max(groups, key=lambda each: each.block_bytes)


def _make(plan: Plan, group: WorkerGroup) -> list[_Copies]:
    """Of as many workers of this node as there is memory for; at least one. Raises CopyError."""
    workers = plan.topology.workers_per_node
    room = machine.memory_available_bytes() // _ROOM_SHARE
    each_bytes = max(_LEAST_BYTES, _TARGET_BYTES // workers)
    chunk_bytes = group.block_bytes * plan.cache.blocks_per_chunk
    possible = max(1, room // (2 * max(each_bytes, chunk_bytes)))
    return [_Copies(plan, group, each_bytes) for _ in range(min(workers, possible))]


def _together(copies: list[_Copies], seconds: float, stop: Stop) -> Measured | None:
    """All at once, each on its own, as many bytes stored as loaded."""
    mine, left = threading.local(), list(copies)

    def prepare() -> None:
        mine.copies = left.pop()

    def both(number: int) -> None:
        mine.copies.store(number)
        mine.copies.load(number)

    return drive(
        both,
        depth=len(copies),
        most=_FOREVER,
        seconds=seconds,
        nbytes=2 * copies[0].batch_bytes,
        stop=stop,
        prepare=prepare,
    )


def _both_ways(store: Measured | None, load: Measured | None) -> float | None:
    if store is None or load is None:
        return None
    return 2 / (1 / store.bytes_per_s + 1 / load.bytes_per_s)


def _tell(figures: MemoryFigures, notes: Notes) -> None:
    told = [
        f"{name} {rate / 1e9:.1f} GB/s"
        for name, rate in (
            ("store", figures.store_bytes_per_s),
            ("load", figures.load_bytes_per_s),
            (f"{figures.workers} workers at once", figures.together_bytes_per_s),
        )
        if rate is not None
    ]
    if figures.workers == 1:
        told = told[:2]
    found = f"{', '.join(told) or 'no time to measure'}; kernel {figures.kernel}"
    if figures.kernel == "numpy" and len(available_kernels()) == 1:
        notes.warn(
            "memory.copy",
            found,
            "a compiled kernel, which is some times as fast",
            "install a C compiler, and kvquay anew: pip install --force-reinstall --no-deps .",
        )
    else:
        notes.ok("memory.copy", found)
