"""Metrics: a snapshot as Prometheus has it, served while the leader goes on, and the dashboard."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from backends.histogram import LatencyHistogram
from backends.metrics.ages import Ages
from backends.metrics.exporter import Exporter, MetricsError
from backends.metrics.families import (
    COUNTS,
    ENGINE_COUNTS,
    EVENT_COUNTS,
    LATENCY_BOUNDS_S,
    cumulative,
    families,
    names,
)
from backends.metrics.snapshot import Moved, ReplicaSnapshot, TierSnapshot
from backends.policy.lru import Lru
from backends.stack.observer import PRIMARY
from backends.stack.stack import TierStack
from backends.stack.unread import Unread
from tests.kit import REPO

DASHBOARD = REPO / "docs" / "grafana" / "kvquay.json"
DOCS = REPO / "docs" / "metrics.md"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def snapshot(*, ended: bool = False, value: int = 7) -> ReplicaSnapshot:
    """One with everything that there can be."""
    moved = Moved(0, value, value, 0.5, 0.25, {0: 1, 200: 2}, 0.125)
    region = TierSnapshot(
        "shm",
        dict.fromkeys(COUNTS, value),
        (moved,),
        used_bytes=value,
        blocks=value,
        never_read=value,
        capacity_bytes=100,
        pinned_bytes=25,
        oldest_s=2.5,
        breaker_open=False,
    )
    bucket = TierSnapshot(
        "object", {"lookups": value}, (), 50, 5, 0, capacity_bytes=None, breaker_open=True
    )
    return ReplicaSnapshot(
        3,
        "run_dp3",
        "tiny",
        taken_s=1e9,
        ended=ended,
        tiers=(region, bucket),
        hit_tokens={"device": value, "shm": value},
        engine=dict.fromkeys(ENGINE_COUNTS, value),
        events=dict.fromkeys(EVENT_COUNTS, value),
    )


def series(found: ReplicaSnapshot) -> dict[tuple[str, ...], float]:
    """Values by name, tier, rank and source; histograms' buckets apart."""
    return {
        (s.name, *(s.labels[key] for key in ("tier", "rank", "source") if key in s.labels)): s.value
        for family in families(found)
        for s in family.samples
        if "le" not in s.labels
    }


def test_the_names_are_all_that_there_are_and_a_full_snapshot_has_them_all() -> None:
    assert {s.name for family in families(snapshot()) for s in family.samples} == names()


def test_all_samples_say_which_replica_they_are_of() -> None:
    for family in families(snapshot()):
        assert family.documentation
        assert all(sample.labels["replica"] == "3" for sample in family.samples)


def test_fill_and_pinned_are_apart_and_missing_where_there_is_no_limit() -> None:
    found = series(snapshot())
    assert found["kvquay_fill_ratio", "shm"] == 0.07
    assert found["kvquay_pinned_ratio", "shm"] == 0.25
    assert found["kvquay_used_bytes", "object"] == 50
    assert ("kvquay_fill_ratio", "object") not in found
    assert ("kvquay_capacity_bytes", "object") not in found
    assert ("kvquay_oldest_block_seconds", "object") not in found


def test_a_tier_that_is_taken_out_is_seen() -> None:
    found = series(snapshot())
    assert found["kvquay_breaker_open", "shm"] == 0
    assert found["kvquay_breaker_open", "object"] == 1


@given(st.lists(st.floats(1e-7, 100.0), max_size=60))
def test_a_histogram_counts_all_loads_and_is_within_its_own_buckets(seconds: list[float]) -> None:
    histogram = LatencyHistogram()
    for each in seconds:
        histogram.add(each)
    buckets = cumulative(histogram.counts)
    assert buckets[-1] == ("+Inf", len(seconds))
    for bound_s, (text, count) in zip(LATENCY_BOUNDS_S, buckets, strict=False):
        assert float(text) == bound_s
        at_most = sum(each <= bound_s for each in seconds)
        surely = sum(each <= bound_s / 1.06 for each in seconds)
        assert surely <= count <= at_most


# Served over HTTP.


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with closing(Exporter(0)) as opened:
        yield opened


