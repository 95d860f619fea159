"""`action=export`: the commands by which people start vLLM themselves on a plan."""

from __future__ import annotations

from rich.console import Console

from orchestrator.engine_vllm.command import serve_command
from orchestrator.plan import Plan


def print_commands(console: Console, plan: Plan) -> None:
    """For each replica its `vllm serve`, one a line, to be pasted into a shell."""
    for replica in plan.replicas:
        console.print(
            f"# replica {replica.data_parallel_index}, engine {replica.engine_id}", soft_wrap=True
        )
        command = serve_command(plan, replica.data_parallel_index)
        console.print(command, soft_wrap=True, highlight=False, markup=False)
