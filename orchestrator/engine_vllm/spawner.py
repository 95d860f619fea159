"""Starts one vLLM process per replica, and sees to it that none outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.engine_vllm.command import environment, plan_path
from orchestrator.engine_vllm.settings import PYTHON
from orchestrator.plan import Plan, write_atomic
from orchestrator.rundir import RunDir
from orchestrator.spawn.torchrun import clean_environment

_WAIT_S = 2.0


class VllmSpawner:
    """As `supervise.Spawner`. Use as a context: leaving it leaves no process."""

    def __init__(self, plan: Plan, inherited: dict[str, str]) -> None:
        self._plan = plan
        self._inherited = clean_environment(inherited)
        self._run_dir = RunDir(Path(plan.run.run_dir))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.running = {replica.data_parallel_index for replica in plan.replicas}

    @property
    def zygote_exit(self) -> int | None:
        """There is no process in between that could have ended."""
        return None

    def __enter__(self) -> VllmSpawner:
        self._run_dir.forget_report()
        try:
            for index in sorted(self.running):
                self._start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, index: int) -> None:
        directory = self._run_dir.replica(index)
        directory.make_fresh()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as files:
            logs: list[Any] = [
                files.enter_context(open(os.open(path, flags, 0o600), "wb"))
                for path in (directory.stdout(0), directory.stderr(0))
            ]
            self._processes[index] = subprocess.Popen(
                [
                    *(self._inherited.get(PYTHON) or sys.executable,),
                    *("-m", "orchestrator.engine_vllm.replica"),
                    *("--plan", str(plan_path(self._plan)), "--replica", str(index)),
                    *("--digest", self._plan.digest, "--parent-pid", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=logs[0],
                stderr=logs[1],
                env=self._inherited | _OFFLINE | environment(self._plan, index),
                start_new_session=True,
            )

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            # The session's other processes are vLLM's own, and it is their group's leader.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Replicas that ended since the last call, with the exit code (-n: signal n)."""
        until_s = time.monotonic() + timeout_s
        while True:
            ended = [
                (index, code)
                for index in sorted(self.running)
                if (code := self._processes[index].poll()) is not None
            ]
            self.running -= {index for index, _ in ended}
            for index, code in ended:
                if code:
                    self._put_down(index, code)
            if ended or time.monotonic() >= until_s:
                return ended
            time.sleep(min(0.02, timeout_s))

    def _put_down(self, index: int, code: int) -> None:
        """Why a replica ended, where it could not say so itself."""
        directory = self._run_dir.replica(index)
        if directory.failure.exists():
            return
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        failure = {
            "rank": 0,
            "exit_code": code,
            "t": time.time(),
            "message": f"its vLLM process {killed}",
            "traceback": "",
            "log": str(directory.stderr(0)),
        }
        write_atomic(directory.failure, msgspec.json.encode(failure))

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for index in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[index].pid, number)


_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is this replica's own process
}
