"""`action=export`: the commands by which people start vLLM themselves on a plan."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from orchestrator.engine_vllm.command import serve_command
from orchestrator.engine_vllm.program import serve_program
from orchestrator.plan import Plan


def print_commands(console: Console, plan: Plan, environment: Mapping[str, str]) -> None:
    """For each replica its `vllm serve`, one a line, to be pasted into a shell."""
    program = serve_program(environment)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    for replica in plan.replicas:
        say(f"# replica {replica.data_parallel_index}, engine {replica.engine_id}")
        say(serve_command(plan, replica.data_parallel_index, program))
    if len(plan.replicas) > 1:
        say("# instead of these, one vLLM that makes all replicas itself:")
        say(f"# {serve_command(plan, None, program)}")
