"""Metrics and KV events of real replicas: scraped and subscribed to over TCP while they run."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from backends.events.publisher import END
from backends.events.wire import SPEC_KINDS, EventBatch
from backends.metrics.families import names
from orchestrator.plan import read_plan
from tests.orchestrator.harness import Launch, ahead, launched, ran_ahead

__all__ = ["ran_ahead"]
pytestmark = pytest.mark.multiproc

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TIMEOUT_S = 60.0


def free_ports(low: int, count: int) -> int:
    """The first of so many ports that are free now, from `low` on, which is below those that the
    system gives away. Tests that run beside each other have a `low` of their own."""
    for first in range(low + 8 * (os.getpid() % 256), low + 4096, 8):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError(f"no {count} free ports")


class Scrape:
    """Every sample of some replicas, added up over what they are labelled with."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float | None:
        found = [
            s.value
            for s in self.samples
            if s.name == name and labels.items() <= s.labels.items()
        ]  # fmt: skip
        return sum(found) if found else None

    def __add__(self, other: Scrape) -> Scrape:
        both = Scrape("")
        both.samples = self.samples + other.samples
        return both


def scrape(port: int) -> Scrape:
    with OPENER.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return Scrape(answer.read().decode())


def scrape_ended(launch: Launch, port: int) -> Scrape:
    """The last values of a replica, which are there until they are read."""

    def look() -> Scrape | None:
        try:
            found = scrape(port)
        except OSError:
            return None
        return found if found.value("kvquay_ended") == 1 else None

    return launch.wait(f"the last values at port {port}", look)


# What a tier's part of the report has under another name than the metrics.
SHARED = {
    "lookups": "lookups",
    "hits": "hits",
    "stores": "stores",
    "evictions": "evictions",
    "errors": "errors",
}
BELOW = SHARED | {
    name: name
    for name in ("shed", "late", "given_up", "passed_over", "no_room", "corrupt", "breaker_opened")
}
REGION = SHARED | {"shed": "skipped_stores"}


@ahead
def test_the_last_scrape_of_every_replica_is_what_the_report_says(home: Path) -> None:
    first = free_ports(20000, 2)
    with Launch(
        home,
        "profile=ci",
        "tiers=shm_fs",
        f"tiers.stack.fs.paths=[{home / 'disk'}]",
        "tiers.stack.fs.capacity=256MiB",
        f"metrics.port={first}",
        "metrics.linger_s=60",
    ) as launch:
        total = scrape_ended(launch, first) + scrape_ended(launch, first + 1)
        read_s = time.monotonic()
        assert launch.wait_end() == 0, launch.told()
        # Nobody waits for another scrape when one was made.
        assert time.monotonic() - read_s < 30
        assert launch.left() == []
        report = launch.report()

    assert {s.name for s in total.samples} <= names()
    for name, keys in (("shm", REGION), ("fs", BELOW)):
        tier = report["tiers"][name]
        for metric, key in keys.items():
            value = total.value(f"kvquay_{metric}_total", tier=name)
            assert value == tier[key], (name, metric)
        for metric in ("stored_bytes", "loaded_bytes"):
            assert total.value(f"kvquay_{metric}_total", tier=name) == tier[metric] > 0
        assert total.value("kvquay_never_read_blocks", tier=name) == tier["never_read"]
        assert total.value("kvquay_load_latency_seconds_count", tier=name) > 0
    fs, shm = report["tiers"]["fs"], report["tiers"]["shm"]
    assert fs["hits"] > 0
    assert 0 < fs["never_read"] < fs["stores"]
    assert 0 < shm["never_read"] < shm["stores"]
    assert total.value("kvquay_used_bytes", tier="shm") == shm["usage_bytes"]
    assert total.value("kvquay_pinned_bytes", tier="shm") == shm["pinned_bytes"]
    assert total.value("kvquay_capacity_bytes", tier="shm") == shm["capacity_bytes"]
    assert total.value("kvquay_capacity_bytes", tier="fs") == 2 * fs["capacity_bytes"]
    counters = fs["counters"]
    assert total.value("kvquay_quarantined_total", tier="fs") == counters["quarantined"]
    assert total.value("kvquay_breaker_open", tier="fs") == 0
    for replica in report["replicas"]:
        index = str(replica["data_parallel_index"])
        for metric in ("requests", "prompt_tokens", "output_tokens", "steps"):
            assert total.value(f"kvquay_{metric}_total", replica=index) == replica[metric]
        for source, tokens in replica["hit_tokens"].items():
            found = total.value("kvquay_hit_tokens_total", replica=index, source=source)
            assert found == tokens
        for worker in replica["workers"]:
            of = {"replica": index, "tier": "shm", "rank": str(worker["rank"])}
            stats = worker["stats"]
            assert total.value("kvquay_load_seconds_total", **of) == stats["loaded_s"]
            assert total.value("kvquay_load_latency_seconds_sum", **of) == stats["loaded_s"]
            loads = sum(stats["load_latency"]["counts"].values())
            assert total.value("kvquay_load_latency_seconds_count", **of) == loads
        for tier in ("shm", "fs"):
            for metric in ("fill_ratio", "oldest_block_seconds"):
                assert total.value(f"kvquay_{metric}", replica=index, tier=tier) > 0