def scrape(exporter: Exporter, path: str = "/metrics") -> str:
    with OPENER.open(f"http://127.0.0.1:{exporter.port}{path}", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def test_a_scrape_is_the_last_snapshot(exporter: Exporter) -> None:
    assert scrape(exporter) == ""
    for value in (1, 2):
        exporter.show(snapshot(value=value))
        found = {
            s.name: s.value
            for family in text_string_to_metric_families(scrape(exporter))
            for s in family.samples
        }
        assert found["kvquay_requests_total"] == value
        assert set(found) == names()


def test_a_scrape_never_mixes_two_snapshots(exporter: Exporter) -> None:
    exporter.show(snapshot(value=0))
    stop = threading.Event()

    def leader() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            exporter.show(snapshot(value=value))

    thread = threading.Thread(target=leader)
    thread.start()
    try:
        for _ in range(10):
            lines = re.findall(r"^kvquay_\w+_total\{.* (\S+)$", scrape(exporter), re.MULTILINE)
            assert len({line for line in lines if line not in ("0.5", "0.25")}) == 1
    finally:
        stop.set()
        thread.join()


def test_only_a_whole_scrape_of_the_last_values_ends_the_wait_for_one(exporter: Exporter) -> None:
    exporter.show(snapshot())
    scrape(exporter)
    assert not exporter.wait_read(0)
    exporter.show(snapshot(ended=True))
    head = urllib.request.Request(f"http://127.0.0.1:{exporter.port}/", method="OPTIONS")
    OPENER.open(head, timeout=20).close()
    assert not exporter.wait_read(0)
    scrape(exporter)
    assert exporter.wait_read(20)


def test_a_client_that_sends_nothing_keeps_nobody_from_scraping(exporter: Exporter) -> None:
    exporter.show(snapshot())
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert "kvquay_requests_total" in scrape(exporter)


def test_a_port_that_is_taken_is_told(exporter: Exporter) -> None:
    with pytest.raises(MetricsError, match=rf"127\.0\.0\.1:{exporter.port}: .*choose another port"):
        Exporter(exporter.port)


def test_a_closed_exporter_leaves_neither_port_nor_thread() -> None:
    before = threading.active_count()
    exporter = Exporter(0)
    port = exporter.port
    exporter.close()
    assert threading.active_count() == before
    with closing(Exporter(port)) as again:
        assert again.port == port


# What the stack counts for it.


def keys(start: int, end: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in range(start, end)]


def stack_with(*observers: Any) -> TierStack:
    return TierStack(4, Lru(4), observers=observers)


def stored(stack: TierStack, run: list[bytes]) -> None:
    stack.prepare_store(run)
    stack.complete_store(run)


def test_what_is_stored_and_never_loaded_is_counted_also_when_it_is_gone() -> None:
    stack = stack_with()
    stored(stack, keys(0, 4))
    assert stack.region_report()["never_read"] == 4
    stack.prepare_load(keys(0, 1))
    assert stack.region_report()["never_read"] == 3
    stack.complete_load(keys(0, 1))
    stack.prepare_load(keys(0, 1))  # a second read changes nothing
    assert stack.region_report()["never_read"] == 3
    stored(stack, keys(10, 12))
    assert stack.counters.evictions == 2
    # Two of the three went unread, and the two that came are.
    assert stack.region_report()["never_read"] == 5


def test_what_is_filled_and_what_is_pinned_are_apart() -> None:
    stack = stack_with()
    stored(stack, keys(0, 3))
    assert stack.region_report()["rows_pinned"] == 0
    stack.prepare_load(keys(0, 2))
    report = stack.region_report()
    assert (report["rows"], report["rows_used"], report["rows_pinned"]) == (4, 3, 2)
    # One that is forgotten while it is read still has its row.
    stack.complete_load(keys(0, 2), failed=keys(0, 1))
    assert stack.region_report()["rows_pinned"] == 0
    stack.prepare_load(keys(1, 2))
    stack.reset()
    report = stack.region_report()
    assert (report["rows_used"], report["rows_pinned"]) == (0, 1)


def test_memory_for_what_was_not_read_is_bounded_and_the_count_is_right() -> None:
    unread: Unread[bytes] = Unread(300)
    for start in range(0, 5000, 100):
        unread.written(keys(start, start + 100))
    assert unread.count == 5000
    unread.read(keys(0, 5000))
    # Those that were let go of stay counted.
    assert unread.count == 5000 - 300


def test_the_oldest_entry_is_the_one_that_came_first_of_those_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("backends.metrics.ages.time.monotonic", lambda: now[0])
    ages = Ages()
    stack = stack_with(ages)
    assert ages.oldest_s() is None
    for n in range(4):
        stored(stack, keys(n, n + 1))
        now[0] += 1
    assert ages.oldest_s() == 4
    stored(stack, keys(10, 11))
    assert stack.counters.evictions == 1
    assert ages.oldest_s() == 3
    ages.stored("fs", 0, keys(20, 21))
    ages.removed("fs", 0, keys(1, 2))
    assert ages.oldest_s() == 3
    ages.removed(PRIMARY, 0, [*keys(0, 4), *keys(10, 11)])
    assert ages.oldest_s() is None


# The dashboard and the page.


def used_names(text: str) -> set[str]:
    return set(re.findall(r"\bkvquay_\w+", text))


def test_the_dashboard_asks_for_nothing_that_does_not_exist_and_for_nearly_all_that_does() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in panels(dashboard) for target in panel["targets"]]
    queries = [target["expr"] for target in targets]
    variables = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    asked = used_names("\n".join(queries + variables))
    assert asked <= names(), asked - names()
    unseen = {"kvquay_snapshot_timestamp_seconds", "kvquay_ended"}
    unseen |= {f"kvquay_load_latency_seconds_{part}" for part in ("sum", "count")}
    assert names() - asked <= unseen


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["title"]
    assert dashboard["id"] is None
    assert {v["name"] for v in dashboard["templating"]["list"]} >= {"datasource", "replica"}
    found = panels(dashboard)
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in found:
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert 'replica=~"$replica"' in target["expr"]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_page_explains_every_name() -> None:
    named = used_names(DOCS.read_text())
    histogram = {f"kvquay_load_latency_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert names() - histogram <= named
    assert "kvquay_load_latency_seconds" in named
    assert named <= names() | {"kvquay_load_latency_seconds"}
