"""The tiers of a run: what each held, how fast it was, what went wrong in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from backends.histogram import BUCKET_RATIO, FIRST_BUCKET_S, LatencyHistogram
from orchestrator.html import charts, figures
from orchestrator.html.charts import Line
from orchestrator.html.markup import Child, Html, tag
from orchestrator.html.page import card, table
from orchestrator.plan import Plan
from orchestrator.series import Series

COLOURS: Final = ("device", "shm", "fs", "object", "node")
PERCENTILES: Final = (50, 90, 95, 99, 99.9)

# What can go wrong in a tier, in the words of the report, and what it means.
FAULTS: Final = {
    "errors": "blocks that could not be stored, loaded or used",
    "corrupt": "damaged blocks, put into quarantine and not served",
    "shed": "stores given up for want of room or time",
    "skipped_stores": "stores for which the region had no room",
    "late": "no answer before the deadline",
    "given_up": "loads that were not waited for any longer",
    "passed_over": "entries slower to load than to compute",
    "no_room": "promotions that the region had no room for",
    "breaker_opened": "times that the tier was taken out because all of its jobs failed",
}
_SHM: Final = "shm"


def tier_table(report: Mapping[str, Any]) -> Html:
    rows: list[list[Child]] = []
    for name, tier in report["tiers"].items():
        latency, capacity = tier["load_latency_s"], tier["capacity_bytes"]
        filled = tier["usage_bytes"] / capacity if capacity else None
        rows.append(
            [
                name,
                figures.count(tier["lookups"]),
                figures.share(tier["hits"] / tier["lookups"] if tier["lookups"] else None),
                figures.size(tier["stored_bytes"]),
                figures.rate(tier["store_bytes_per_s"]),
                figures.size(tier["loaded_bytes"]),
                figures.rate(tier["load_bytes_per_s"]),
                figures.seconds(latency["p50"]),
                figures.seconds(latency["p99"]),
                figures.size(tier["usage_bytes"]) + ("" if filled is None else f" ({filled:.0%})"),
                figures.count(tier["evictions"]),
                figures.count(tier["never_read"]),
                tag("span", figures.count(tier["errors"]), class_="wrong" * bool(tier["errors"])),
            ]
        )
    columns = (
        *("tier", "lookups", "hit", "stored", "store rate", "loaded", "load rate", "load p50"),
        *("p99", "held", "evictions", "never read", "errors"),
    )
    return table(columns, rows)


def tier_cards(
    plan: Plan,
    report: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    series: Series,
) -> list[Html]:
    """Each tier's traffic, speed, latency and what waits for it."""
    return [
        _tier(plan, name, latencies(name, results), series) for name in report["tiers"] if results
    ]


def latencies(name: str, results: Sequence[Mapping[str, Any]]) -> LatencyHistogram:
    """How long loads took, of all replicas: of the region, each rank's copies of one step."""
    merged = LatencyHistogram()
    for result in results:
        if name == _SHM:
            told = [worker["stats"]["load_latency"] for worker in result["workers"]]
        else:
            told = [result["lower_tiers"][name]["load_latency"]]
        for one in told:
            merged.merge(LatencyHistogram({int(b): n for b, n in one["counts"].items()}))
    return merged


def curve(histogram: LatencyHistogram) -> list[tuple[float, float]]:
    """(seconds, the share of loads that took at most so long), bucket by bucket."""
    total, seen, points = sum(histogram.counts.values()), 0, []
    for bucket in sorted(histogram.counts):
        seen += histogram.counts[bucket]
        points.append((FIRST_BUCKET_S * float(BUCKET_RATIO ** (bucket + 0.5)), seen / total))
    return points


def _tier(plan: Plan, name: str, latency: LatencyHistogram, series: Series) -> Html:
    colour = f"c-{name}" if name in COLOURS else "c-plain"
    moved = "rank 0's copies of each replica" if name == _SHM else None
    loads = curve(latency)
    drawings: list[Html] = []
    if series.histories:
        drawings.append(_lines(series, "Moved per second", name, "bytes", moved))
        drawings.append(_lines(series, "Speed while moving", name, "speed", moved))
    drawings.append(charts.within("Loads that took at most", [(name, colour, loads)] * bool(loads)))
    if series.histories:
        drawings.append(_region_rows(plan, series) if name == _SHM else _queue(series, name))
    title = "Region (shm)" if name == _SHM else f"Tier {name}"
    return card(
        tag("h3", title),
        tag("div", drawings, class_="inner"),
        _percentiles(latency),
    )


def _lines(series: Series, title: str, name: str, what: str, note: str | None) -> Html:
    lines = []
    for verb, key, seconds in (("load", "loaded", "load_s"), ("store", "stored", "store_s")):
        bytes_name = f"{name}.{key}_bytes"
        values: Sequence[float | None] = (
            series.rate(bytes_name)
            if what == "bytes"
            else series.ratio(bytes_name, f"{name}.{seconds}")
        )
        lines.append(Line(verb, f"c-{verb}", values))
    return charts.over_time(title, series.t_s, lines, figures.rate, note=note)


def _queue(series: Series, name: str) -> Html:
    lines = [
        Line("load", "c-load", series.level(f"{name}.loading")),
        Line("store", "c-store", series.level(f"{name}.storing")),
    ]
    return charts.over_time("Blocks queued or under way", series.t_s, lines, figures.compact)


def _region_rows(plan: Plan, series: Series) -> Html:
    rows = plan.region.rows * len(plan.replicas)
    lines = [
        Line("rows used", "c-shm", series.level("shm.rows_used")),
        Line("in use by a transfer", "c-store", series.level("shm.rows_pinned")),
    ]
    note = f"of {rows:,} rows of all replicas"
    return charts.over_time("Rows of the region", series.t_s, lines, figures.compact, note=note)


def _percentiles(latency: LatencyHistogram) -> Child:
    count = sum(latency.counts.values())
    if not count:
        return None
    values = [figures.seconds(latency.percentile_s(p)) for p in (*PERCENTILES, 100)]
    columns = ("loads", *(f"p{p}" for p in PERCENTILES), "slowest")
    return table(columns, [[figures.count(count), *values]])


def troubles(report: Mapping[str, Any], series: Series) -> Html:
    """Evictions and faults over time, and each kind of fault that there was."""
    tiers = report["tiers"]
    rows: list[list[Child]] = [
        [name, fault.replace("_", " "), figures.count(tier[fault]), meaning]
        for name, tier in tiers.items()
        for fault, meaning in FAULTS.items()
        if tier.get(fault)
    ]
    told: Child = table(("tier", "what", "how often", "meaning"), rows, (0, 1, 3))
    if not rows:
        words = "No block was damaged, late, shed or lost in any tier."
        told = tag("p", words if report["replicas"] else "No replica told.", class_="soft")
    drawn = [
        _events(series, list(tiers), "Evictions per second", "evictions", "nothing was evicted"),
        _events(series, list(tiers), "Faults per second", "faults", "no faults"),
    ]
    return card(tag("div", drawn, class_="inner") if series.histories else "", told)


def _events(series: Series, names: Sequence[str], title: str, what: str, none: str) -> Html:
    there = [name for name in names if series.total(f"{name}.{what}")]
    if not there:
        return charts.chart(title, charts.empty(none))
    lines = [
        Line(name, f"c-{name}" if name in COLOURS else "c-plain", series.rate(f"{name}.{what}"))
        for name in there
    ]
    if len(there) == 1:
        title += f", {there[0]}"
    return charts.over_time(title, series.t_s, lines, figures.compact)
