"""The launcher's end of the zygote: start it, hear of agents' ends, stop them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil

from orchestrator.clean import remove_leftovers
from orchestrator.lower_tiers import disks
from orchestrator.plan import Plan
from orchestrator.rundir import RunDir
from orchestrator.spawn.lifeline import adopt_orphans, bury_orphans
from orchestrator.spawn.nursery import Nursery, Process

# What a surrounding torchrun or scheduler may have left in the environment must not reach ours.
_INHERITED = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
)
_INHERITED_PREFIXES = ("LOCAL_", "TORCHELASTIC_", "ROLE_WORLD", "GROUP_WORLD")
# The zygote ends by itself in an instant, unless somebody has stopped it.
_ZYGOTE_WAIT_S = 0.5
_TRACKER_WAIT_S = 1.0


def clean_environment(environment: dict[str, str]) -> dict[str, str]:
    """Without inherited ranks and addresses, and with torch told not to touch CUDA when asked
    whether there is any: a fork of a process that did could not use it."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _INHERITED and not name.startswith(_INHERITED_PREFIXES)
    }
    here = str(Path(__file__).resolve().parents[2])
    path = [here, *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONPATH": os.pathsep.join(path)}


class TorchrunSpawner:
    """One zygote, one agent per replica. Use as a context: leaving it leaves no process."""

    def __init__(
        self, plan: Plan, environment: dict[str, str], nursery: Nursery | None = None
    ) -> None:
        """`nursery` forks the zygote, None starts one of its own."""
        self._plan = plan
        self._nursery = nursery
        self._environment = clean_environment(environment)
        self._run_dir = RunDir(Path(plan.run.run_dir))
        self._process: Process | None = None
        self._temporary = self._run_dir.temporary(plan.run.run_id)
        self._not_ours: set[int] = set()
        self._buffer = b""
        self.running = {replica.data_parallel_index for replica in plan.replicas}
        self.agents: dict[int, int] = {}

    def __enter__(self) -> TorchrunSpawner:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        # A killed zygote leaves agents and workers, which may have to be ended here.
        self._not_ours = {child.pid for child in psutil.Process().children()}
        adopt_orphans()
        self._run_dir.forget_report()
        for index in self.running:
            self._run_dir.replica(index).make_fresh()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(self._run_dir.zygote_log, flags, 0o600)
        try:
            if self._nursery is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "orchestrator.spawn.zygote", *self._arguments()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment | {"TMPDIR": str(self._temporary)},
                    start_new_session=True,
                )
            else:
                self._process = self._nursery.bear(
                    self._arguments(), self._environment, str(self._temporary), log
                )
        finally:
            os.close(log)

    def _arguments(self) -> list[str]:
        method = self._plan.settings.spawn.start_method
        return [
            *("--plan", str(self._run_dir.plan)),
            *("--run-id", self._plan.run.run_id),
            *(f"--disk={path}" for path in disks(self._plan.settings)),
            *("--launcher-pid", str(os.getpid())),
            *("--start-method", "fork" if method == "auto" else method),
            *("--replicas", ",".join(str(index) for index in sorted(self.running))),
        ]

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            # End of file on its input tells the zygote to kill all agents and to go.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(timeout=_ZYGOTE_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        bury_orphans(self._is_of_this_run, _TRACKER_WAIT_S)
        adopt_orphans(False)
        remove_leftovers(self._run_dir, self._plan.run.run_id, disks(self._plan.settings))

    def _is_of_this_run(self, child: psutil.Process) -> bool:
        """Not every child that comes to us is of this run, least of all where we are pid 1.

        A dead one has no environment to tell by. Whoever it belonged to, it only waits to be
        reaped; and its own children, which may be of this run, have come to us before.
        """
        nursery = self._nursery
        if child.pid in self._not_ours or (nursery is not None and child.pid == nursery.pid):
            return False
        # What a nursery forks shows the environment that the nursery was started with.
        marks = {str(self._temporary), *([nursery.temporary] if nursery is not None else [])}
        try:
            status, environment = child.status(), child.environ()
        except psutil.AccessDenied:
            return False
        except psutil.NoSuchProcess:
            return True
        return status == psutil.STATUS_ZOMBIE or environment.get("TMPDIR") in marks

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Replicas whose agent ended since the last call, with its exit code (-n: signal n)."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ended: list[tuple[int, int]] = []
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            return ended
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            if self.running:
                code = process.wait()
                ended = [(index, code or 1) for index in sorted(self.running)]
                self.running.clear()
            else:
                time.sleep(timeout_s)
            return ended
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "pid" in message:
                self.agents[message["replica"]] = message["pid"]
            else:
                self.running.discard(message["replica"])
                ended.append((message["replica"], message["exit"]))
        return ended

    @property
    def zygote_exit(self) -> int | None:
        """Exit code of the zygote, None while it lives."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask all agents to end their workers."""
        if not self.agents and self._process is not None:
            # It is still importing torch and does not listen, and nothing stands beneath it.
            self._process.terminate()
        self._command(b"stop\n")

    def kill(self) -> None:
        """Kill all agents; their workers die with them."""
        self._command(b"kill\n")

    def _command(self, command: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(command)
            self._process.stdin.flush()
