"""`report.html`: one run for people who would rather look than read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.html import charts, figures
from orchestrator.html.charts import Line
from orchestrator.html.markup import Child, Html, tag
from orchestrator.html.page import card, facts, heading, page, table, tiles, verdict
from orchestrator.html.placement import placement
from orchestrator.html.tiers import COLOURS, tier_cards, tier_table, troubles
from orchestrator.plan import Plan
from orchestrator.series import Series
from orchestrator.values import leaves

Report = Mapping[str, Any]

_NOT_RECORDED = "this engine does not record its run over time"


def report_page(plan: Plan, report: Report, results: Sequence[Mapping[str, Any]]) -> bytes:
    """The page of a run that was started. `results` are the replicas' own, with histories."""
    series = Series.of(results)
    return page(
        f"{report['run_id']} - kvquay report",
        heading(
            "kvquay run report",
            report["run_id"],
            _when(plan.run.created_s),
            f"plan {plan.digest[:16]}",
        ),
        _verdict(plan, report),
        _failures(report),
        _summary(report),
        tag("h2", "Where prompt tokens came from"),
        _hits(report, series),
        tag("h2", "Placement"),
        card(placement(plan, report["failures"])),
        tag("h2", "Tiers"),
        card(tier_table(report)),
        tier_cards(plan, report, results, series),
        tag("h2", "Evictions and faults"),
        troubles(report, series),
        _vllm(report),
        tag("h2", "Configuration"),
        card(_configuration(plan, report)),
        tag("h2", "Machine"),
        card(_machine(report["machine"])),
    )


def invalid_page(report: Report) -> bytes:
    """The page of a configuration that nothing was started for."""
    problems = report["problems"]
    return page(
        f"{report['run_id']} - kvquay report",
        heading("kvquay run report", report["run_id"]),
        verdict("warn", "!", "Not started: the configuration is bad", "Nothing was changed."),
        tag("h2", _counted(len(problems), "problem")),
        [_problem(problem) for problem in problems],
        tag("h2", "Run it again"),
        card(tag("pre", report["reproduce"])),
    )


def _problem(problem: Mapping[str, str]) -> Html:
    value = problem["value"]
    return card(
        tag("h3", tag("code", problem["key"] + (f" = {value}" if value != "None" else ""))),
        tag("p", problem["limit"], class_="long"),
        tag("p", "What to do: ", problem["fix"], class_="long soft"),
    )


def _when(created_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(created_s))


def _verdict(plan: Plan, report: Report) -> Html:
    checked, status = report["verification"], report["status"]
    blocks, wrong = checked["blocks_checked"], checked["blocks_wrong"]
    compared = checked.get("requests_compared")
    if status == "failed":
        first = report["failures"][0] if report["failures"] else None
        words = "A replica ended without a result" if first is None else f"{_who(first)} failed"
        return verdict("bad", "✗", words, None if first is None else first["message"])
    if status == "interrupted":
        return verdict(
            "warn", "■", f"Interrupted by {report['signal']}", "What is here is partial."
        )
    if status == "wrong_bytes":
        if wrong:
            words = f"{wrong:,} of {blocks:,} loaded blocks held wrong bytes"
            return verdict(
                "bad", "✗", words, "They were found when they were loaded: none was served."
            )
        words = f"{checked['requests_different']:,} of {compared:,} answers differ"
        return verdict("bad", "✗", words, "With offload the engine did not answer as without it.")
    if compared:
        words = f"Verified: {compared:,} answers are those without offload"
        return verdict("good", "✓", words)
    mode = plan.settings.engine.verify
    if mode == "off":
        return verdict(
            "warn", "!", "Ran well, not verified", "engine.verify=off: no byte was compared."
        )
    how = "Every loaded block was" if mode == "all" else "A sample of the loaded blocks was"
    if not blocks:
        words = "Ran well, and nothing was loaded that could have been wrong"
        return verdict("warn", "!", words, "No block came back from a tier.")
    return verdict(
        "good", "✓", f"Verified: {blocks:,} blocks, none wrong", f"{how} compared byte for byte."
    )