@ahead
def test_metrics_move_while_a_replica_serves_and_its_events_say_what_it_holds(home: Path) -> None:
    """Two tiers, so that there are events of both; the run is ended by the test."""
    metrics = free_ports(24096, 3)
    events, replay = metrics + 1, metrics + 2
    with launched(
        home,
        "parallel=dp1_tp1",
        "tiers=shm_fs",
        f"tiers.stack.fs.paths=[{home / 'disk'}]",
        "tiers.stack.fs.capacity=256MiB",
        "workload.conversations=4000",
        f"metrics.port={metrics}",
        "metrics.refresh_s=0.1",
        f"events.port={events}",
        f"events.replay_port={replay}",
        "events.hashes=bytes",
    ) as launch:
        launch.wait_serving()
        batches = dict(subscribe(events, ("CPU", "STORAGE")))
        first = min(batches)
        # What was sent before anybody listened is asked for.
        batches.update(replayed(replay, 0, first))
        assert sorted(batches) == list(range(max(batches) + 1))
        plan = read_plan(launch.run.plan)
        check_events([batches[number] for number in sorted(batches)], plan.region.tokens_per_row)

        before = scrape(metrics)
        launch.wait("new values", lambda: newer(before, scrape(metrics)))
        after = scrape(metrics)
        for name in ("requests", "prompt_tokens"):
            assert after.value(f"kvquay_{name}_total") > before.value(f"kvquay_{name}_total")
        assert after.value("kvquay_ended") == 0
        assert after.value("kvquay_event_batches_total") > 0
        assert after.value("kvquay_event_batches_dropped_total") == 0
        assert after.value("kvquay_event_batches_replayed_total") > 0


def newer(before: Scrape, after: Scrape) -> bool:
    name = "kvquay_prompt_tokens_total"
    return after.value(name) > before.value(name)


def subscribe(port: int, media: tuple[str, ...]) -> Iterator[tuple[int, EventBatch]]:
    """Batches until blocks have come to all of these media, and some more."""
    awaited, more = set(media), 10
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        while more:
            assert subscriber.poll(TIMEOUT_S * 1000), "no events"
            _, seq, payload = subscriber.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
            awaited -= {event.medium for event in batch.events}
            more -= not awaited
            yield int.from_bytes(seq, "big"), batch


def replayed(port: int, start: int, end: int) -> Iterator[tuple[int, EventBatch]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            assert client.poll(TIMEOUT_S * 1000), "no replay"
            _, _, seq, payload = client.recv_multipart()
            if seq == END:
                return
            number = int.from_bytes(seq, "big")
            if number < end:
                yield number, msgspec.msgpack.decode(payload, type=EventBatch)


def check_events(batches: Iterable[EventBatch], tokens_per_row: int) -> None:
    """Nothing leaves a tier that did not come, and a parent comes before its child."""
    held: dict[Any, set[Any]] = defaultdict(set)
    come: set[Any] = set()
    for batch in batches:
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            where = held[event.medium, event.ownership]
            assert event.group_idx == 0
            if type(event).__name__ == "BlockRemoved":
                assert where.issuperset(event.block_hashes)
                where.difference_update(event.block_hashes)
                continue
            assert event.block_size == tokens_per_row
            assert event.kv_cache_spec_kind == SPEC_KINDS["full"]
            assert event.parent_block_hash is None or event.parent_block_hash in come
            where.update(event.block_hashes)
            come.update(event.block_hashes)
    assert held["CPU", None]
    assert held["STORAGE", "fs"] <= come
    assert held["STORAGE", "fs"]
