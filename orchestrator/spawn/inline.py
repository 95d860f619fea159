"""Every worker as a thread of this process: for tests and debuggers. Same engine, same region."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from pathlib import Path

import msgspec

from orchestrator.events import EventWriter
from orchestrator.groups import ThreadGroups
from orchestrator.plan import Plan, write_atomic
from orchestrator.rundir import RunDir
from orchestrator.worker import run_worker


class InlineSpawner:
    """Threads cannot be killed: `stop` breaks the group, which every worker passes each step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._run_dir = RunDir(Path(plan.run.run_dir))
        timeout_s = plan.settings.spawn.group_timeout_s
        self._groups = [ThreadGroups(plan.topology.world_size, timeout_s) for _ in plan.replicas]
        self._threads: dict[int, list[threading.Thread]] = {}
        self._failed: set[int] = set()
        self._failing = threading.Lock()
        self.running = {replica.data_parallel_index for replica in plan.replicas}
        self.zygote_exit: int | None = None

    def __enter__(self) -> InlineSpawner:
        self._run_dir.forget_report()
        for index in self.running:
            self._run_dir.replica(index).make_fresh()
            self._threads[index] = [
                threading.Thread(target=self._work, args=(index, rank), name=f"dp{index}-{rank}")
                for rank in range(self._plan.topology.world_size)
            ]
        for threads in self._threads.values():
            for thread in threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()
        for threads in self._threads.values():
            for thread in threads:
                thread.join()

    def _work(self, index: int, rank: int) -> None:
        directory = self._run_dir.replica(index)
        try:
            with contextlib.closing(EventWriter(directory.events(rank))) as events:
                events.write("started")
                group = self._groups[index].member(rank)
                events.write("group")
                run_worker(self._plan, index, group, directory, events)
        except Exception as error:
            self._fail(index, rank, error)

    def _fail(self, index: int, rank: int, error: Exception) -> None:
        """The first failure of a replica is told; the others are its consequences."""
        directory = self._run_dir.replica(index)
        with self._failing:
            if index not in self._failed:
                self._failed.add(index)
                failure = {
                    "rank": rank,
                    "exit_code": 1,
                    "t": time.time(),
                    "message": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc(),
                    "log": str(directory.events(rank)),
                }
                write_atomic(directory.failure, msgspec.json.encode(failure))
        self._groups[index].abort()

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Replicas whose threads have all ended since the last call, with 0 or 1."""
        until_s = time.monotonic() + timeout_s
        for index in self.running:
            for thread in self._threads[index]:
                thread.join(max(0.0, until_s - time.monotonic()))
        ended = [
            (index, int(index in self._failed))
            for index in sorted(self.running)
            if not any(thread.is_alive() for thread in self._threads[index])
        ]
        self.running.difference_update(index for index, _ in ended)
        return ended

    def stop(self) -> None:
        for groups in self._groups:
            groups.abort()

    kill = stop
