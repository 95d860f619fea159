"""Rounds of one part: every way stores and loads the same, one after the other, in changing order.

Each step begins after the same pause, with nothing left to be written. A store's time ends when the
way says that it has stored; what the disk still has to write then is flushed and timed, too. Before
loads, files are flushed and dropped from the page cache, and it is looked whether they are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers import disk
from benchmarks.peers.catalogue import WaySpec
from benchmarks.peers.child import Child, WayFailed
from benchmarks.peers.results import LOAD, ON_DISK, STORE, Figures, PartResult, Traits

if TYPE_CHECKING:
    from benchmarks.peers.servers import S3Place

REST_S: Final = 0.3
PROBED: Final = 4  # blocks that are damaged, or looked for after a restart
MEMORY_STEPS: Final = 3  # whose blocks memory holds, so that pages are used again
COLD_TRIES: Final = 20
COLD_WAIT_S: Final = 0.3
COLD_SHARE: Final = 0.01
WARM_UPS: Final = {"filesystem": 1, "object": 1, "memory": 4}
Find = Callable[[WaySpec], Path]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done. `sizes`: payload bytes of a block by name; `step_bytes` in each step."""

    sizes: Mapping[str, int]
    step_bytes: int
    depth: int
    rounds: int
    rest_s: float = REST_S

    def count(self, block: str) -> int:
        return max(1, self.step_bytes // self.sizes[block])


@dataclass(slots=True)
class Runner:
    """A way with its process, and the directory in which it keeps blocks now."""

    spec: WaySpec
    child: Child
    directory: Path
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.directory.name

    def end(self, at_once: bool) -> None:
        if at_once:
            self.child.kill()
        else:
            self.child.close()


@dataclass(slots=True)
class Part:
    """One part over all sizes. `find` gives a way's interpreter, or raises EnvironmentFailed."""

    name: str
    ways: Sequence[WaySpec]
    plan: Plan
    root: Path
    find: Find
    say: Callable[[str], None]
    place: S3Place | None = None
    result: PartResult = field(init=False)

    def __post_init__(self) -> None:
        names = [way.name for way in self.ways]
        self.result = PartResult(self.name, names[0], names)
        for way in self.ways:
            self.result.traits[way.name] = Traits(
                way.checksum, way.restart, way.publish, way.bounds
            )

    @property
    def on_disk(self) -> bool:
        return self.name == "filesystem"

    def measure(self) -> PartResult:
        """All sizes, in the same processes."""
        with contextlib.ExitStack() as closing:
            runners = self._begin(closing)
            for block in self.plan.sizes:
                opened = self._open(block, runners)
                self._rounds(block, opened)
                self._empty()
        return self.result

    def try_faults(self) -> PartResult:
        """A restart, and then damage, with few blocks of one size. Nothing is timed."""
        block = next(iter(self.plan.sizes))
        steps = (self._stop, self._restart, self._look_again, self._damage)
        with contextlib.ExitStack() as closing:
            runners = self._open(block, self._begin(closing))
            for step in steps:
                self.say(f"{self.name}, faults: {step.__name__.strip('_').replace('_', ' ')}")
                for runner in list(runners):
                    with self._failing(runner.spec, "", runners, runner):
                        step(runner, block)
            self._empty()
        return self.result

    def _begin(self, closing: contextlib.ExitStack) -> list[Runner]:
        """A process for each way. They import what they need at the same time."""
        self.say(f"{self.name}: starting {len(self.ways)} processes")
        runners: list[Runner] = []
        for spec in self.ways:
            with self._failing(spec, ""):
                name = re.sub(r"\W+", "-", f"{self.name} {spec.name}")
                runner = Runner(spec, self._start(spec, name), self.root / name)
                # Whoever interrupts has waited long enough.
                closing.push(lambda kind, *_, each=runner: each.end(kind is not None))
                runners.append(runner)
        return runners

    def _open(self, block: str, runners: list[Runner]) -> list[Runner]:
        """The ways that could be opened, each in a directory of its own."""
        opened = list(runners)
        for runner in runners:
            runner.directory = self.root / f"{runner.name}-{block}"
            runner.directory.mkdir()
            with self._failing(runner.spec, block, opened, runner):
                if not runner.child.running:  # it failed at another size
                    runner.child = self._start(runner.spec, runner.name)
                self._open_way(runner, block)
        return opened

    def _start(self, spec: WaySpec, name: str) -> Child:
        """A process. Raises EnvironmentFailed, OSError."""
        python = self.find(spec)
        logs, scratch = self.root / "logs", self.root / "scratch" / name
        for each in (logs, scratch):
            each.mkdir(parents=True, exist_ok=True)
        # As engines have it: copies that wait for sleeping threads would decide everything.
        more = {"OMP_NUM_THREADS": "1"}
        if self.place:
            more |= self.place.account.environment()
        return Child(python, spec.script, scratch, logs / f"{name}.txt", more)

    def _open_way(self, runner: Runner, block: str) -> None:
        answer = runner.child.ask("open", work=self._work(runner.spec, block, runner.directory))
        self.result.versions |= answer["versions"]
        for note in answer["notes"]:
            if (line := f"{runner.spec.name}: {note}") not in self.result.notes:
                self.result.notes.append(line)

    def _work(self, spec: WaySpec, block: str, directory: Path) -> dict[str, Any]:
        plan, count = self.plan, self.plan.count(block)
        steps = MEMORY_STEPS if self.name == "memory" else plan.rounds + WARM_UPS[self.name] + 2
        where = self.place.options() if self.place else {}
        return {
            "way": spec.name,
            "directory": str(directory),
            "block_bytes": plan.sizes[block],
            "count": count,
            "depth": plan.depth,
            "capacity_blocks": steps * count,
            "options": {**where, "prefix": directory.name, **spec.options},
        }

    def _rounds(self, block: str, runners: list[Runner]) -> None:
        warm_ups = WARM_UPS[self.name]
        for number in range(-warm_ups, self.plan.rounds):
            told = "warming up" if number < 0 else f"round {number + 1} of {self.plan.rounds}"
            self.say(f"{self.name}, {block}: {told}")
            order = random.Random(number).sample(runners, len(runners))
            for step in (self._store, self._load):
                for runner in order:
                    if runner in runners:
                        with self._failing(runner.spec, block, runners, runner):
                            figures = self._figures(runner, block) if number >= 0 else Figures()
                            step(runner, block, f"{block} {number}", figures)

    def _figures(self, runner: Runner, block: str) -> Figures:
        return self.result.figures.setdefault((runner.spec.name, block), Figures())

    def _store(self, runner: Runner, block: str, label: str, figures: Figures) -> None:
        nbytes = self.plan.count(block) * self.plan.sizes[block]
        time.sleep(self.plan.rest_s)
        answer = runner.child.ask("store", label=label)
        seconds, cpu_s = answer["seconds"], answer["cpu_s"]
        figures.add(STORE, nbytes, seconds, cpu_s)
        if self.on_disk:
            start_s = time.perf_counter()
            disk.flush(runner.directory)
            figures.add(ON_DISK, nbytes, seconds + time.perf_counter() - start_s)

    def _load(self, runner: Runner, block: str, label: str, figures: Figures) -> None:
        count = self.plan.count(block)
        if self.on_disk:
            self._make_cold(runner)
        time.sleep(self.plan.rest_s)
        answer = runner.child.ask("load", label=label)
        if answer["came"] != count or answer["wrong"]:
            raise WayFailed(
                f"load: {answer['came']} of {count} blocks came, {answer['wrong']} of them wrong"
            )
        figures.add(LOAD, count * self.plan.sizes[block], answer["seconds"], answer["cpu_s"])

    def _make_cold(self, runner: Runner) -> None:
        """Nothing of its files stays in the page cache; what it still does beside may have to end
        first. Raises WayFailed."""
        for _ in range(COLD_TRIES):
            runner.child.ask("settle")
            disk.flush(runner.directory)
            disk.drop(runner.directory)
            share = disk.resident_share(runner.directory)
            if share <= COLD_SHARE:
                return
            time.sleep(COLD_WAIT_S)
        raise WayFailed(f"load: {share:.0%} of its files stay in the page cache: not cold")

    def _stop(self, runner: Runner, block: str) -> None:
        runner.child.ask("store", label="restart", count=PROBED)
        runner.child.ask("settle")
        runner.child.close()

    def _restart(self, runner: Runner, block: str) -> None:
        runner.child = self._start(runner.spec, runner.name)

    def _look_again(self, runner: Runner, block: str) -> None:
        self._open_way(runner, block)
        answer = runner.child.ask("load", label="restart", count=PROBED)
        right = answer["came"] - answer["wrong"]
        told = "kept" if right == PROBED else f"{right} of {PROBED} kept"
        self._note(runner, restart=told)

    def _damage(self, runner: Runner, block: str) -> None:
        before = set(self._names(runner))
        runner.child.ask("store", label="damage", count=PROBED)
        if self.on_disk:
            runner.child.ask("settle")
            disk.flush(runner.directory)
        half = self.plan.sizes[block] // 2
        for name in self._names(runner):
            if name in before:
                continue
            if self.place:
                data = bytearray(self.place.bucket.get(name) or b"")
                data[len(data) // 2] ^= 0xFF
                self.place.bucket.put(name, bytes(data))
            elif name.stat().st_size > half:
                disk.damage(name, half)
        if self.on_disk:
            disk.drop(runner.directory)
        self._note(runner, checksum=_after_damage(runner.child))

    def _note(self, runner: Runner, **found: str) -> None:
        traits = self.result.traits[runner.spec.name]
        self.result.traits[runner.spec.name] = dataclasses.replace(traits, **found)

    def _names(self, runner: Runner) -> list[Any]:
        if self.place:
            return self.place.names()
        return disk.files(runner.directory)

    def _empty(self) -> None:
        if self.place:
            self.place.empty()

    @contextlib.contextmanager
    def _failing(
        self, spec: WaySpec, block: str, runners: list[Runner] | None = None, runner: Any = None
    ) -> Iterator[None]:
        """A way that fails is a row that says why; the others go on."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.result.failures[(spec.name, block)] = str(error)
            if runners is not None:
                runners.remove(runner)
                runner.child.kill()


def _after_damage(child: Child) -> str:
    try:
        answer = child.ask("load", label="damage", count=PROBED)
    except WayFailed:
        return "refused, all of the batch"
    if answer["wrong"]:
        return f"none: {answer['wrong']} of {PROBED} wrong blocks served"
    if answer["came"]:
        return "not tried: they came from elsewhere"
    return "refused"
