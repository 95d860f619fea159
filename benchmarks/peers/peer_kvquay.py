"""Ours: the filesystem tier, the region with its stack and copier, and the object tier."""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository is needed, too.
sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peer_protocol import Bytes, Way, Work, serve

from backends.block import HEADER_BYTES, BlockKey
from backends.copy import GroupCopier
from backends.policy.registry import PolicyRegistry
from backends.region.region import Region
from backends.region.spec import RegionSpec
from backends.stack.headers import RowHeaders
from backends.stack.stack import TierStack
from backends.testing import RowBuffer, make_context
from backends.tier.base import Job, Outcome, Tier
from backends.tier.filesystem import FilesystemSettings
from backends.tier.filesystem.tier import FilesystemTier
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.tier import ObjectTier
from backends.tier.pool import store_threads_of
from benchmarks._blocks import put_header, stores_of_object_tier

BATCH = 16
WAIT_S = 120.0


def key_of(key: str) -> BlockKey:
    return BlockKey(bytes.fromhex(key), 0)


class TierWay(Way):
    """As a leader uses a tier: batches, results by poll. Rows are headers and payloads. One tier
    stores and one loads, so that each has `depth` blocks in flight."""

    packages = ("kvquay", "torch", "numpy")

    def __init__(self, work: Work) -> None:
        self.work = work
        row_bytes = HEADER_BYTES + work.block_bytes
        self._from, self._into = (RowBuffer(work.count, row_bytes) for _ in range(2))
        self._stores = self._open(self._from, loads=False)
        self._loads = self._open(self._into, loads=True)
        self._jobs = 0
        self._outcomes: list[Outcome] = []

    def _open(self, rows: RowBuffer, *, loads: bool) -> Tier:
        raise NotImplementedError

    def fill(self, keys: Sequence[str], write: Callable[[int, Bytes], None]) -> None:
        for row, key in enumerate(keys):
            write(row, self._from.row_view(row)[HEADER_BYTES:])
            put_header(self._from, row, key_of(key))

    def store(self, keys: Sequence[str]) -> None:
        outcomes, reasons = self._run(self._stores, self._stores.submit_store, keys)
        bad = [text for text in reasons if text]
        if any(outcome is not Outcome.DONE for outcome in outcomes):
            raise RuntimeError(f"{len(bad)} of {len(keys)} blocks were not stored: {bad[:2]}")

    def forget(self) -> None:
        for row in range(self.work.count):
            self._into.row_view(row)[::HEADER_BYTES] = 0xEE

    def load(self, keys: Sequence[str]) -> None:
        self._outcomes, _ = self._run(self._loads, self._loads.submit_load, keys)

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [
            self._into.row_view(row)[HEADER_BYTES:] if outcome is Outcome.DONE else None
            for row, outcome in enumerate(self._outcomes)
        ]

    def _run(
        self, tier: Tier, submit: Callable[[Job], None], keys: Sequence[str]
    ) -> tuple[list[Outcome], list[str]]:
        named = tuple(key_of(key) for key in keys)
        first = self._jobs
        for begin in range(0, len(named), BATCH):
            batch = slice(begin, begin + BATCH)
            submit(Job(self._jobs, named[batch], tuple(range(len(named)))[batch]))
            self._jobs += 1
        if not tier.drain(WAIT_S):
            raise RuntimeError(f"the tier did not finish in {WAIT_S:.0f} s")
        results = {result.job_id: result for result in tier.poll()}
        in_order = [results[job] for job in range(first, self._jobs)]
        return (
            [outcome for result in in_order for outcome in result.outcomes],
            [reason for result in in_order for reason in result.reasons],
        )

    def close(self) -> None:
        self._stores.close()
        self._loads.close()


