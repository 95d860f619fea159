"""One replica's process: a vLLM on the plan's region and tiers, and the workload's requests.

    python -m orchestrator.engine_vllm.replica --plan RUN_DIR/plan.json --replica 0

Requests are sent one after the other, so that what is computed together does not depend on time,
and the answers can be compared token by token with those of `--without-offload`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from backends.vllm.sources import REGION, source_of
from orchestrator.engine_vllm.command import engine_arguments, kv_transfer_config
from orchestrator.engine_vllm.prompts import prompt_tokens
from orchestrator.events import EventWriter
from orchestrator.plan import Plan, read_plan, write_atomic
from orchestrator.rundir import ReplicaDir, RunDir
from orchestrator.spawn.lifeline import die_with_parent
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec

SETTLE_S = 10.0
"""How long the last stores into the tiers may take, in steps of an idle engine."""


@dataclass
class Served:
    """What became of the requests. `answers` holds token ids, `ttft_s` one figure a request."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    duration_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


def serve(plan: Plan, index: int, events: EventWriter, *, offload: bool) -> Served:
    """Start the engine, replay this replica's share, stop the engine."""
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(plan)
    if offload:
        arguments["kv_transfer_config"] = kv_transfer_config(plan, index)
    llm = LLM(**arguments, skip_tokenizer_init=True, disable_log_stats=False)
    try:
        if offload:
            # Nothing is loaded before the engine has computed once: see docs/vllm.md.
            warm_up(llm, plan)
            events.write("ready")
        return _replay(llm, SamplingParams, plan, index, events)
    finally:
        llm.llm_engine.engine_core.shutdown()


