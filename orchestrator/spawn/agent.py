"""One torchrun agent: starts the workers of one replica through torch's own elastic API.

It is `torchrun` without the command line: the same agent, rendezvous and error files. What differs
is that workers may be forked from a process that has imported torch already, that their logs have
fixed names, and that the worker that failed first is told from those that failed because of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from backends.errors import ConfigError
from orchestrator.plan import Plan, ReplicaPlan, write_atomic
from orchestrator.rundir import ReplicaDir, RunDir
from orchestrator.spawn.lifeline import default_signals
from orchestrator.worker import worker_main

MONITOR_S = 0.1


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


class Agent(LocalElasticAgent):
    """torch's agent, which looks at its workers before torch does.

    torch names the first failed worker that it comes across; when one is killed, its peers lose
    their connection and have often failed too before that look. torch also waits half a minute for
    a stopped worker to end.
    """

    def __init__(self, spec: WorkerSpec, directory: ReplicaDir, start_method: str, stop_s: float):
        # The launcher kills the agent when `stop_s` is over; what the agent does is done by then.
        self._stop_s = max(0.0, stop_s - 1.0)
        super().__init__(
            spec, FixedLogs(directory), start_method, shutdown_timeout=int(self._stop_s)
        )
        self._directory = directory
        self.failed = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        codes = _exit_codes(pids)
        if any(codes.values()) and not self.failed:
            self.failed = True
            rank = first_to_fail(codes, self._directory)
            alive = {other: pid for other, pid in pids.items() if other not in codes}
            remark = _held_up_by(alive) if codes[rank] > 0 else ""
            write_failure(self._directory, rank, codes[rank], remark)
            self._end(alive)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _end(self, pids: Mapping[int, int]) -> None:
        """End the others: they have nothing to save. A stopped one dies only when it goes on."""
        _signal_all(pids.values(), signal.SIGTERM)
        _signal_all(pids.values(), signal.SIGCONT)
        until_s = time.monotonic() + self._stop_s
        while len(_exit_codes(pids)) < len(pids) and time.monotonic() < until_s:
            time.sleep(0.01)
        _signal_all(pids.values(), signal.SIGKILL)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        if self._pcontext is not None:
            _signal_all(self._pcontext.pids().values(), signal.SIGCONT)
        super()._shutdown(death_sig, int(self._stop_s) if timeout is None else timeout)


def run_agent(plan: Plan, data_parallel_index: int, start_method: str) -> int:
    """Run one replica to its end; 0 if every worker ended well.

    The first failure is written to `failure.json`: rank, exit code or signal, message, traceback.
    """
    _plain_logging()
    run_dir = RunDir(Path(plan.run.run_dir))
    directory = run_dir.replica(data_parallel_index)
    replica = plan.replicas[data_parallel_index]
    spawn = plan.settings.spawn
    if spawn.virtual_local_rank:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(
            replica, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=replica.rdzv_endpoint,
        run_id=replica.engine_id,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        timeout=spawn.start_timeout_s,
    )
    handler = rendezvous.get_rendezvous_handler(meeting)
    spec = WorkerSpec(
        role=f"dp{data_parallel_index}",
        local_world_size=plan.topology.local_world_size,
        entrypoint=_work,
        args=(str(run_dir.plan), data_parallel_index, plan.digest, os.getpid()),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=MONITOR_S,
        local_addr="localhost",
        virtual_local_rank=spawn.virtual_local_rank,
    )
    agent = Agent(spec, directory, start_method, spawn.stop_timeout_s)
    result = agent.run()
    handler.shutdown()
    if not result.is_failed():
        return 0
    if not agent.failed:
        rank, failure = next(iter(result.failures.items()))
        write_failure(directory, rank, failure.exitcode, "")
    return 1


def _work(plan_path: str, index: int, digest: str, agent_pid: int) -> None:
    default_signals()
    try:
        worker_main(plan_path, index, digest, agent_pid)
    except Exception:
        # @record has put it into the error file; a reader of the log looks for it there.
        traceback.print_exc()
        raise


def _plain_logging() -> None:
    """torch formats an exception by importing its compiler, which takes seconds."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in list(logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers if name.split(".")[0] == "torch" else ():
            handler.setFormatter(plain)