class FilesystemWay(TierWay):
    def _open(self, rows: RowBuffer, *, loads: bool) -> Tier:
        work = self.work
        threads = work.depth
        if not loads:
            # Some of its threads never store.
            most = range(1, 4 * work.depth + 4)
            threads = next(n for n in most if store_threads_of(n) == work.depth)
        settings = FilesystemSettings(
            paths=(work.directory,),
            capacity=2 * work.capacity_blocks * rows.row_bytes + (1 << 30),
            threads=threads,
            queue_blocks=1 << 20,
            queue_bytes=1 << 40,
            probe_interval_s=0,
        )
        tier = FilesystemTier(make_context(rows), settings)
        if not tier.wait_until_known(30, scanned=True):
            raise RuntimeError(f"the tier does not get ready: {tier.describe()}")
        self.notes = [tier.describe()[0].partition(": ")[2]]
        return tier


class ObjectWay(TierWay):
    """Credentials come from the environment."""

    def _open(self, rows: RowBuffer, *, loads: bool) -> Tier:
        depth = self.work.depth
        options = self.work.options
        settings = ObjectSettings(
            url=f"s3://{options['bucket']}/{options['prefix']}",
            endpoint=options["endpoint"],
            region=options["region"],
            allow_http=True,
            rescan_s=0,
            concurrency=stores_of_object_tier(depth) if loads else depth,
            queue_blocks=1 << 20,
            queue_bytes=1 << 40,
        )
        tier = ObjectTier(make_context(rows), settings)
        if not tier.wait_until_known(30):
            raise RuntimeError(f"the tier does not get ready: {tier.describe()}")
        return tier


class RegionWay(Way):
    """From a tensor into the region and back, with the stack's metadata and rows' headers. The
    region holds some steps' blocks, so that each new one drives out an old one."""

    packages = ("kvquay", "torch", "numpy")

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        rows = work.capacity_blocks
        engine_id = f"peers-{os.getpid()}-{secrets.token_hex(4)}"
        self._region = Region.create(
            RegionSpec(
                engine_id=engine_id,
                run_id=engine_id,
                backing="memfd",
                rows=rows,
                slot_bytes=work.block_bytes,
                local_world_size=1,
                geometry_digest=hashlib.sha256(b"peers").hexdigest(),
            )
        )
        self._region.prefault(0)
        self._copiers = [
            GroupCopier(
                [torch.from_numpy(memory)],
                block_dim=0,
                slot=self._region.slot_view(0),
                blocks_per_chunk=1,
            )
            for memory in (self.source, self.target)
        ]
        headers = RowHeaders(self._region.row_headers(), bytes(32), [[work.block_bytes]])
        self._stack = TierStack(rows, PolicyRegistry().open("lru", rows), headers=headers)
        self._came = 0
        self.notes = [f"copies with {self._copiers[0].kernel}"]

    def store(self, keys: Sequence[str]) -> None:
        named = [bytes.fromhex(key) for key in keys]
        stored = self._stack.prepare_store(named)
        if len(stored.keys) != len(named):
            raise RuntimeError(f"{stored.short} of {len(named)} blocks got no row")
        self._copiers[0].store(_ids(len(named)), np.array(stored.rows[0], np.int64))
        self._stack.complete_store(stored.keys)

    def load(self, keys: Sequence[str]) -> None:
        named = [bytes.fromhex(key) for key in keys]
        self._came = self._stack.lookup(named).hits
        there = named[: self._came]
        loading = self._stack.prepare_load(there)
        self._copiers[1].load(_ids(len(there)), np.array(loading.rows[0], np.int64))
        self._stack.complete_load(there)

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if row < self._came else None for row in range(len(keys))]

    def close(self) -> None:
        for copier in self._copiers:
            copier.close()
        self._stack.close()
        self._region.close()


def _ids(count: int) -> Any:
    return np.arange(count, dtype=np.int64).reshape(-1, 1)


def make(work: Work) -> Way:
    ways: dict[str, Callable[[Work], Way]] = {
        "fs": FilesystemWay,
        "region": RegionWay,
        "object": ObjectWay,
    }
    return ways[work.options["kind"]](work)


if __name__ == "__main__":
    serve(make)
