"""A vLLM engine in a process of its own, driven by a test: one question, one answer.

The process is forked from one that has imported vLLM and done nothing else, because importing it
takes longer than starting an engine. `{"do": "ask", "prompts": [...]}` answers with tokens and
cached tokens of each; `reset` empties the device's prefix cache; `counters` are vLLM's own; `close`
ends the engine, and what the tiers had still to write is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.llm import LLM
from vllm.v1.worker import cpu_worker  # noqa: F401 - before the fork, not after

from orchestrator.engine_vllm.command import engine_arguments, kv_transfer_config
from orchestrator.engine_vllm.replica import counters_of, warm_up
from orchestrator.plan import Plan, read_plan


def serve(
    connection: Connection, plan_path: str, index: int, offload: bool, log: str, changes: Any
) -> None:
    """An engine of replica `index`, until `close` or the end of the connection. `changes` are to
    vLLM's engine arguments."""
    _print_to(log)
    plan = read_plan(Path(plan_path))
    with _engine(plan, index, offload, changes) as llm:
        warm_up(llm, plan)
        connection.send("ready")
        while True:
            try:
                asked = connection.recv()
            except EOFError:
                return
            match asked["do"]:
                case "ask":
                    connection.send([_answer(llm, prompt) for prompt in asked["prompts"]])
                case "reset":
                    connection.send(llm.reset_prefix_cache())
                case "counters":
                    connection.send(counters_of())
                case "close":
                    break
    connection.send("closed")


@contextmanager
def _engine(plan: Plan, index: int, offload: bool, changes: Any) -> Iterator[Any]:
    arguments = engine_arguments(plan) | changes
    if offload and "kv_transfer_config" not in changes:
        arguments["kv_transfer_config"] = kv_transfer_config(plan, index)
    wordless = not (Path(str(arguments["model"])) / "tokenizer.json").exists()
    llm = LLM(**arguments, disable_log_stats=False, skip_tokenizer_init=wordless)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _answer(llm: Any, prompt: Any) -> tuple[list[int], int]:
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    [output] = llm.generate([prompt], parameters, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def _print_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(file, standard)
