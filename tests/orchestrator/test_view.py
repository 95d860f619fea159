"""What is shown while a run goes on: a screen on a terminal, lines elsewhere, little in CI."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator import view as views
from orchestrator.live import LiveScreen
from orchestrator.plan import Plan
from orchestrator.supervise import Failure, RunState
from orchestrator.view import RunView
from tests.kit import plan_for


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_for(tmp_path, "tiers=shm_fs", "tiers.stack.fs.capacity=1GiB")


def console(*, terminal: bool, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=150,
        height=height,
        color_system=None,
        _environ={"TERM": "xterm"},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def event(t: float, requests: int) -> dict[str, Any]:
    """What a leader tells, each request of 100 prompt tokens of which half were found."""
    tokens = 100 * requests
    return {
        "t": t,
        "requests": requests,
        "rejected": 0,
        "prompt_tokens": tokens,
        "hit_tokens": tokens // 2,
        "copied_bytes": 0,
        "counts": {
            "prompt_tokens": tokens,
            "hit_tokens.device": tokens / 4,
            "hit_tokens.shm": 0,
            "hit_tokens.fs": tokens / 4,
            "fs.loaded_bytes": 1e6 * requests,
            "fs.stored_bytes": 0,
            "fs.faults": 3,
            "shm.evictions": 7,
        },
        "levels": {"shm.rows_used": 2, "fs.used_bytes": 2**29, "fs.loading": 4, "fs.storing": 5},
    }


def serving(plan: Plan) -> RunState:
    workers = {
        (replica.data_parallel_index, worker.rank): "ready"
        for replica in plan.replicas
        for worker in replica.workers
    }
    return RunState(phases=workers, ready_s=1.5)


def screen_text(screen: LiveScreen, state: RunState, height: int = 40) -> str:
    where = console(terminal=True, height=height)
    where.print(screen.draw(state))
    return shown(where)


def row(text: str, first: str) -> list[str]:
    """The words of a line; a number and its unit are one."""
    line = next(line for line in text.splitlines() if line.startswith(first))
    return [word for word in line.split(" ") if word]


def test_the_screen_shows_replicas_tiers_rates_faults_and_what_is_left(plan: Plan) -> None:
    state, screen = serving(plan), LiveScreen(console(terminal=True), plan, requests=400)
    for t, requests in ((10.0, 20), (12.0, 100)):
        state.progress[0] = event(t, requests)
        screen.take_in(state)
    state.failures.append(Failure("killed by SIGKILL", replica=1))
    text = screen_text(screen, state)
    assert "100 of 400 requests, 25%" in text
    assert "left" in text
    assert row(text, "dp0") == [
        *("dp0", "serving", "100", "50.0%", "25.0%", "0.0%", "25.0%", "4\u00a0k")
    ]
    assert row(text, "dp1")[:2] == ["dp1", "failed"]
    assert row(text, "fs") == [
        *("fs", "512", "MiB", "50%", "40\u00a0MB/s", "0\u00a0B/s", "4", "5", "0", "3")
    ]
    assert row(text, "shm")[-2:] == ["7", "0"]


def test_before_everybody_is_ready_it_says_how_many_are(plan: Plan) -> None:
    state = serving(plan)
    state.ready_s = None
    state.phases[1, 1] = "group"
    text = screen_text(LiveScreen(console(terminal=True), plan, None), state)
    assert "starting: 3 of 4 workers are ready" in text
    assert row(text, "dp1")[1] == "mapping"


def test_more_replicas_than_a_terminal_is_high_are_counted(tmp_path: Path) -> None:
    plan = plan_for(
        tmp_path,
        *("parallel.data_parallel_size=64", "spawn.check_machine=false", "region.size=1MiB"),
    )
    text = screen_text(LiveScreen(console(terminal=True, height=20), plan, None), serving(plan))
    assert len(text.splitlines()) <= 20
    assert "more" in text


@pytest.mark.parametrize(("mode", "terminal"), [("plain", True), ("live", False), ("auto", False)])
def test_lines_are_written_where_nothing_is_drawn(
    plan: Plan, mode: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "PLAIN_INTERVAL_S", 0.0)
    where = console(terminal=terminal)
    with RunView(where, plan, 400, mode) as view:
        state = serving(plan)
        state.progress[0] = event(1.0, 20)
        view.update(state)
    text = shown(where)
    assert "ready: 4 workers in 1.50 s" in text
    assert "20/400 requests  hits 50.0%" in text
    assert "\x1b" not in text
    assert ("view=live needs a terminal" in text) == (mode == "live")


def test_in_ci_nothing_is_said_again_and_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "PLAIN_INTERVAL_S", 0.0)
    where = console(terminal=False)
    with RunView(where, plan, 400, "auto", in_ci=True) as view:
        state = serving(plan)
        state.progress[0] = event(1.0, 20)
        for _ in range(3):
            view.update(state)
    assert shown(where) == "ready: 4 workers in 1.50 s\n"


@pytest.mark.parametrize("mode", ["auto", "live"])
def test_a_terminal_is_drawn_on_and_left_clean(
    plan: Plan, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "DRAW_INTERVAL_S", 0.0)
    where = console(terminal=True)
    with RunView(where, plan, 400, mode) as view:
        state = serving(plan)
        state.progress[0] = event(1.0, 20)
        view.update(state)
        assert "20 of 400 requests" in shown(where)
    assert shown(where).endswith("\x1b[2K") or "\x1b[1A\x1b[2K" in shown(where)
