"""What a simulated stack came to, for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from backends.units import format_size
from orchestrator.simulate.compare import Figure


def show_stack(console: Console, found: dict[str, Any], *, timed: Collection[str]) -> None:
    """Hits by source, and what each tier moved; how long it took for those that are `timed`."""
    total, prompt = sum(found["hit_tokens"].values()), found["prompt_tokens"]
    rejected = f", {found['rejected']:,} rejected" if found["rejected"] else ""
    console.print(
        f"{found['requests']:,} requests{rejected} on {len(found['replicas']):,} replicas, "
        f"{prompt:,} prompt tokens, {_share(total, prompt)} of them hit",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier")
    names = ["hit tokens", "hits", "stored", "loaded", "evictions", "filled", "shed"]
    for name in (*names, "mean load") if timed else names:
        table.add_column(name, justify="right")
    for name, tokens in found["hit_tokens"].items():
        tier = found["tiers"].get(name)
        cells = [name, f"{tokens:,}", _share(tokens, prompt)]
        if tier is not None:
            capacity = tier["capacity_bytes"]
            cells += [
                format_size(tier["stored_bytes"]),
                format_size(tier["loaded_bytes"]),
                f"{tier['evictions']:,}",
                format_size(tier["usage_bytes"])
                if capacity is None
                else _share(tier["usage_bytes"], capacity),
                f"{tier.get('shed', 0):,}",
            ]
            if timed:
                cells.append(_ms(tier["load_latency_s"]["mean"]) if name in timed else "-")
        table.add_row(*cells)
    console.print(table)
    if timed:
        _show_first_tokens(console, found["ttft"])


def _show_first_tokens(console: Console, ttft: dict[str, Any]) -> None:
    before, after = ttft["without_s"], ttft["with_s"]
    slower = f"; {ttft['slower']:,} requests would be slower" if ttft["slower"] else ""
    console.print(
        f"time to first token at {ttft['tokens_per_s']:,.0f} tokens/s a replica: "
        f"mean {_ms(before['mean'])} without hits, {_ms(after['mean'])} with them, "
        f"p95 {_ms(before['p95'])} and {_ms(after['p95'])}; "
        f"{ttft['saved_s']:,.1f} s saved, {ttft['saved_share']:.1%}{slower}",
        highlight=False,
    )


def show_comparison(console: Console, figures: Sequence[Figure], remarks: Sequence[str]) -> None:
    """A line a figure; what misses its goal is marked."""
    for remark in remarks:
        console.print(f"note: {remark}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure")
    for name in ("predicted", "measured", "error", "goal"):
        table.add_column(name, justify="right")
    table.add_column("")
    for figure in figures:
        table.add_row(
            figure.name,
            _value(figure.predicted, figure.unit),
            _value(figure.measured, figure.unit),
            "-" if figure.error is None else f"{figure.error:+.1%}" if figure.error else "0",
            f"{figure.goal:.0%}" if figure.goal else "exact",
            "" if figure.met else "missed",
        )
    console.print(table)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_size(int(value))
    return _ms(value) if unit == "s" else f"{value:,.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.2f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
