"""Speed of the object tier against the client beneath it, boto3 and s3fs, on the same server.

    python benchmarks/object.py [--endpoint URL] [--bucket NAME] [--region NAME] [--json FILE]
                                [--rounds N] [--round-mib N] [--sizes 2MiB 256KiB]
                                [--at-once 1 8 32]

Without --endpoint a SeaweedFS of the development dependency is started on this machine. With one,
credentials come from the environment as for a run (AWS_ACCESS_KEY_ID, ...), http:// is allowed, and
a bucket is made and removed again unless --bucket names one; in that, everything under a prefix of
this benchmark's own is removed.

put     every block is new. The tier checks that, seals the block (64-bit checksum) and creates it;
        the bare client creates it too; the others just put. As many requests at a time for all.
get     of what was put. The tier puts the bytes into rows and checks headers and checksums; the
        others leave them where they are.

`client` is obstore, asynchronous, with the tier's own options: connections kept, payloads not
signed. boto3 has a thread for each request, s3fs its own loop, both with their defaults.

Every round puts new names and gets them, one client after the other in alternating order; a ratio
is the median over the rounds. All that comes back is compared byte for byte, outside the time.
CPU seconds are those of this whole process for each GB moved, whatever threads spent them.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository must be there.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import asyncio
import contextlib
import dataclasses
import secrets
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import boto3
import botocore.config
import fsspec.asyn
import numpy as np
import obstore
import s3fs

from backends.block import HEADER_BYTES, BlockKey
from backends.testing import RowBuffer, make_context, make_keys
from backends.tier.base import Job, Outcome
from backends.tier.object.connect import connect
from backends.tier.object.settings import ObjectSettings
from backends.tier.object.tier import ObjectTier
from benchmarks._blocks import in_turn, make_rows, put_header, stores_of_object_tier
from benchmarks._report import Cell, Report, make_parser, publish
from tests.servers.seaweedfs import SeaweedFs

BATCH = 16
SIZES = {"2MiB": 2 << 20, "256KiB": 256 << 10}
OTHERS = ("client", "boto3", "s3fs")


@dataclass(frozen=True, slots=True)
class Timed:
    """What moving `nbytes` took."""

    bytes_per_s: float
    cpu_s_per_gb: float


@contextlib.contextmanager
def timed(nbytes: int, into: list[Timed]) -> Iterator[None]:
    start_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    cpu_s, seconds = time.process_time() - cpu_s, time.perf_counter() - start_s
    into.append(Timed(nbytes / seconds, cpu_s / nbytes * 1e9))


class Way(Protocol):
    """One way to the same bucket. `names` and `blocks` belong together."""

    def put(self, names: Sequence[str]) -> None: ...

    def get(self, names: Sequence[str]) -> None: ...

    def check(self) -> None:
        """What the last `get` brought, byte for byte."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Place:
    """Where everybody stores, and the blocks that everybody stores: uint8 [count, row_bytes]."""

    settings: ObjectSettings
    rows: RowBuffer
    blocks: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        views = [self.rows.row_view(row) for row in range(self.rows.rows)]
        self.blocks = np.stack(views)


class TierWay:
    """The tier, as a leader uses it: batches, results by poll. One tier to store, one to load,
    each with `at_once` requests in flight. One load at a time is one that is waited for."""

    def __init__(self, place: Place, at_once: int) -> None:
        self._place = place
        self._into = RowBuffer(place.rows.rows, place.rows.row_bytes)
        self._put = self._tier(place.rows, at_once)
        stores = stores_of_object_tier(at_once)
        self._get = self._tier(self._into, stores)
        self._one_by_one = at_once < 2
        self._jobs = 0
        self._got = 0

    def _tier(self, rows: RowBuffer, stores: int) -> ObjectTier:
        settings = dataclasses.replace(
            self._place.settings, concurrency=stores, queue_blocks=1 << 20, queue_bytes=1 << 40
        )
        tier = ObjectTier(make_context(rows), settings)
        if not tier.wait_until_known(30):
            raise SystemExit(f"the tier does not get ready: {tier.describe()}")
        return tier

    def put(self, names: Sequence[str]) -> None:
        keys = keys_of(names)
        for row, key in enumerate(keys):
            put_header(self._place.rows, row, key)
        self._run(self._put, self._put.submit_store, keys, range(len(keys)))

    def get(self, names: Sequence[str]) -> None:
        self._got = len(names)
        many = 1 if self._one_by_one else self._got
        for begin in range(0, self._got, many):
            rows = range(begin, min(begin + many, self._got))
            self._run(self._get, self._get.submit_load, keys_of(names[begin : rows.stop]), rows)

    def check(self) -> None:
        for row in range(self._got):
            found = self._into.row_view(row)[HEADER_BYTES:]
            if not np.array_equal(found, self._place.blocks[row, HEADER_BYTES:]):
                raise SystemExit(f"tier: block {row} came back wrong")
            found[::HEADER_BYTES] ^= 0xEE

    def close(self) -> None:
        self._put.close()
        self._get.close()

    def _run(
        self,
        tier: ObjectTier,
        submit: Callable[[Job], None],
        keys: Sequence[BlockKey],
        rows: Sequence[int],
    ) -> None:
        for begin in range(0, len(keys), BATCH):
            self._jobs += 1
            batch = slice(begin, begin + BATCH)
            submit(Job(self._jobs, tuple(keys[batch]), tuple(rows[batch])))
        if not tier.drain(120):
            raise SystemExit("the tier did not finish in 120 s")
        results = tier.poll()
        bad = [r for result in results for r in result.reasons if r]
        if bad or any(o is not Outcome.DONE for result in results for o in result.outcomes):
            raise SystemExit(f"{len(bad)} of {len(keys)} blocks failed: {bad[:3]}")


