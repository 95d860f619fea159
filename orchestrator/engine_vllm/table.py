"""What a report tells people of vLLM's answers, in one line."""

from __future__ import annotations

from statistics import median
from typing import Any


def answers_line(report: dict[str, Any]) -> str | None:
    """How the answers compare, and the time to the first token; None for another engine."""
    told = [replica["vllm"] for replica in report["replicas"] if replica["vllm"]]
    if not told:
        return None
    first = f"median TTFT {_median([s for vllm in told for s in vllm['ttft_s']])}"
    checked = report["verification"]
    if "requests_compared" not in checked:
        return f"vllm: {first}, answers not compared (engine.vllm.compare)"
    bare = _median([s for vllm in told for s in vllm["ttft_without_offload_s"]])
    different = checked["requests_different"]
    same = checked["requests_compared"] - different
    return (
        f"vllm: {same:,} answers as without offload, {different:,} others; {first}, "
        f"{bare} without offload"
    )


def _median(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ms" if seconds else "-"
