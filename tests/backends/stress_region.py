"""Create, attach, write, verify and kill, thousands of times; then look for anything left behind.

Each arena plays rounds one after the other: one process creates a region, peers attach to it, now
and then a rival with the same engine_id tries to, and SIGKILL strikes at random moments, creation
included; who was killed is replaced. A reaper runs all the while. Run it as a program: it prints
what it did as JSON and ends with 1 if a byte was wrong, something leaked, hung or failed without
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.reap import find_stale, inspect, reap
from backends.region.region import Region
from backends.region.spec import RegionSpec

HANG_S = 30.0
KILL_SHARE = 0.125
KILL_WITHIN_S = 0.006
MAX_WORKERS = 4
_PR_SET_PDEATHSIG = 1


class Player:
    """A child process: answers each command line with one line, until it is killed."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.region: Region | None = None

    def serve(self, in_fd: int, out_fd: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(in_fd) as commands:
            for line in commands:
                command = json.loads(line)
                try:
                    answer = getattr(self, command.pop("do"))(**command)
                except RegionError as error:
                    answer = {"refused": str(error)}
                except BaseException:
                    answer = {"wrong": traceback.format_exc()}
                os.write(out_fd, json.dumps(answer).encode() + b"\n")
        os._exit(0)

    def create(self, spec: dict[str, Any], seed: int) -> dict[str, Any]:
        self.region = region = Region.create(RegionSpec(**spec), directory=self.directory)
        if any(region.row_view(row).any() for row in range(region.spec.rows)):
            return {"wrong": "a new region is not zero"}
        region.slot_view(0)[:] = pattern(seed, 0, region.spec)
        return {"handle": region.handle().to_dict()}

    def join(
        self, spec: dict[str, Any], handle: dict[str, Any], seed: int, rank: int
    ) -> dict[str, Any]:
        told = RegionHandle.from_dict(handle)
        with Region.attach(told, RegionSpec(**spec), directory=self.directory) as region:
            if seed % 2:
                region.prefault(rank)
            if verdict(region, seed, 0) != "written":
                return {"wrong": f"rank {rank} sees other bytes in slot 0 than were written"}
            region.slot_view(rank)[:] = pattern(seed, rank, region.spec)
            if verdict(region, seed, rank) != "written":
                return {"wrong": f"rank {rank} sees other bytes in its slot than it wrote"}
        return {"written": rank}

    def rival(self, spec: dict[str, Any]) -> dict[str, Any]:
        with Region.create(RegionSpec(**spec), directory=self.directory):
            return {"created": True}

    def verify(self, seed: int, unlink: bool) -> dict[str, Any]:
        region = self.region
        assert region is not None
        if region.spec.backing == "shm":
            # Nobody but its owner may have taken the name away.
            file = inspect(os.path.join(self.directory, region.spec.name))
            if file is None or file.inode != os.fstat(region.handle().fd).st_ino:
                return {"wrong": f"a living engine's name is gone: {file}"}
        if unlink:
            region.unlink()
        spec = region.spec
        end = 4096 + spec.local_world_size * spec.slot_bytes
        if any(region.row_view(row)[end:].any() for row in range(spec.rows)):
            return {"wrong": "padding was written to"}
        if region.row_headers().any():
            return {"wrong": "headers were written to"}
        return {"slots": [verdict(region, seed, k) for k in range(spec.local_world_size)]}

    def close(self) -> dict[str, Any]:
        if self.region is not None:
            self.region.close()
        return {"closed": True}

    def leftovers(self) -> dict[str, Any]:
        """Mappings and descriptors of regions that are all closed."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        links = [_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        marks = ("memfd:kvquay_", self.directory)
        return {"left": [text for text in maps + links if any(mark in text for mark in marks)]}

    def exit(self) -> dict[str, Any]:
        """Go without closing anything, as after a crash."""
        os._exit(0)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def pattern(seed: int, local_rank: int, spec: RegionSpec) -> np.ndarray:
    """Other bytes for every seed, rank and row, and quick to make."""
    first = np.frombuffer(random.Random(f"{seed}.{local_rank}").randbytes(spec.slot_bytes), "u1")
    return first + np.arange(spec.rows, dtype=np.uint8)[:, None]


def verdict(region: Region, seed: int, local_rank: int) -> str:
    slots = region.slot_view(local_rank)
    if np.array_equal(slots, pattern(seed, local_rank, region.spec)):
        return "written"
    return "mixed" if slots.any() else "zero"


class Actor:
    """A Player as its arena sees it: alive, busy with one command, or dead."""

    def __init__(self, directory: str) -> None:
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(command_write)
            Player(directory).serve(command_read, answer_write)
        os.close(command_read)
        os.close(answer_write)
        self.commands = command_write
        self.answers = answer_read
        self.killed = False
        self.dead = False
        self._buffer = b""

    def tell(self, **command: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.commands, json.dumps(command).encode() + b"\n")

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def read(self) -> dict[str, Any] | None:
        """What is there of an answer: it, {} at the end of the process, None if not yet whole."""
        data = os.read(self.answers, 65536)
        self._buffer += data
        if not data:
            self.dead = True
            return {}
        if not self._buffer.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(self._buffer)
        self._buffer = b""
        return answer

    def bury(self) -> int:
        os.close(self.commands)
        os.close(self.answers)
        return os.waitpid(self.pid, 0)[1]


class Arena:
    """Plays rounds with one engine_id. `problems` is what went wrong."""

    def __init__(self, number: int, directory: str, seed: int) -> None:
        self.rng = random.Random(seed * 1000 + number)
        self.directory = directory
        self.engine_id = f"stress{os.getppid()}_{number}"
        names = ("rounds", "attached", "killed", "refused", "verified")
        self.counts = dict.fromkeys(names, 0)
        self.problems: list[str] = []
        self.actors = [Actor(directory) for _ in range(MAX_WORKERS + 1)]

    def play(self, rounds: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _ in range(rounds):
            if time.monotonic() > deadline or len(self.problems) > 4:
                break
            self.round()
            self.counts["rounds"] += 1
        for actor in self.actors:
            actor.tell(do="leftovers")
            while (answer := actor.read()) is None:
                pass
            if answer.get("left"):
                self.problems.append(f"a process without a region holds {answer['left']}")
            actor.kill()
            actor.bury()

    def round(self) -> None:
        rng = self.rng
        spec = RegionSpec(
            engine_id=self.engine_id,
            run_id=f"run{self.counts['rounds']}",
            backing=rng.choice(("memfd", "shm")),
            rows=rng.choice((1, 3, 16)),
            slot_bytes=rng.choice((64, 4160, 65536)),
            local_world_size=rng.randint(2, MAX_WORKERS),
            geometry_digest="5" * 16,
        )
        seed = rng.getrandbits(32)
        lead = self.actors[0]
        made = self.ask({lead: {"do": "create", "spec": asdict(spec), "seed": seed}})[lead]
        if "handle" in made:
            self.attach(spec, made["handle"], seed)
        elif not lead.killed:
            self.problems.append(f"create: {made} {spec}")
        if rng.random() < 0.1 and not lead.dead:
            lead.killed = True
            self.ask({lead: {"do": "exit"}})
        self.ask({lead: {"do": "close"}})
        self.respawn()

    def attach(self, spec: RegionSpec, handle: dict[str, Any], seed: int) -> None:
        lead, peers = self.actors[0], self.actors[1 : spec.local_world_size]
        plan = asdict(spec)
        asked = {
            actor: {"do": "join", "spec": plan, "handle": handle, "seed": seed, "rank": rank}
            for rank, actor in enumerate(peers, 1)
        }
        rival = self.actors[MAX_WORKERS]
        if spec.backing == "shm" and self.rng.random() < 0.3:
            asked[rival] = {"do": "rival", "spec": plan}
        answers = self.ask(asked)
        for actor, answer in answers.items():
            self.judge(actor, answer, "created" if actor is rival else "written", spec)
        unlink = self.rng.random() < 0.5
        found = self.ask({lead: {"do": "verify", "seed": seed, "unlink": unlink}})[lead]
        self.judge(lead, found, "slots", spec)
        for rank, state in enumerate(found.get("slots", [])):
            self.counts["verified"] += 1
            if (rank == 0 or "written" in answers[self.actors[rank]]) and state != "written":
                self.problems.append(f"slot {rank} is {state}, expected written: {spec}")

    def judge(self, actor: Actor, answer: dict[str, Any], hoped: str, spec: RegionSpec) -> None:
        """Only the creator's death, or its life for a rival, is a reason to be refused."""
        lead = self.actors[0]
        if "refused" in answer:
            self.counts["refused"] += 1
            fine = hoped == "created" or lead.killed
        elif hoped == "created":
            fine = lead.killed or actor.killed
        else:
            fine = hoped in answer or actor.killed
            self.counts["attached"] += "written" in answer
        if "wrong" in answer or not fine:
            self.problems.append(f"{answer} where {hoped!r} was due: {spec}")

    def ask(self, commands: dict[Actor, dict[str, Any]]) -> dict[Actor, dict[str, Any]]:
        """Send all commands at once and wait for the answers; {} from an actor that died.

        Every eighth command is one too much for its actor, or for the creator: it is killed at a
        random moment while all are at work.
        """
        start = time.monotonic()
        kills: list[tuple[float, Actor]] = []
        for actor, command in commands.items():
            actor.tell(**command)
            if self.rng.random() < KILL_SHARE:
                victim = self.rng.choice((actor, self.actors[0]))
                kills.append((start + self.rng.uniform(0, KILL_WITHIN_S), victim))
        answers: dict[Actor, dict[str, Any]] = {}
        while len(answers) < len(commands):
            now = time.monotonic()
            for due, victim in kills:
                if due <= now and not victim.killed:
                    victim.kill()
            pending = {actor.answers: actor for actor in commands if actor not in answers}
            if now - start > HANG_S:
                self.problems.append(f"hung for {HANG_S} s: {list(commands.values())}")
                for actor in pending.values():
                    actor.kill()
                start = now
            for fd in select.select(list(pending), [], [], 0.0005 if kills else 0.2)[0]:
                answer = pending[fd].read()
                if answer is not None:
                    answers[pending[fd]] = answer
        return answers

    def respawn(self) -> None:
        for index, actor in enumerate(self.actors):
            if actor.killed or actor.dead:
                if not actor.killed:
                    self.problems.append(f"an actor died by itself: wait status {actor.bury()}")
                else:
                    actor.bury()
                self.counts["killed"] += actor.killed
                self.actors[index] = Actor(self.directory)


def reap_always(directory: str, parent: int) -> None:
    """A second reaper beside those of the engines, which must never take a living one's file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:  # it may have died before this one could be bound to it
        reap(find_stale(directory), apply=True)
        time.sleep(0.003)


def arena_process(
    number: int, directory: str, seed: int, rounds: int, seconds: float, out_fd: int
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    arena = Arena(number, directory, seed)
    try:
        arena.play(rounds, seconds)
    except BaseException:
        arena.problems.append(traceback.format_exc())
    with os.fdopen(out_fd, "w") as stream:
        json.dump({"counts": arena.counts, "problems": arena.problems}, stream)
    os._exit(0)


@dataclass(frozen=True)
class Meter:
    """Bytes of shared memory in use, and how much of it others may come to use meanwhile."""

    used_bytes: Callable[[], int]
    tolerance_bytes: int


@contextlib.contextmanager
def shared_memory_meter() -> Iterator[Meter]:
    """Of this program alone where a memory cgroup can be made, else of the whole machine."""
    root = Path("/sys/fs/cgroup")
    for base in (root / "memory", root):
        group = base / f"stress-region-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        home = _move_to(group) if (group / "memory.stat").exists() else None
        if home is None:
            group.rmdir()
            continue
        try:
            yield Meter(partial(_field, group / "memory.stat", "shmem "), 1 << 20)
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
        return
    yield Meter(lambda: 1024 * _field(Path("/proc/meminfo"), "Shmem:"), 256 << 20)


def _move_to(group: Path) -> Path | None:
    """Put this process into `group`; the group that it was in, None where that is not allowed."""
    version = 1 if group.parent.name == "memory" else 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if version == 1 else controllers == "":
            try:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                return None
            return group.parent / path.lstrip("/")
    return None


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.removeprefix(name).split()[0])
    raise ValueError(f"{path} has no {name}")


def run(rounds: int, seconds: float, arenas: int, seed: int) -> dict[str, Any]:
    directory = tempfile.mkdtemp(prefix="region-stress-", dir="/dev/shm")
    with shared_memory_meter() as meter:
        before = meter.used_bytes()
        parent, reaper = os.getpid(), os.fork()
        if reaper == 0:
            reap_always(directory, parent)
            os._exit(0)
        streams = []
        for number in range(arenas):
            out_read, out_write = os.pipe()
            if os.fork() == 0:
                os.close(out_read)
                arena_process(number, directory, seed, rounds // arenas, seconds, out_write)
            os.close(out_write)
            streams.append(os.fdopen(out_read))
        parts = [json.loads(stream.read() or "{}") for stream in streams]
        os.kill(reaper, signal.SIGKILL)
        for _ in range(arenas + 1):
            os.wait()
        problems = [problem for part in parts for problem in part["problems"]]
        problems += [f"{path} cannot be reaped" for path in _left_after_reaping(directory)]
        leaked = _settled(meter.used_bytes, before) - before
        if leaked > meter.tolerance_bytes:
            problems.append(f"{leaked} bytes of shared memory are left")
    counts = {name: sum(part["counts"][name] for part in parts) for name in parts[0]["counts"]}
    return {**counts, "leaked_bytes": leaked, "problems": problems}


def _left_after_reaping(directory: str) -> list[str]:
    reap(find_stale(directory), apply=True)
    left = os.listdir(directory)
    if not left:
        os.rmdir(directory)
    return [os.path.join(directory, name) for name in left]


def _settled(used_bytes: Callable[[], int], before: int) -> int:
    """The kernel counts in batches and frees late, so wait a little for what is on its way."""
    deadline = time.monotonic() + 5
    while used_bytes() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return used_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=60.0, help="end then at the latest")
    parser.add_argument("--arenas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    result = run(options.rounds, options.seconds, options.arenas, options.seed)
    result = {"seed": options.seed, **result}
    print(json.dumps(result, indent=2))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