def _who(failure: Mapping[str, Any]) -> str:
    if failure["replica"] is None:
        return "The run"
    rank = "" if failure["rank"] is None else f" rank {failure['rank']}"
    return f"Replica {failure['replica']}{rank}"


def _first_line(message: str) -> str:
    return message.partition("\n")[0]


def _failures(report: Report) -> Child:
    if not report["failures"]:
        return None
    return card(
        tag("h3", "What failed, first things first"),
        [
            tag(
                "details",
                tag("summary", f"{_who(failure)}: {_first_line(failure['message'])}"),
                tag("pre", failure["traceback"] or failure["message"]),
                tag("p", f"log: {failure['log']}", class_="note mono") if failure["log"] else None,
                open=number == 0,
            )
            for number, failure in enumerate(report["failures"])
        ],
    )


def _summary(report: Report) -> Html:
    replicas = report["replicas"]
    prompt = sum(replica["prompt_tokens"] for replica in replicas)
    hits = sum(sum(replica["hit_tokens"].values()) for replica in replicas)
    checked = report["verification"]
    found = [
        (figures.share(hits / prompt if prompt else None), "of prompt tokens found"),
        (figures.count(sum(replica["requests"] for replica in replicas)), "requests served"),
        (figures.count(checked["blocks_checked"]), "blocks checked"),
        (figures.count(checked["blocks_wrong"]), "blocks wrong"),
        (figures.seconds(report["ready_s"]), "until ready"),
        (figures.seconds(report["duration_s"]), "whole run"),
    ]
    estimate = report["ttft"]
    if estimate is not None:
        measured = estimate["measured_s"]
        found.append(
            (figures.seconds(estimate["mean_s"]), "to first token, estimated")
            if measured is None
            else (figures.seconds(measured), "to first token, mean")
        )
        found.append((figures.seconds(estimate["without_cache_s"]), "estimated without a cache"))
    return tiles(*found)


def _hits(report: Report, series: Series) -> Html:
    replicas = report["replicas"]
    if not replicas:
        return card(charts.empty("no replica ended with a result"))
    sources = list(replicas[0]["hit_tokens"])
    prompt = sum(replica["prompt_tokens"] for replica in replicas)
    found = {s: sum(replica["hit_tokens"][s] for replica in replicas) for s in sources}
    parts = [(_source(s), f"c-{_colour(s)}", float(found[s])) for s in sources]
    computed = max(0, prompt - sum(found.values()))
    parts.append(("computed", "c-computed", float(computed)))
    return card(
        charts.share_bar(parts, figures.count),
        tag("div", _hits_over_time(series, sources), class_="inner tall"),
        tag("details", tag("summary", "By replica"), _by_replica(replicas, sources)),
    )


def _hits_over_time(series: Series, sources: Sequence[str]) -> Html:
    title = "Prompt tokens per second, by where they came from"
    if not series.histories:
        return charts.chart(title, charts.empty(_NOT_RECORDED))
    rates = {s: series.rate(f"hit_tokens.{s}") for s in sources}
    prompt = series.rate("prompt_tokens")
    lines = [Line(_source(s), f"c-{_colour(s)}", rates[s]) for s in sources]
    computed = [
        max(0.0, all_of - sum(rates[s][n] for s in sources)) for n, all_of in enumerate(prompt)
    ]
    lines.append(Line("computed", "c-computed", computed))
    return charts.over_time(title, series.t_s, lines, figures.compact, stacked=True)


def _source(name: str) -> str:
    return {"device": "device cache", "shm": "region (shm)", "node": "other replicas' regions"}.get(
        name, name
    )


def _colour(name: str) -> str:
    return name if name in COLOURS else "plain"


