"""Starts `launch.py` as a user does, and looks at what it starts from outside.

A launch is given an environment variable of its own. The kernel keeps the environment that a
program was started with, and a fork has its parent's, so every process of the run is found by it,
whatever became of its parents.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.events import PHASES
from orchestrator.plan import Plan, read_plan
from orchestrator.rundir import RunDir
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec
from tests.kit import REPO
from tests.models.cache_model import ReplicaCacheModel

MARK = "KVQUAY_TEST_LAUNCH"
START_S = 120.0  # importing torch on a machine that is busy with something else
END_S = 120.0
CLEAN_S = 5.0
LOOK_S = 0.005
SHM = Path("/dev/shm")

T = TypeVar("T")
Ran = dict[str, "Future[None]"]


@dataclass(frozen=True, slots=True)
class Process:
    """What /proc tells of a process."""

    pid: int
    parent: int
    state: str
    command: str


class Launch:
    """One `python launch.py OVERRIDES`. Output goes to files; nothing outlives the context.

    `run_dir` is `home / "run"` unless given; that of a sweep's job is for the caller to arrange.
    `through` is a command that becomes the launcher.
    """

    def __init__(
        self,
        home: Path,
        *overrides: str,
        environment: dict[str, str] | None = None,
        run_dir: Path | None = None,
        through: tuple[str, ...] = (),
    ) -> None:
        self.run = RunDir(run_dir or home / "run")
        self.temporary = home / "tmp"
        self.temporary.mkdir(parents=True)
        self._out, self._err = home / "out.txt", home / "err.txt"
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.popen = subprocess.Popen(
                [
                    *through,
                    sys.executable,
                    "launch.py",
                    *overrides,
                    f"hydra.run.dir={self.run.path}",
                ],
                cwd=REPO,
                env=os.environ | (environment or {}) | {name: value, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a failed test leaves is killed. A tracker of semaphores goes by itself then."""
        for process in reversed(self.processes()):
            if "resource_tracker" not in process.command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.popen.wait()
        for path in self.region_files():
            path.unlink(missing_ok=True)

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
        for child in _children(self.popen.pid):
            with contextlib.suppress(OSError):
                if "orchestrator.spawn.zygote" in _process(child).command:
                    return child
        return None

    def agents(self) -> list[int]:
        zygote = self.zygote()
        return [] if zygote is None else _children(zygote)

    def spawned(self) -> list[int]:
        """Workers that were started as fresh processes, whatever they are doing."""
        found = []
        for pid in [child for agent in self.agents() for child in _children(agent)]:
            with contextlib.suppress(OSError):
                if "multiprocessing.spawn" in _process(pid).command:
                    found.append(pid)
        return found

    def agent(self, replica: int) -> int:
        """The pid of a replica's agent, once its first worker has told its own."""
        what = f"the first worker of replica {replica}"
        return _process(self.wait(what, lambda: self.worker(replica, 0))).parent

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
            time.sleep(LOOK_S)
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
            time.sleep(10 * LOOK_S)
        assert not left, f"left after {within_s:g} s:\n" + "\n".join(left) + f"\n{self.told()}"

    def left(self) -> list[str]:
        """What should not be there once a launch is over."""
        self.popen.poll()
        left = [str(process) for process in self.processes()]
        left += [str(path) for path in self.region_files()]
        left += _below(self.temporary)
        left += [
            path for path in _below(self.run.path) if "/.tmp-" in path or path.endswith(".tmp")
        ]
        return left


def _below(directory: Path) -> list[str]:
    """Every path in a directory that others may be emptying."""
    found = []
    for parent, directories, files in os.walk(directory):
        found += [os.path.join(parent, name) for name in directories + files]
    return found


def _process(pid: int) -> Process:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return Process(pid, int(stat[1]), stat[0], command.strip())


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


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


def run_launch(home: Path, *overrides: str, **options: Any) -> Launch:
    """A launch of a small deployment, to its end."""
    with Launch(home, "profile=ci", *overrides, **options) as launch:
        launch.wait_end()
        return launch


def assert_verified(launch: Launch) -> None:
    """The run is over and well, and left nothing but its results, which `assert_right` holds."""
    assert launch.popen.returncode == 0, launch.told()
    assert launch.left() == []
    assert_right(launch.run)


def assert_right(run: RunDir) -> None:
    """The bytes were checked, the hits are those of an independent model, and each worker has a
    slot of its own, which is its place in its group."""
    report = json.loads(run.report.read_text())
    plan = read_plan(run.plan)
    assert report["status"] == "ok"
    assert report["failures"] == []
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    indices = [replica["data_parallel_index"] for replica in report["replicas"]]
    assert indices == list(range(plan.topology.data_parallel_size))
    for replica in report["replicas"]:
        slots = [worker["slot"] for worker in replica["workers"]]
        assert slots == list(range(plan.topology.world_size))
        assert replica["hit_tokens"] == model_hit_tokens(plan, replica["data_parallel_index"])


def model_hit_tokens(plan: Plan, index: int) -> dict[str, int]:
    """What a simple model of one replica's caches says of the requests that it is sent."""
    model = ReplicaCacheModel(
        plan.device_blocks,
        plan.region.rows,
        plan.cache.tokens_per_block,
        plan.cache.blocks_per_chunk,
        plan.cache.tokens_per_hash,
        len(plan.groups),
    )
    spec = workload_spec(plan.settings.workload, plan.cache)
    for request in stream_for_replica(spec, plan.topology.data_parallel_size, index):
        model.process(request.prompt_tokens, request.output_tokens, request.hashes)
    totals = model.totals()
    return {"device": totals.hit_tokens_device, "shm": totals.hit_tokens_region}


def ahead(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run two at a time with the others of its file: a launch keeps one core busy.

    Such a test takes `home`, a directory of its own, and parameters, but no fixtures. It needs
    the fixture `ran_ahead`, which the file imports.
    """
    parameters = [p for p in inspect.signature(test).parameters.values() if p.name != "home"]

    def wait(request: pytest.FixtureRequest, ran_ahead: Ran, **_: Any) -> None:
        ran_ahead[request.node.nodeid].result()

    wait.__name__, wait.__doc__ = test.__name__, test.__doc__
    own = [p for p in inspect.signature(wait).parameters.values() if p.name != "_"]
    wait.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    wait.ahead = test  # type: ignore[attr-defined]
    return wait


@pytest.fixture(scope="module")
def ran_ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ran]:
    """The results of this file's selected tests that are marked `ahead`, in their order."""
    pool = ThreadPoolExecutor(2)
    ran: Ran = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            test = getattr(item.function, "ahead", None)
            if test is not None:
                home = tmp_path_factory.mktemp(test.__name__[:40])
                given = item.callspec.params if hasattr(item, "callspec") else {}
                ran[item.nodeid] = pool.submit(test, home=home, **given)
    yield ran
    pool.shutdown(cancel_futures=True)