def keys_of(names: Sequence[str]) -> tuple[BlockKey, ...]:
    return tuple(make_keys(name, 1)[0] for name in names)


class Kept:
    """What the ways besides the tier share: they keep what they get."""

    what = ""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._got: list[Any] = []

    def check(self) -> None:
        for row, data in enumerate(self._got):
            if not np.array_equal(np.frombuffer(data, np.uint8), self._place.blocks[row]):
                raise SystemExit(f"{self.what}: block {row} came back wrong")
        self._got = []

    def name(self, name: str) -> str:
        return f"{self.what}/{name}"


async def few_at_once(calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]], few: int) -> None:
    """All of them, `few` under way at any moment, begun in order."""
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(few):
            group.create_task(work())


class ClientWay(Kept):
    what = "client"

    def __init__(self, place: Place, at_once: int) -> None:
        super().__init__(place)
        self._at_once = at_once
        self._store = connect(place.settings)
        self._loop = asyncio.new_event_loop()

    def put(self, names: Sequence[str]) -> None:
        async def put(row: int, name: str) -> None:
            data = self._place.blocks[row]
            await obstore.put_async(
                self._store, self.name(name), data, mode="create", use_multipart=False
            )

        calls = [partial(put, row, name) for row, name in enumerate(names)]
        self._loop.run_until_complete(few_at_once(calls, self._at_once))

    def get(self, names: Sequence[str]) -> None:
        self._got = [None] * len(names)

        async def get(row: int, name: str) -> None:
            found = await obstore.get_async(self._store, self.name(name))
            self._got[row] = await found.bytes_async()

        calls = [partial(get, row, name) for row, name in enumerate(names)]
        self._loop.run_until_complete(few_at_once(calls, self._at_once))

    def close(self) -> None:
        self._loop.close()


class Boto3Way(Kept):
    what = "boto3"

    def __init__(self, place: Place, at_once: int) -> None:
        super().__init__(place)
        settings = place.settings
        self._client = boto3.client(
            "s3",
            endpoint_url=settings.endpoint,
            region_name=settings.region,
            config=botocore.config.Config(
                s3={"addressing_style": "path"}, max_pool_connections=at_once
            ),
        )
        self._where = {"Bucket": settings.bucket}
        self._threads = ThreadPoolExecutor(at_once)

    def put(self, names: Sequence[str]) -> None:
        def put(row: int, name: str) -> None:
            data = self._place.blocks[row].data
            self._client.put_object(Key=self._key(name), Body=bytes(data), **self._where)

        list(self._threads.map(put, range(len(names)), names))

    def get(self, names: Sequence[str]) -> None:
        def get(name: str) -> bytes:
            with self._client.get_object(Key=self._key(name), **self._where)["Body"] as body:
                data: bytes = body.read()
            return data

        self._got = list(self._threads.map(get, names))

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _key(self, name: str) -> str:
        return f"{self._place.settings.prefix}/{self.name(name)}"