def _by_replica(replicas: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> Html:
    rows: list[list[Child]] = []
    for replica in replicas:
        prompt, hits = replica["prompt_tokens"], replica["hit_tokens"]
        rows.append(
            [
                f"dp{replica['data_parallel_index']}",
                figures.count(replica["requests"]),
                figures.count(replica["rejected"]),
                figures.count(prompt),
                *(figures.count(hits[source]) for source in sources),
                figures.share(sum(hits.values()) / prompt if prompt else None),
            ]
        )
    columns = ("replica", "requests", "rejected", "prompt tokens", *map(_source, sources), "found")
    return table(columns, rows)


def _vllm(report: Report) -> Child:
    told = [(r["data_parallel_index"], r["vllm"]) for r in report["replicas"] if r.get("vllm")]
    if not told:
        return None
    rows: list[list[Child]] = []
    for index, vllm in told:
        bare = vllm.get("ttft_without_offload_s") or []
        ttft = vllm.get("ttft_s") or []
        rows.append(
            [
                f"dp{index}",
                figures.seconds(_median(ttft)),
                figures.seconds(_median(bare)),
                figures.count(vllm.get("requests_compared")),
                figures.count(vllm.get("requests_different")),
            ]
        )
    columns = ("replica", "median TTFT", "without offload", "answers compared", "different")
    return tag("div", tag("h2", "vLLM"), card(table(columns, rows)))


def _median(seconds: Sequence[float]) -> float | None:
    return sorted(seconds)[len(seconds) // 2] if seconds else None


def _configuration(plan: Plan, report: Report) -> list[Child]:
    topology, region = plan.topology, plan.region
    workload = plan.settings.workload
    shown: list[tuple[str, Child]] = [
        (
            "parallel",
            f"{_counted(topology.data_parallel_size, 'replica')}, each PP {topology.pp_size} x PCP "
            f"{topology.pcp_size} x TP {topology.tp_size} = "
            f"{_counted(topology.world_size, 'worker')}, DCP {topology.dcp_size}",
        ),
        ("model", f"{plan.model.name}, {plan.model.dtype}"),
        ("tiers", " → ".join(plan.settings.tiers.order)),
        (
            "region",
            f"{region.backing}, {figures.size(region.bytes_per_replica)} per replica: "
            f"{region.rows:,} rows of {figures.size(region.row_bytes)}, {region.tokens_per_row} "
            "tokens each",
        ),
        ("device cache", f"{plan.device_blocks:,} blocks a rank"),
        ("workload", f"{workload.kind}, {workload.path or f'seed {workload.seed}'}"),
        ("verify", plan.settings.engine.verify),
        ("run directory", tag("span", report["run_dir"], class_="mono")),
        ("run it again", tag("pre", report["reproduce"])),
    ]
    rows: list[list[Child]] = [
        [tag("code", key), tag("div", str(value), class_="wrap")]
        for key, value in leaves(plan.settings)
    ]
    every = tag("details", tag("summary", "Every key"), table(("key", "value"), rows, (0, 1)))
    return [facts(shown), every]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _machine(found: Mapping[str, Any]) -> Html:
    limit = found["memory_limit_bytes"]
    bounded = f", limited to {figures.size(limit)}" if limit < found["memory_bytes"] else ""
    packages = [f"{name} {number}" for name, number in found["packages"].items() if number]
    return facts(
        [
            ("host", found["host"]),
            ("system", f"{found['system']}, {found['architecture']}"),
            ("processor", f"{found['cpu'] or 'unknown'}, {found['cpus']} cores for this process"),
            ("memory", f"{figures.size(found['memory_bytes'])}{bounded}"),
            ("NUMA nodes", found["numa_nodes"] or 1),
            ("CUDA devices", found["cuda_devices"]),
            (
                "software",
                ", ".join([f"kvquay {found['kvquay']}", f"Python {found['python']}", *packages]),
            ),
        ]
    )