def warm_up(llm: Any, plan: Plan) -> None:
    """One prompt that is stored nowhere, as it fills no block."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [7] * min(8, plan.cache.tokens_per_block - 1)}
    llm.generate([prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def _replay(llm: Any, sampling: Any, plan: Plan, index: int, events: EventWriter) -> Served:
    vllm = plan.settings.engine.vllm
    config = llm.llm_engine.vllm_config.model_config
    vocabulary, longest = config.get_vocab_size(), config.max_model_len
    spec = workload_spec(plan.settings.workload, plan.cache)
    served, before, began_s = Served(), counters_of(), time.monotonic()
    for request in stream_for_replica(spec, plan.topology.data_parallel_size, index):
        answer_tokens = max(1, min(request.output_tokens, vllm.max_output_tokens))
        if request.prompt_tokens + answer_tokens > longest:
            served.rejected += 1
            continue
        tokens = prompt_tokens(request, plan.cache.tokens_per_hash, vocabulary, longest)
        parameters = sampling(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        [output] = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        served.requests += 1
        served.prompt_tokens += len(tokens)
        served.output_tokens += len(output.outputs[0].token_ids)
        served.cached_tokens += output.num_cached_tokens or 0
        served.answers.append(list(output.outputs[0].token_ids))
        if output.metrics is not None and output.metrics.first_token_latency:
            served.ttft_s.append(output.metrics.first_token_latency)
        events.write(
            "progress",
            requests=served.requests,
            rejected=served.rejected,
            prompt_tokens=served.prompt_tokens,
            hit_tokens=served.cached_tokens,
            copied_bytes=0,
        )
    served.duration_s = time.monotonic() - began_s
    after = counters_of()
    served.counters = {name: value - before.get(name, 0) for name, value in after.items()}
    return served


def counters_of() -> dict[str, float]:
    """vLLM's own counters by name, labels of a kind behind it where there are several.

    `LLM.get_metrics` has them too, in whole numbers: a counter of seconds stays 0 there for long.
    """
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        if family.type != "counter" or not family.name.startswith("vllm:"):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            kept = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            name = family.name + "".join(f"|{k}={v}" for k, v in sorted(kept.items()))
            found[name] = found.get(name, 0.0) + sample.value
    return found


def run(plan: Plan, index: int, directory: ReplicaDir, events: EventWriter) -> None:
    """Serve with offload, then without if that is asked for, and write the result."""
    stack = Path(directory.path) / "stack.json"
    stack.unlink(missing_ok=True)
    served = serve(plan, index, events, offload=True)
    told: dict[str, Any] = msgspec.json.decode(stack.read_bytes())
    bare: Served | None = None
    if plan.settings.engine.vllm.compare:
        bare = serve(plan, index, events, offload=False)
    write_atomic(directory.result, msgspec.json.encode(_result(plan, index, served, bare, told)))


def _result(
    plan: Plan, index: int, served: Served, bare: Served | None, stack: dict[str, Any]
) -> dict[str, Any]:
    """As a leader of the reference engine writes it, and `vllm` beside it."""
    counters = served.counters

    def cached(source: str) -> int:
        return int(counters.get(f"vllm:prompt_tokens_cached_by_source|source={source}", 0))

    different = (
        None
        if bare is None
        else sum(a != b for a, b in zip(served.answers, bare.answers, strict=True))
    )
    return {
        "data_parallel_index": index,
        "engine_id": plan.replicas[index].engine_id,
        "stats": {
            "requests": served.requests,
            "rejected": served.rejected,
            "prompt_tokens": served.prompt_tokens,
            "output_tokens": served.output_tokens,
            "hit_tokens_device": cached("device"),
            "hit_tokens_shm": cached(REGION),
            "hit_tokens_below": {name: cached(source_of(name)) for name in stack["lower_tiers"]},
            "steps": 0,
            "skipped_lines": 0,
        },
        "primary": stack["primary"],
        "rows_used": stack["rows_used"],
        "lower_tiers": stack["lower_tiers"],
        "drained": stack["drained"],
        "events": None,
        "workers": [
            {"rank": worker.rank, "duration_s": served.duration_s, "stats": _copies(counters)}
            for worker in plan.replicas[index].workers[:1]
        ],
        "vllm": {
            "ttft_s": served.ttft_s,
            "ttft_without_offload_s": None if bare is None else bare.ttft_s,
            "requests_compared": None if bare is None else len(bare.answers),
            "requests_different": different,
            "counters": {k: v for k, v in counters.items() if "cache" in k or "kv_offload" in k},
        },
    }


def _copies(counters: dict[str, float]) -> dict[str, Any]:
    """vLLM adds these up over a replica's workers."""
    return {
        "stored_bytes": int(counters.get("vllm:kv_offload_store_bytes", 0)),
        "stored_s": counters.get("vllm:kv_offload_store_time", 0.0),
        "loaded_bytes": int(counters.get("vllm:kv_offload_load_bytes", 0)),
        "loaded_s": counters.get("vllm:kv_offload_load_time", 0.0),
        "blocks_checked": 0,
        "blocks_wrong": 0,
        "load_latency": {"counts": {}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="one replica of a plan, as a vLLM engine")
    parser.add_argument("--plan", required=True, help="path of plan.json")
    parser.add_argument("--replica", type=int, required=True, help="data_parallel_index")
    parser.add_argument("--digest", help="what the plan's digest must be")
    parser.add_argument("--parent-pid", type=int, help="die with this process")
    args = parser.parse_args()
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    plan = read_plan(Path(args.plan), expected_digest=args.digest)
    directory = RunDir(Path(plan.run.run_dir)).replica(args.replica)
    directory.make()
    with contextlib.closing(EventWriter(directory.events(0))) as events:
        events.write("started", pid=os.getpid())
        try:
            run(plan, args.replica, directory, events)
        except BaseException as error:
            failure = {
                "rank": 0,
                "exit_code": 1,
                "t": time.time(),
                "message": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                "log": str(directory.stderr(0)),
            }
            write_atomic(directory.failure, msgspec.json.encode(failure))
            raise
        events.write("done")


if __name__ == "__main__":
    main()
