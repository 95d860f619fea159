"""Watches a run from start to end: who is ready, who failed first, when to stop, when to kill."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from orchestrator.events import PHASES, EventTail
from orchestrator.plan import Plan
from orchestrator.rundir import RunDir
from orchestrator.stillness import Stillness, process_status

POLL_S = 0.05
KILL_WAIT_S = 1.0
STILL_MARGIN_S = 5.0  # a group's own timeout is told first, because it has a traceback
NAMED_WORKERS = 8
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Spawner(Protocol):
    """Starts and stops the agents of a plan's replicas. Entering starts, leaving leaves nothing."""

    running: set[int]

    @property
    def zygote_exit(self) -> int | None: ...
    def __enter__(self) -> Spawner: ...
    def __exit__(self, *_: object) -> None: ...
    def poll(self, timeout_s: float) -> list[tuple[int, int]]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class View(Protocol):
    """Shows a run while it goes on."""

    def update(self, state: RunState) -> None: ...
    def line(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong. `replica` and `rank` are None where it is nobody's."""

    message: str
    replica: int | None = None
    rank: int | None = None
    traceback: str = ""
    log: str = ""
    t: float = 0.0

    def __str__(self) -> str:
        who = "" if self.replica is None else f"replica {self.replica}"
        who += "" if self.rank is None else f", rank {self.rank}"
        lines = [f"{who}: {self.message}" if who else self.message]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.log:
            lines.append(f"log: {self.log}")
        return "\n".join(lines)


@dataclass(slots=True)
class RunState:
    """What is known of a run so far."""

    phases: dict[tuple[int, int], str]
    pids: dict[tuple[int, int], int] = field(default_factory=dict)
    progress: dict[int, dict[str, Any]] = field(default_factory=dict)
    ready_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    failures: list[Failure] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    signal: int | None = None

    @property
    def first_failure(self) -> Failure | None:
        return min(self.failures, key=lambda failure: failure.t, default=None)


class _Signals:
    """Signals as a value to look at, not as an exception at any moment."""

    def __init__(self) -> None:
        self.caught: list[int] = []

    def _catch(self, signum: int, _frame: FrameType | None) -> None:
        self.caught.append(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Catch signals, but for those that we were started to ignore, as `nohup` does."""
        wanted = [signum for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
        before = {signum: signal.signal(signum, self._catch) for signum in wanted}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Events:
    """All event files of a run."""

    def __init__(self, plan: Plan, run_dir: RunDir) -> None:
        self._tails = {
            (replica.data_parallel_index, worker.rank): EventTail(
                run_dir.replica(replica.data_parallel_index).events(worker.rank)
            )
            for replica in plan.replicas
            for worker in replica.workers
        }

    def read_into(self, state: RunState) -> set[int]:
        """Note what is new; the replicas that had something new to tell."""
        told = set()
        for who, tail in self._tails.items():
            for event in tail.read():
                told.add(who[0])
                if event["phase"] == "progress":
                    state.progress[who[0]] = event
                else:
                    state.phases[who] = event["phase"]
                if "pid" in event:
                    state.pids[who] = event["pid"]
        return told


def supervise(plan: Plan, spawner: Spawner, view: View) -> RunState:
    """Run to the end, whatever the end is. Signals are caught here and told in the state.

    After this no process of the run is left.
    """
    run_dir = RunDir(Path(plan.run.run_dir))
    settings = plan.settings.spawn
    signals = _Signals()
    state = RunState(
        phases={
            (replica.data_parallel_index, worker.rank): "not started"
            for replica in plan.replicas
            for worker in replica.workers
        }
    )
    events = _Events(plan, run_dir)
    stillness = Stillness(settings.group_timeout_s + STILL_MARGIN_S)
    with signals.held(), spawner:
        while spawner.running:
            ended = spawner.poll(POLL_S)
            told = events.read_into(state)
            _note_ready(state)
            for index, code in ended:
                state.ended[index] = code
                if code != 0:
                    _note_failure(_failure(run_dir, index, code, spawner.zygote_exit), state)
                    if settings.on_failure == "continue" and spawner.running:
                        view.line(f"replica {index} has failed, the others go on")
            view.update(state)
            if signals.caught:
                break
            if state.failures and settings.on_failure == "stop":
                break
            hang = start_timeout(plan, state) or _stillness(plan, state, stillness, told)
            if hang is not None:
                state.failures.append(hang)
                break
        if signals.caught:
            state.signal = signals.caught[0]
            if spawner.running:
                name = signal.Signals(state.signal).name
                view.line(f"{name}: stopping all workers (again: kill them)")
        _end(spawner, settings.stop_timeout_s, signals, state)
        events.read_into(state)
        view.update(state)
    return state


def _is_ready(phase: str) -> bool:
    return phase in PHASES and PHASES.index(phase) >= PHASES.index("ready")


def _note_ready(state: RunState) -> None:
    if state.ready_s is None and all(map(_is_ready, state.phases.values())):
        state.ready_s = time.monotonic() - state.started_s


def _note_failure(failure: Failure, state: RunState) -> None:
    """One cause is told once, also where it took several replicas along."""
    if failure.replica is None and any(other.replica is None for other in state.failures):
        return
    state.failures.append(failure)


def _end(spawner: Spawner, stop_timeout_s: float, signals: _Signals, state: RunState) -> None:
    """Terminate, wait, kill. A second signal, or any after a failure, shortens the wait."""
    if not spawner.running:
        return
    asked = 0 if state.signal is None else 1
    spawner.stop()
    until_s = time.monotonic() + stop_timeout_s
    while spawner.running and time.monotonic() < until_s and len(signals.caught) <= asked:
        for index, code in spawner.poll(POLL_S):
            state.ended.setdefault(index, code)
    if spawner.running:
        spawner.kill()
        until_s = time.monotonic() + KILL_WAIT_S
        while spawner.running and time.monotonic() < until_s:
            for index, code in spawner.poll(POLL_S):
                state.ended.setdefault(index, code)


def _failure(run_dir: RunDir, index: int, code: int, zygote_exit: int | None) -> Failure:
    directory = run_dir.replica(index)
    try:
        told = msgspec.json.decode(directory.failure.read_bytes())
    except (OSError, msgspec.DecodeError):
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if zygote_exit not in (None, 0):
            return Failure(
                f"the launcher process that holds all agents ended: {how}",
                log=str(run_dir.zygote_log),
                t=time.time(),
            )
        return Failure(
            f"its torchrun agent ended: {how}",
            replica=index,
            log=str(directory.agent_log),
            t=time.time(),
        )
    return Failure(
        told["message"],
        replica=index,
        rank=told["rank"],
        traceback=told["traceback"],
        log=told["log"],
        t=told["t"],
    )


def start_timeout(plan: Plan, state: RunState) -> Failure | None:
    """Who is missing when start-up has taken too long. Replicas that have ended are not."""
    limit_s = plan.settings.spawn.start_timeout_s
    if time.monotonic() - state.started_s <= limit_s:
        return None
    missing = [
        who
        for who, phase in state.phases.items()
        if who[0] not in state.ended and not _is_ready(phase)
    ]
    if not missing:
        return None
    return Failure(
        f"start-up did not end within spawn.start_timeout_s = {limit_s:g} s; {len(missing)} of "
        f"{len(state.phases)} workers are missing: {_named(missing, state)}. Raise "
        "spawn.start_timeout_s if the machine is slow",
        log=_log(plan, missing[0][0]),
        t=time.time(),
    )


def _stillness(plan: Plan, state: RunState, stillness: Stillness, told: set[int]) -> Failure | None:
    """A replica that was ready, is not at its end, and in which nothing moves any more."""
    serving: dict[int, list[int]] = {}
    for (index, _), pid in state.pids.items():
        serving.setdefault(index, []).append(pid)
    for (index, _), phase in state.phases.items():
        if index in state.ended or not _is_ready(phase):
            serving.pop(index, None)
    still = stillness.look(serving, told)
    if still is None:
        return None
    workers = [who for who in state.phases if who[0] == still]
    return Failure(
        f"nothing has moved for {stillness.limit_s:g} s (spawn.group_timeout_s and "
        f"{STILL_MARGIN_S:g} s more): no worker told of progress or used the processor. Workers: "
        f"{_named(workers, state)}",
        replica=still,
        log=_log(plan, still),
        t=time.time(),
    )


def _log(plan: Plan, index: int) -> str:
    return str(RunDir(Path(plan.run.run_dir)).replica(index).agent_log)


def _named(workers: Sequence[tuple[int, int]], state: RunState) -> str:
    """Where workers stand, and what their processes do, as far as known."""
    named = []
    for index, rank in workers[:NAMED_WORKERS]:
        where = state.phases[index, rank]
        if (index, rank) in state.pids:
            pid = state.pids[index, rank]
            where += f", pid {pid} {process_status(pid)}"
        named.append(f"replica {index} rank {rank} ({where})")
    more = len(workers) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
