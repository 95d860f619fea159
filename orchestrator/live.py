"""The live view: replicas, tiers, rates, faults and what is left to do, drawn on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backends.stack.observer import NODE
from backends.units import parse_size
from orchestrator.events import PHASES
from orchestrator.html import figures
from orchestrator.plan import Plan
from orchestrator.supervise import RunState

_PRIMARY: Final = "shm"
_OTHER_LINES: Final = 8  # what is drawn besides replicas and tiers
_BAR: Final = 24
_WINDOW_S: Final = 3.0
_WORDS: Final = {"started": "meeting", "group": "mapping", "region": "preparing"}


@dataclass(frozen=True, slots=True)
class _Told:
    """What a leader told at a moment."""

    t: float
    counts: Mapping[str, float]
    levels: Mapping[str, float]


class LiveScreen:
    """What is on the screen. `requests` is None where the number is not known."""

    def __init__(self, console: Console, plan: Plan, requests: int | None) -> None:
        self._console = console
        self._plan = plan
        self._requests = requests
        self._told: dict[int, list[_Told]] = {}
        self._serving_s: float | None = None
        self._capacities = _capacities(plan)

    def take_in(self, state: RunState) -> None:
        """Remember what is new, for rates."""
        if self._serving_s is None and state.ready_s is not None:
            self._serving_s = time.monotonic()
        for index, event in state.progress.items():
            told = self._told.setdefault(index, [])
            if "counts" in event and (not told or told[-1].t != event["t"]):
                told.append(_Told(event["t"], event["counts"], event["levels"]))
                while len(told) > 2 and told[-1].t - told[1].t >= _WINDOW_S:
                    del told[0]

    def draw(self, state: RunState) -> RenderableType:
        parts: list[RenderableType] = [self._head(state), Text(), self._replicas(state)]
        if any(self._told.values()):
            parts += [Text(), self._tiers()]
            if self._plan.topology.world_size > 1:
                parts.append(Text("rates of shm: each replica's rank 0", style="dim"))
        return Group(*parts)

    def _head(self, state: RunState) -> RenderableType:
        topology = self._plan.topology
        workers = topology.world_size * topology.data_parallel_size
        passed = figures.clock(time.monotonic() - state.started_s)
        if state.ready_s is None:
            ready = sum(phase in ("ready", "done") for phase in state.phases.values())
            return Text(f"starting: {ready} of {workers} workers are ready   {passed}")
        done = _done(state)
        words = f"{done:,} requests"
        if not self._requests:
            return Text(f"serving: {words}   {passed}")
        share = min(1.0, done / self._requests)
        left = self._left_s(share)
        line = Table.grid(padding=(0, 2))
        line.add_row(
            "serving",
            ProgressBar(total=1.0, completed=share, width=_BAR),
            f"{done:,} of {self._requests:,} requests, {share:.0%}",
            passed,
            "" if left is None else f"about {figures.clock(left)} left",
        )
        return line

    def _left_s(self, share: float) -> float | None:
        if self._serving_s is None or not share:
            return None
        return (time.monotonic() - self._serving_s) * (1 - share) / share

    def _replicas(self, state: RunState) -> Table:
        names = ["device", *self._plan.settings.tiers.order]
        names += [NODE] if self._plan.settings.region.scope == "node" else []
        table = _table("replica", "state", "requests", "found", *names, "tokens/s")
        indices = [replica.data_parallel_index for replica in self._plan.replicas]
        room = max(1, self._console.height - _OTHER_LINES - len(names))
        for index in indices[:room]:
            event = state.progress.get(index)
            told = self._told.get(index, [])
            prompt = event["prompt_tokens"] if event else 0
            table.add_row(
                f"dp{index}",
                _state(state, index),
                f"{event['requests']:,}" if event else "-",
                f"{event['hit_tokens'] / prompt:.1%}" if event and prompt else "-",
                *(_share(told, f"hit_tokens.{name}") for name in names),
                figures.compact(_rate(told, "prompt_tokens")) if len(told) > 1 else "-",
            )
        if len(indices) > room:
            table.add_row(f"and {len(indices) - room} more")
        return table

    def _tiers(self) -> Table:
        table = _table(
            "tier", "filled", "", "load/s", "store/s", "loading", "storing", "evictions", "faults"
        )
        for name in self._plan.settings.tiers.order:
            last = [told[-1] for told in self._told.values() if told]
            every = [told for told in self._told.values() if told]
            held = self._held(name, last)
            capacity = self._capacities.get(name)
            filled = held / capacity if capacity else None
            faults = sum(told.counts.get(f"{name}.faults", 0) for told in last)
            table.add_row(
                name,
                figures.size(held),
                "" if filled is None else f"{filled:.0%}",
                figures.rate(sum(_rate(told, f"{name}.loaded_bytes") for told in every)),
                figures.rate(sum(_rate(told, f"{name}.stored_bytes") for told in every)),
                _sum(last, f"{name}.loading"),
                _sum(last, f"{name}.storing" if name != _PRIMARY else "shm.rows_pinned"),
                f"{sum(told.counts.get(f'{name}.evictions', 0) for told in last):,.0f}",
                Text(f"{faults:,.0f}", style="bold red" if faults else ""),
            )
        return table

    def _held(self, name: str, last: list[_Told]) -> float:
        if name == _PRIMARY:
            rows = sum(told.levels["shm.rows_used"] for told in last)
            return rows * self._plan.region.row_bytes
        return max((told.levels.get(f"{name}.used_bytes", 0) for told in last), default=0)


def _capacities(plan: Plan) -> dict[str, float]:
    """Bytes that each tier may hold, those without a limit left out."""
    found: dict[str, float] = {
        _PRIMARY: plan.region.rows * plan.region.row_bytes * len(plan.replicas)
    }
    for name in plan.settings.tiers.order[1:]:
        capacity = getattr(getattr(plan.settings.tiers.stack, name, None), "capacity", "unbounded")
        if capacity != "unbounded":
            found[name] = parse_size(capacity)
    return found


def _done(state: RunState) -> int:
    return sum(event["requests"] + event["rejected"] for event in state.progress.values())


def _state(state: RunState, index: int) -> Text:
    if any(failure.replica == index for failure in state.failures):
        return Text("failed", style="bold red")
    if index in state.ended:
        return Text("done", style="green")
    phases = [phase for (replica, _), phase in state.phases.items() if replica == index]
    first = min((PHASES.index(p) if p in PHASES else -1 for p in phases), default=-1)
    if first < PHASES.index("started"):
        return Text("starting")
    if index in state.progress:
        return Text("serving")
    return Text(_WORDS.get(PHASES[first], PHASES[first]))


def _rate(told: list[_Told], name: str) -> float:
    """A count's growth a second over the last moments."""
    if len(told) < 2 or told[-1].t <= told[0].t:
        return 0.0
    grown = told[-1].counts.get(name, 0) - told[0].counts.get(name, 0)
    return max(0.0, grown / (told[-1].t - told[0].t))


def _share(told: list[_Told], name: str) -> str:
    """A count's part of all prompt tokens."""
    prompt = told[-1].counts.get("prompt_tokens", 0) if told else 0
    return f"{told[-1].counts.get(name, 0) / prompt:.1%}" if prompt else "-"


def _sum(last: list[_Told], name: str) -> str:
    there = [told.levels[name] for told in last if name in told.levels]
    return f"{sum(there):,.0f}" if there else "-"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    return table
