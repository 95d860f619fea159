"""One torchrun agent: starts the workers of one replica through torch's own elastic API.

It is `torchrun` without the command line: the same agent, rendezvous and error files. What differs
is that workers may be forked from a process that has imported torch already, and that their logs
have fixed names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from orchestrator.plan import Plan, write_atomic
from orchestrator.rundir import ReplicaDir, RunDir
from orchestrator.worker import worker_main


class FixedLogs(LogsSpecs):
    """Each rank's output and error file under names that `rundir` gives."""

    def __init__(self, directory: ReplicaDir) -> None:
        super().__init__(log_dir=str(directory.path))
        self._directory = directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        errors = {local: str(self._directory.error(rank)) for local, rank in ranks.items()}
        for local_rank, path in errors.items():
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
        return LogsDest(
            stdouts={local: str(self._directory.stdout(rank)) for local, rank in ranks.items()},
            stderrs={local: str(self._directory.stderr(rank)) for local, rank in ranks.items()},
            tee_stdouts={},
            tee_stderrs={},
            error_files=errors,
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._directory.path)


def run_agent(plan: Plan, data_parallel_index: int, start_method: str) -> int:
    """Run one replica to its end; 0 if every worker ended well.

    The first failure is written to `failure.json`: rank, exit code or signal, message, traceback.
    """
    run_dir = RunDir(Path(plan.run.run_dir))
    directory = run_dir.replica(data_parallel_index)
    replica = plan.replicas[data_parallel_index]
    spawn = plan.settings.spawn
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.topology.local_world_size,
        run_id=replica.engine_id,
        role=f"dp{data_parallel_index}",
        rdzv_backend="c10d",
        rdzv_endpoint=replica.rdzv_endpoint,
        rdzv_configs={"timeout": spawn.start_timeout_s},
        max_restarts=0,
        monitor_interval=0.1,
        start_method=start_method,
        logs_specs=FixedLogs(directory),
        local_addr="localhost",
        virtual_local_rank=spawn.virtual_local_rank,
        shutdown_timeout=max(1, int(spawn.stop_timeout_s)),
    )
    entry = (str(run_dir.plan), data_parallel_index, plan.digest, os.getpid())
    try:
        elastic_launch(config, worker_main)(*entry)
    except ChildFailedError as error:
        first_rank, first = error.get_first_failure()
        _write_failure(directory, first_rank, first.exitcode, first.timestamp, first.message)
        return 1
    return 0


def _write_failure(
    directory: ReplicaDir, rank: int, exit_code: int, timestamp_s: int, message: Any
) -> None:
    traceback = ""
    if isinstance(message, dict):  # what @record writes: {"message", "extraInfo": {"py_callstack"}}
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    failure = {
        "rank": rank,
        "exit_code": exit_code,
        "t": float(timestamp_s) or time.time(),
        "message": str(message),
        "traceback": traceback,
        "log": str(directory.stderr(rank)),
    }
    write_atomic(directory.failure, msgspec.json.encode(failure))
