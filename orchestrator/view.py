"""Live progress: a bar on a terminal, plain lines elsewhere, and the leaders' own output."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from orchestrator.plan import Plan
from orchestrator.rundir import RunDir
from orchestrator.supervise import RunState

PLAIN_INTERVAL_S = 5.0
RATE_WINDOW_S = 1.0


class _LeaderOutput:
    """Whole lines that the leaders have printed since the last look."""

    def __init__(self, plan: Plan) -> None:
        run_dir = RunDir(Path(plan.run.run_dir))
        self._offsets: dict[tuple[int, Path], int] = {}
        for replica in plan.replicas:
            index = replica.data_parallel_index
            directory = run_dir.replica(index)
            for path in (directory.stdout(0), directory.stderr(0)):
                self._offsets[index, path] = 0

    def lines(self) -> list[str]:
        found: list[str] = []
        for (index, path), offset in self._offsets.items():
            try:
                if path.stat().st_size <= offset:
                    continue
                with open(path, "rb") as file:
                    file.seek(offset)
                    data = file.read(65536)
            except FileNotFoundError:
                continue
            end = data.rfind(b"\n") + 1
            self._offsets[index, path] = offset + end
            text = data[:end].decode(errors="replace")
            found += [f"[dp{index}] {line}" for line in text.splitlines()]
        return found


class RunView:
    """Use as a context. `requests` is None where the number is not known."""

    def __init__(self, console: Console, plan: Plan, requests: int | None, mode: str) -> None:
        self._console = console
        self._quiet = mode == "quiet"
        self._output = _LeaderOutput(plan)
        self._workers = plan.topology.world_size * plan.topology.data_parallel_size
        self._requests = requests
        self._said_s = time.monotonic()
        self._said_ready = False
        self._rate_bytes_per_s = 0.0
        self._seen = (time.monotonic(), 0)
        self._bar: Progress | None = None
        if mode == "auto" and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> RunView:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._requests, detail="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def update(self, state: RunState) -> None:
        if not self._quiet:
            for text in self._output.lines():
                self.line(text)
        done = sum(p["requests"] + p["rejected"] for p in state.progress.values())
        detail = self._detail(state)
        if self._bar is not None:
            ready = state.ready_s is not None
            self._bar.update(
                self._task,
                description="serving" if ready else f"starting {self._workers} workers",
                completed=done,
                detail=detail,
            )
        elif not self._quiet:
            self._plain(state, done, detail)

    def _plain(self, state: RunState, done: int, detail: str) -> None:
        if state.ready_s is not None and not self._said_ready:
            self._said_ready = True
            self.line(f"ready: {self._workers} workers in {state.ready_s:.2f} s")
        if time.monotonic() - self._said_s < PLAIN_INTERVAL_S:
            return
        self._said_s = time.monotonic()
        if state.ready_s is None:
            ready = sum(phase == "ready" for phase in state.phases.values())
            self.line(f"starting: {ready} of {self._workers} workers are ready")
        else:
            total = "" if self._requests is None else f"/{self._requests}"
            self.line(f"{done}{total} requests  {detail}")

    def _detail(self, state: RunState) -> str:
        tokens = sum(p["prompt_tokens"] for p in state.progress.values())
        hits = sum(p["hit_tokens"] for p in state.progress.values())
        copied = sum(p["copied_bytes"] for p in state.progress.values())
        now_s = time.monotonic()
        then_s, before = self._seen
        if now_s - then_s >= RATE_WINDOW_S:
            self._rate_bytes_per_s = (copied - before) / (now_s - then_s)
            self._seen = (now_s, copied)
        if not tokens:
            return ""
        return f"hits {hits / tokens:.1%}  leaders copy {self._rate_bytes_per_s / 1e9:.2f} GB/s"
