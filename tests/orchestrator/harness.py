"""Starts `launch.py` as a user does, and looks at what it starts from outside.

A launch is given an environment variable of its own. The kernel keeps the environment that a
program was started with, and a fork has its parent's, so every process of the run is found by it,
whatever became of its parents.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.events import PHASES
from orchestrator.rundir import RunDir
from tests.kit import REPO

MARK = "KVQUAY_TEST_LAUNCH"
START_S = 120.0  # importing torch on a machine that is busy with something else
END_S = 120.0
CLEAN_S = 5.0
SHM = Path("/dev/shm")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc tells of a process."""

    pid: int
    parent: int
    state: str
    command: str


class Launch:
    """One `python launch.py OVERRIDES`. Output goes to files; nothing outlives the context."""

    def __init__(
        self, home: Path, *overrides: str, environment: dict[str, str] | None = None
    ) -> None:
        self.run = RunDir(home / "run")
        self.temporary = home / "tmp"
        self.temporary.mkdir(parents=True)
        self._out, self._err = home / "out.txt", home / "err.txt"
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "launch.py", f"hydra.run.dir={self.run.path}", *overrides],
                cwd=REPO,
                env=os.environ
                | (environment or {})
                | {name: value, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a failed test leaves is killed, bottom up."""
        for process in reversed(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.popen.wait()
        for path in self.region_files():
            path.unlink(missing_ok=True)

    def wait_in(self, run_dir: Path) -> Launch:
        """Look at one job of a sweep from now on."""
        self.run = RunDir(run_dir)
        self.wait("the job", run_dir.is_dir)
        return self

    # What there is.

    def processes(self) -> list[Process]:
        """Every living process of the launch, by pid; zombies have no environment any more."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(_process(int(entry.name)))
        return sorted(found, key=lambda process: process.pid)

    def zygote(self) -> int | None:
        return self._child(self.popen.pid, "orchestrator.spawn.zygote")

    def agents(self) -> list[int]:
        zygote = self.zygote()
        return [p.pid for p in self.processes() if zygote is not None and p.parent == zygote]

    def agent(self, replica: int) -> int:
        """The pid of a replica's agent, once its first worker has told its own."""
        worker = self.worker(replica, 0)
        assert worker is not None
        return _process(worker).parent

    def events(self, replica: int, rank: int) -> list[dict[str, Any]]:
        try:
            text = self.run.replica(replica).events(rank).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def worker(self, replica: int, rank: int) -> int | None:
        """A worker's pid, as it told it itself."""
        return next((event["pid"] for event in self.events(replica, rank) if "pid" in event), None)

    def reached(self, phase: str, replica: int, rank: int) -> bool:
        events = self.events(replica, rank)
        return any(PHASES.index(event["phase"]) >= PHASES.index(phase) for event in events)

    @property
    def run_id(self) -> str | None:
        try:
            return str(json.loads(self.run.plan.read_text())["run"]["run_id"])
        except FileNotFoundError:
            return None

    def region_files(self) -> list[Path]:
        return [] if self.run_id is None else sorted(SHM.glob(f"kvquay_{self.run_id}_*"))

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def report(self) -> dict[str, Any]:
        assert self.run.report.exists(), self.told()
        found: dict[str, Any] = json.loads(self.run.report.read_text())
        return found

    def told(self) -> str:
        """All that was printed or logged, for the message of a failed assertion."""
        logs = [self.run.zygote_log, *sorted(self.run.path.glob("replicas/dp*/*.log"))]
        parts = [("stdout", self.out), ("stderr", self.err)]
        parts += [(str(log), log.read_text()[-4000:]) for log in logs if log.exists()]
        return "\n".join(f"--- {name} ---\n{text}" for name, text in parts if text)

    # What is waited for.

    def wait(self, what: str, look: Callable[[], T | None], timeout_s: float = START_S) -> T:
        """The first true thing that `look` returns; fails when the launch ends before that."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            ended = self.popen.poll() is not None
            if found := look():
                return found
            if ended:
                pytest.fail(f"launch.py ended before {what}\n{self.told()}")
            time.sleep(0.002)
        pytest.fail(f"{what}: not within {timeout_s:g} s\n{self.told()}")

    def wait_importing(self) -> int:
        """Until the zygote imports torch; its pid."""
        zygote = self.wait("the zygote's start", self.zygote)
        self.wait("torch's import", lambda: _maps(zygote, "libtorch") or self.agents())
        return zygote

    def wait_phase(self, phase: str, replica: int = 0, rank: int = 0) -> int:
        """Until a worker is there; its pid."""
        self.wait(
            f"phase {phase} of replica {replica} rank {rank}",
            lambda: self.reached(phase, replica, rank),
        )
        worker = self.worker(replica, rank)
        assert worker is not None
        return worker

    def wait_serving(self) -> None:
        """Until every worker is ready and every leader has told of progress."""
        self.wait("plan.json", self.run.plan.exists)
        for replica in json.loads(self.run.plan.read_text())["replicas"]:
            index = replica["data_parallel_index"]
            for worker in replica["workers"]:
                self.wait_phase("ready", index, worker["rank"])
            self.wait_phase("progress", index, 0)

    def wait_end(self, timeout_s: float = END_S) -> int:
        """Until the launcher has ended; its exit status, -n for signal n."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"launch.py did not end within {timeout_s:g} s\n{self.told()}")

    def signal(self, signum: int) -> None:
        os.kill(self.popen.pid, signum)

    # What must hold.

    def assert_gone(self, since_s: float, within_s: float = CLEAN_S) -> None:
        """`within_s` after the moment `since_s` (time.monotonic) nothing of the launch is left."""
        until_s = since_s + within_s
        while (left := self.left()) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not left, f"left after {within_s:g} s:\n" + "\n".join(left) + f"\n{self.told()}"

    def left(self) -> list[str]:
        """What should not be there once a launch is over."""
        self.popen.poll()
        left = [str(process) for process in self.processes()]
        left += [str(path) for path in self.region_files()]
        left += [str(path) for path in self.temporary.rglob("*")]
        left += [str(path) for path in self.run.path.rglob(".*") if path.name != ".hydra"]
        return left

    def _child(self, parent: int, command: str) -> int | None:
        for process in self.processes():
            if process.parent == parent and command in process.command:
                return process.pid
        return None


def _process(pid: int) -> Process:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return Process(pid, int(stat[1]), stat[0], command.strip())


def _maps(pid: int, name: str) -> bool:
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@contextlib.contextmanager
def launched(home: Path, *overrides: str, **options: Any) -> Iterator[Launch]:
    """A launch of a small deployment with more requests than any test waits for."""
    with Launch(home, "profile=ci", "workload.requests=500000", *overrides, **options) as launch:
        yield launch


def run_launch(home: Path, *overrides: str, environment: dict[str, str] | None = None) -> Launch:
    """A launch of a small deployment, to its end."""
    with Launch(home, "profile=ci", *overrides, environment=environment) as launch:
        launch.wait_end()
        return launch


def hit_tokens(report: dict[str, Any]) -> list[dict[str, int]]:
    return [replica["hit_tokens"] for replica in report["replicas"]]


def slots(report: dict[str, Any]) -> list[list[int]]:
    """Slot of every worker, by replica and rank."""
    return [[worker["slot"] for worker in replica["workers"]] for replica in report["replicas"]]


def assert_verified(launch: Launch, replicas: Sequence[int] = (0, 1)) -> None:
    """The run is over and well, its bytes were checked, and each worker has a slot of its own."""
    assert launch.popen.returncode == 0, launch.told()
    report = launch.report()
    assert report["status"] == "ok"
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    assert [replica["data_parallel_index"] for replica in report["replicas"]] == list(replicas)
    for replica in report["replicas"]:
        workers = replica["workers"]
        assert [worker["slot"] for worker in workers] == list(range(len(workers)))