class S3fsWay(Kept):
    what = "s3fs"

    def __init__(self, place: Place, at_once: int) -> None:
        super().__init__(place)
        settings = place.settings
        self._at_once = at_once
        self._fs = s3fs.S3FileSystem(
            endpoint_url=settings.endpoint,
            client_kwargs={"region_name": settings.region},
            config_kwargs={"s3": {"addressing_style": "path"}, "max_pool_connections": at_once},
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def put(self, names: Sequence[str]) -> None:
        async def put(row: int, name: str) -> None:
            await self._fs._pipe_file(self._path(name), bytes(self._place.blocks[row].data))

        self._run([partial(put, row, name) for row, name in enumerate(names)])

    def get(self, names: Sequence[str]) -> None:
        self._got = [None] * len(names)

        async def get(row: int, name: str) -> None:
            self._got[row] = await self._fs._cat_file(self._path(name))

        self._run([partial(get, row, name) for row, name in enumerate(names)])

    def close(self) -> None:
        self._fs.close_session(self._fs.loop, self._fs._s3)

    def _run(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        fsspec.asyn.sync(self._fs.loop, few_at_once, calls, self._at_once)

    def _path(self, name: str) -> str:
        settings = self._place.settings
        return f"{settings.bucket}/{settings.prefix}/{self.name(name)}"


WAYS: dict[str, Callable[[Place, int], Way]] = {
    "tier": TierWay,
    "client": ClientWay,
    "boto3": Boto3Way,
    "s3fs": S3fsWay,
}


@dataclass(slots=True)
class Result:
    rows: list[list[Cell]] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, block: str, at_once: int, found: dict[str, list[Timed]]) -> None:
        """A row of the table, and the tier's ratio to each of the others."""
        speeds = [statistics.median(t.bytes_per_s for t in found[way]) / 1e6 for way in WAYS]
        cpus = [statistics.median(t.cpu_s_per_gb for t in found[way]) for way in WAYS]
        ratios = []
        for other in OTHERS:
            pairs = zip(found["tier"], found[other], strict=True)
            ratio = statistics.median(t.bytes_per_s / o.bytes_per_s for t, o in pairs)
            ratios.append(ratio)
            self.ratios.setdefault(f"{what}/{other}", []).append(ratio)
            self.details[f"{what}/{other} {block} x{at_once}"] = ratio
        self.rows.append([what, block, at_once, *speeds, ratios[0], *cpus])

    def all_ratios(self) -> dict[str, float]:
        """Those of each size and number of requests, then their geometric means."""
        return self.details | {
            name: statistics.geometric_mean(ratios) for name, ratios in self.ratios.items()
        }


def measure(place: Place, block: str, at_once: int, rounds: int, out: Result) -> None:
    ways = {name: make(place, at_once) for name, make in WAYS.items()}
    puts: dict[str, list[Timed]] = {name: [] for name in ways}
    gets: dict[str, list[Timed]] = {name: [] for name in ways}
    count, row_bytes = place.blocks.shape

    def put(name: str, names: Sequence[str], into: list[Timed]) -> None:
        with timed(len(names) * row_bytes, into):
            ways[name].put(names)

    def get(name: str, names: Sequence[str], into: list[Timed]) -> None:
        with timed(len(names) * row_bytes, into):
            ways[name].get(names)
        ways[name].check()

    with contextlib.ExitStack() as closing:
        for way in ways.values():
            closing.callback(way.close)
        for number in range(-1, rounds):
            # The first round opens connections, and is not counted.
            some = count if number >= 0 else min(count, 2 * at_once)
            names = [f"{secrets.token_hex(8)}-{row}" for row in range(some)]
            into = (puts, gets) if number >= 0 else ({name: [] for name in ways},) * 2
            for step, found in zip((put, get), into, strict=True):
                in_turn(number, *(partial(step, name, names, found[name]) for name in ways))
            empty(place.settings)
    out.add("put", block, at_once, puts)
    out.add("get", block, at_once, gets)


def empty(settings: ObjectSettings) -> None:
    """Remove everything under the url."""
    store = connect(settings)
    names = [str(item["path"]) for page in obstore.list(store) for item in page]
    if names:
        obstore.delete(store, names)


@contextlib.contextmanager
def server(given: argparse.Namespace) -> Iterator[ObjectSettings]:
    """A place in a bucket, empty, removed at the end."""
    with contextlib.ExitStack() as closing:
        endpoint, bucket = given.endpoint, given.bucket
        if endpoint is None:
            started = SeaweedFs()
            closing.callback(started.close)
            started.launch()
            endpoint = started.account.endpoint
            os.environ |= started.account.environment()
        client = boto3.client("s3", endpoint_url=endpoint, region_name=given.region)
        closing.callback(client.close)
        if bucket is None:
            bucket = f"kvquay-bench-{secrets.token_hex(6)}"
            client.create_bucket(Bucket=bucket)
            closing.callback(client.delete_bucket, Bucket=bucket)
        settings = ObjectSettings(
            url=f"s3://{bucket}/kvquay-bench-{secrets.token_hex(6)}",
            endpoint=endpoint,
            region=given.region,
            allow_http=True,
            rescan_s=0,
        )
        closing.callback(empty, settings)
        yield settings


def main() -> None:
    parser = make_parser("The object tier against the bare client, boto3 and s3fs")
    parser.add_argument("--endpoint", help="of an S3 server; default: a SeaweedFS is started")
    parser.add_argument("--bucket", help="default: one is made and removed")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-mib", type=int, default=64)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 32])
    given = parser.parse_args()
    out = Result()
    with server(given) as settings:
        for block in given.sizes:
            count = (given.round_mib << 20) // SIZES[block]
            place = Place(settings, make_rows(SIZES[block], count))
            for at_once in given.at_once:
                measure(place, block, at_once, given.rounds, out)
    speeds = tuple(f"{way} MB/s" for way in WAYS)
    cpus = tuple(f"{way} CPU s/GB" for way in WAYS)
    publish(
        Report(
            title=(
                f"Object tier: {given.round_mib} MiB a round, median of {given.rounds} rounds, "
                f"{'SeaweedFS on this machine' if given.endpoint is None else 'S3 server'}"
            ),
            columns=("what", "block", "at once", *speeds, "tier/client", *cpus),
            rows=out.rows,
            ratios=out.all_ratios(),
        ),
        given.json,
    )


if __name__ == "__main__":
    main()
