"""A vLLM engine in a process of its own, driven by a test: one JSON object a line, in and out.

`{"do": "ask", "prompts": [...]}` answers with tokens and cached tokens of each; `reset` empties the
device's prefix cache; `counters` are vLLM's own; `close` ends the engine, and what the tiers had
still to write is written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.engine_vllm.command import engine_arguments, kv_transfer_config
from orchestrator.engine_vllm.replica import counters_of, warm_up
from orchestrator.plan import read_plan


def main() -> None:
    plan_path, index, offload = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "offload"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to its standard output
    from vllm import LLM, SamplingParams

    plan = read_plan(Path(plan_path))
    arguments = engine_arguments(plan)
    if offload:
        arguments["kv_transfer_config"] = kv_transfer_config(plan, index)
    llm = LLM(**arguments, disable_log_stats=False)
    warm_up(llm, plan)

    def tell(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    tell("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["do"]:
            case "ask":
                told = []
                for prompt in asked["prompts"]:
                    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
                    [output] = llm.generate([prompt], parameters, use_tqdm=False)
                    told.append([list(output.outputs[0].token_ids), output.num_cached_tokens or 0])
                tell(told)
            case "reset":
                tell(llm.reset_prefix_cache())
            case "counters":
                tell(counters_of())
            case "close":
                llm.llm_engine.engine_core.shutdown()
                tell("closed")
                return


if __name__ == "__main__":
    main()
