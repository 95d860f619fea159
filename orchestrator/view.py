"""What is shown while a run goes on: a screen on a terminal, lines elsewhere, and the leaders' own
output."""

from __future__ import annotations

import math
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from orchestrator.live import LiveScreen
from orchestrator.plan import Plan
from orchestrator.rundir import RunDir
from orchestrator.supervise import RunState

PLAIN_INTERVAL_S = 5.0
DRAW_INTERVAL_S = 0.25
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
    """Use as a context. `requests` is None where the number is not known.

    `mode` is the key `view`: `auto` draws on a terminal and writes lines elsewhere, fewer in CI,
    where nobody looks on.
    """

    def __init__(
        self, console: Console, plan: Plan, requests: int | None, mode: str, *, in_ci: bool = False
    ) -> None:
        self._console = console
        self._quiet = mode == "quiet"
        self._interval_s = math.inf if in_ci and mode == "auto" else PLAIN_INTERVAL_S
        self._output = _LeaderOutput(plan)
        self._workers = plan.topology.world_size * plan.topology.data_parallel_size
        self._requests = requests
        self._said_s = self._drawn_s = time.monotonic()
        self._said_ready = False
        self._rate_bytes_per_s = 0.0
        self._seen = (time.monotonic(), 0)
        self._screen: LiveScreen | None = None
        can_draw = console.is_terminal and not console.is_dumb_terminal
        if mode in ("auto", "live") and can_draw:
            self._screen = LiveScreen(console, plan, requests)
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        elif mode == "live":
            self.line("view=live needs a terminal that can be drawn on: plain lines instead")

    def __enter__(self) -> RunView:
        if self._screen is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def update(self, state: RunState) -> None:
        if not self._quiet:
            for text in self._output.lines():
                self.line(text)
        if self._screen is not None:
            self._draw(self._screen, state)
        elif not self._quiet:
            self._plain(state)

    def _draw(self, screen: LiveScreen, state: RunState) -> None:
        screen.take_in(state)
        now_s = time.monotonic()
        if now_s - self._drawn_s >= DRAW_INTERVAL_S:
            self._drawn_s = now_s
            self._live.update(screen.draw(state), refresh=True)

    def _plain(self, state: RunState) -> None:
        detail = self._detail(state)
        if state.ready_s is not None and not self._said_ready:
            self._said_ready = True
            self.line(f"ready: {self._workers} workers in {state.ready_s:.2f} s")
        if time.monotonic() - self._said_s < self._interval_s:
            return
        self._said_s = time.monotonic()
        if state.ready_s is None:
            ready = sum(phase == "ready" for phase in state.phases.values())
            self.line(f"starting: {ready} of {self._workers} workers are ready")
        else:
            done = sum(p["requests"] + p["rejected"] for p in state.progress.values())
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