def visible_devices(replica: ReplicaPlan, inherited: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of an agent whose workers see one device each.

    torch gives its worker number n the n-th entry, so the entries are this replica's devices, as
    they are numbered among those that the launcher itself sees. Raises ConfigError where it does
    not see them all.
    """
    ordinals = [worker.device_index for worker in replica.workers]
    if inherited is None or replica.workers[0].device != "cuda":
        return ",".join(map(str, ordinals))
    seen = [name.strip() for name in inherited.split(",")]
    if max(ordinals) >= len(seen):
        raise ConfigError(
            f"replica {replica.data_parallel_index} is to use devices {ordinals}, and "
            f"CUDA_VISIBLE_DEVICES={inherited} shows {len(seen)}; show more or set spawn.devices"
        )
    return ",".join(seen[ordinal] for ordinal in ordinals)


def first_to_fail(codes: Mapping[int, int], directory: ReplicaDir) -> int:
    """The rank that failed first, among those that had ended when a failure was first seen.

    Nobody had been told to end by then, so who died of a signal is a cause and never a consequence.
    Of the others, the first to write its error was the first to fail: peers lose their connection
    only when a process ends, which is after that.
    """
    killed = [rank for rank, code in codes.items() if code < 0]
    if killed:
        return min(killed)
    failed = [rank for rank, code in codes.items() if code > 0]
    return min(failed, key=lambda rank: (_error_time_s(directory.error(rank)), rank))


def write_failure(directory: ReplicaDir, rank: int, exit_code: int, remark: str = "") -> None:
    """Put down which worker failed and why; `remark` is added to the message."""
    error = directory.error(rank)
    message, trace = _told(error)
    if exit_code < 0:
        message, trace = f"killed by {signal.Signals(-exit_code).name}", ""
    elif not message:
        message = f"ended with exit code {exit_code} and without a word"
    failure = {
        "rank": rank,
        "exit_code": exit_code,
        "t": min(_error_time_s(error), time.time()),
        "message": message + remark,
        "traceback": trace,
        "log": str(directory.stderr(rank)),
    }
    write_atomic(directory.failure, msgspec.json.encode(failure))


def write_agent_failure(directory: ReplicaDir, error: BaseException) -> None:
    """Put down why the agent itself failed, unless a worker did before."""
    if directory.failure.exists():
        return
    failure = {
        "rank": None,
        "exit_code": 1,
        "t": time.time(),
        "message": f"its agent failed: {type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "log": str(directory.agent_log),
    }
    write_atomic(directory.failure, msgspec.json.encode(failure))


def _told(path: Path) -> tuple[str, str]:
    """Message and traceback that a worker's @record wrote, empty where it wrote none."""
    try:
        told: Any = msgspec.json.decode(path.read_bytes())["message"]
        return str(told["message"]), str(told["extraInfo"]["py_callstack"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return "", ""


def _error_time_s(path: Path) -> float:
    """When an error file was written; the one inside it has whole seconds only."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _exit_codes(pids: Mapping[int, int]) -> dict[int, int]:
    """Exit codes (-n: signal n) of those that have ended, by rank, left for torch to reap."""
    codes = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if ended is not None:
            exited = ended.si_code == os.CLD_EXITED
            codes[rank] = ended.si_status if exited else -ended.si_status
    return codes


def _held_up_by(pids: Mapping[int, int]) -> str:
    """Who stands still, so that the others may have waited in vain; empty if nobody does."""
    stopped = []
    for rank, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(f"rank {rank} (pid {pid})")
    return f"; its peers wait for {', '.join(stopped)}, which is stopped" if stopped else ""


def _signal_all(pids: Iterable[int], signum: int) -> None:
    """Signal those that are children of ours still; another process may have a reaped one's pid."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(pid, signum)
