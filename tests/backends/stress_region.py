"""Create, attach, write, verify and kill, thousands of times; then look for anything left behind.

Each arena plays rounds one after the other: a creator process, peers that attach to its region,
now and then a rival with the same engine_id, and SIGKILL for one or two of them at a random moment,
creation included. A reaper runs all the while. Run it as a program; it prints what it did as JSON
and ends with 1 if a byte was wrong, something leaked, hung or failed without reason.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backends.errors import RegionError
from backends.region.handle import RegionHandle
from backends.region.reap import find_stale, reap
from backends.region.region import Region
from backends.region.spec import RegionSpec

HANG_S = 30.0
KILL_WITHIN_S = 0.012
_PR_SET_PDEATHSIG = 1


@dataclass
class Actor:
    """A child of an arena, as the arena sees it: messages come, commands go."""

    role: str
    pid: int
    out_fd: int
    gate_fd: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    buffer: bytes = b""
    ended: bool = False
    killed: bool = False

    def tell(self, command: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.gate_fd, command)

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)


class Speaker:
    """The child's side."""

    def __init__(self, out_fd: int, gate_fd: int) -> None:
        self._out_fd = out_fd
        self._gate_fd = gate_fd

    def say(self, **message: Any) -> None:
        os.write(self._out_fd, json.dumps(message).encode() + b"\n")

    def hear(self) -> bytes:
        return os.read(self._gate_fd, 1)


def pattern(seed: int, local_rank: int, spec: RegionSpec) -> np.ndarray:
    """Other bytes for every seed, rank and row, and quick to make."""
    first = np.frombuffer(random.Random(f"{seed}.{local_rank}").randbytes(spec.slot_bytes), "u1")
    return first + np.arange(spec.rows, dtype=np.uint8)[:, None]


def creator(spec: RegionSpec, directory: str, seed: int, speaker: Speaker) -> None:
    region = Region.create(spec, directory=directory)
    if region.slot_view(0).any() or region.row_headers().any():
        speaker.say(wrong="a new region is not zero")
    region.slot_view(0)[:] = pattern(seed, 0, spec)
    speaker.say(handle=region.handle().to_dict())
    while command := speaker.hear():
        if command == b"u":
            region.unlink()
        elif command == b"v":
            speaker.say(slots=[verdict(region, seed, k) for k in range(spec.local_world_size)])
            end = 4096 + spec.local_world_size * spec.slot_bytes
            padding = any(region.row_view(row)[end:].any() for row in range(spec.rows))
            if padding or region.row_headers().any():
                speaker.say(wrong="padding or headers were written to")
        elif command == b"c":
            region.close()
            return
        elif command == b"x":
            os._exit(0)


def verdict(region: Region, seed: int, local_rank: int) -> str:
    slots = region.slot_view(local_rank)
    if np.array_equal(slots, pattern(seed, local_rank, region.spec)):
        return "written"
    return "mixed" if slots.any() else "zero"


def peer(
    spec: RegionSpec, directory: str, handle: RegionHandle, seed: int, rank: int, speaker: Speaker
) -> None:
    with Region.attach(handle, spec, directory=directory) as region:
        if rank % 2:
            region.prefault(rank)
        if verdict(region, seed, 0) != "written":
            speaker.say(wrong=f"rank {rank} sees other bytes in slot 0 than were written")
        region.slot_view(rank)[:] = pattern(seed, rank, spec)
        if verdict(region, seed, rank) != "written":
            speaker.say(wrong=f"rank {rank} sees other bytes in its slot than it wrote")
    speaker.say(done=rank)


def rival(spec: RegionSpec, directory: str, speaker: Speaker) -> None:
    with Region.create(spec, directory=directory):
        speaker.say(done="created")


class Arena:
    """Plays rounds with one engine_id. `problems` is what went wrong."""

    def __init__(self, number: int, directory: str, seed: int) -> None:
        self.rng = random.Random(seed * 1000 + number)
        self.directory = directory
        self.engine_id = f"stress{os.getppid()}_{number}"
        self.counts = dict.fromkeys(("rounds", "attached", "killed", "refused", "verified"), 0)
        self.problems: list[str] = []
        self.actors: list[Actor] = []
        self.kills: list[tuple[float, Actor]] = []

    def play(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self.problems) < 5:
            self.round()
            self.counts["rounds"] += 1

    def round(self) -> None:
        rng = self.rng
        spec = RegionSpec(
            engine_id=self.engine_id,
            run_id=f"run{self.counts['rounds']}",
            backing=rng.choice(("memfd", "shm")),
            rows=rng.choice((1, 3, 16)),
            slot_bytes=rng.choice((64, 4160, 65536)),
            local_world_size=rng.choice((2, 3, 4)),
            geometry_digest="5" * 16,
            persist_name=False,
        )
        seed = rng.getrandbits(32)
        self.actors, self.kills = [], []
        lead = self.start("creator", lambda s: creator(spec, self.directory, seed, s))
        self.wait([lead], lambda: bool(lead.messages))
        if lead.messages and "handle" in lead.messages[-1]:
            handle = RegionHandle.from_dict(lead.messages[-1]["handle"])
            self.attach(spec, handle, seed, lead)
        self.finish(lead, spec)

    def attach(self, spec: RegionSpec, handle: RegionHandle, seed: int, lead: Actor) -> None:
        peers = [
            self.start("peer", lambda s, k=k: peer(spec, self.directory, handle, seed, k, s))
            for k in range(1, spec.local_world_size)
        ]
        if spec.backing == "shm" and self.rng.random() < 0.3:
            self.start("rival", lambda s: rival(spec, self.directory, s))
        self.wait(self.actors[1:], lambda: all(actor.ended for actor in self.actors[1:]))
        if self.rng.random() < 0.5:
            lead.tell(b"u")
        lead.tell(b"v")
        self.wait([lead], lambda: any("slots" in message for message in lead.messages))
        done = {m["done"] for actor in peers for m in actor.messages if "done" in m}
        self.counts["attached"] += len(done)
        for message in lead.messages:
            for rank, found in enumerate(message.get("slots", [])):
                self.counts["verified"] += 1
                if (rank == 0 or rank in done) and found != "written":
                    self.problems.append(f"slot {rank} of {spec} is {found}, expected written")

    def finish(self, lead: Actor, spec: RegionSpec) -> None:
        lead.tell(self.rng.choice((b"c", b"x")))
        self.wait(self.actors, lambda: all(actor.ended for actor in self.actors))
        for actor in self.actors:
            self.judge(actor, lead, spec)
            os.close(actor.out_fd)
            os.close(actor.gate_fd)

    def judge(self, actor: Actor, lead: Actor, spec: RegionSpec) -> None:
        _, status = os.waitpid(actor.pid, 0)
        self.counts["killed"] += actor.killed
        if status and not actor.killed:
            self.problems.append(f"{actor.role} ended with wait status {status} in {spec}")
        for message in actor.messages:
            if "wrong" in message:
                self.problems.append(f"{message['wrong']}: {spec}")
            elif "error" in message:
                self.counts["refused"] += 1
                # Only the creator's death, or its life for a rival, is a reason to be refused.
                expected = lead.killed if actor.role == "peer" else actor.role == "rival"
                if not expected or not message["typed"]:
                    self.problems.append(f"{actor.role}: {message['error']}")
            elif actor.role == "rival" and not lead.killed:
                self.problems.append(f"a rival got {spec} while its engine lived")
        if not (actor.killed or actor.messages):
            self.problems.append(f"{actor.role} said nothing in {spec}")

    def start(self, role: str, play: Callable[[Speaker], None]) -> Actor:
        out_read, out_write = os.pipe()
        gate_read, gate_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for actor in self.actors:
                os.close(actor.gate_fd)
            os.close(gate_write)
            _act(play, Speaker(out_write, gate_read))
        os.close(out_write)
        os.close(gate_read)
        actor = Actor(role, pid, out_read, gate_write)
        self.actors.append(actor)
        if self.rng.random() < 0.25:
            self.kills.append((time.monotonic() + self.rng.uniform(0, KILL_WITHIN_S), actor))
        return actor

    def wait(self, actors: list[Actor], enough: Callable[[], bool]) -> None:
        """Read messages, and kill whose time has come, until it is enough or they have ended."""
        deadline = time.monotonic() + HANG_S
        while not enough() and not all(actor.ended for actor in actors):
            now = time.monotonic()
            for due, victim in self.kills:
                if due <= now and not victim.killed and not victim.ended:
                    victim.kill()
            if now > deadline:
                hung = [actor for actor in actors if not actor.ended]
                self.problems.append(f"{[actor.role for actor in hung]} hung for {HANG_S} s")
                for actor in hung:
                    actor.kill()
                deadline += HANG_S
            self.read_some()

    def read_some(self) -> None:
        open_fds = {actor.out_fd: actor for actor in self.actors if not actor.ended}
        for fd in select.select(list(open_fds), [], [], 0.001)[0]:
            actor = open_fds[fd]
            data = os.read(fd, 65536)
            actor.ended = not data
            *lines, actor.buffer = (actor.buffer + data).split(b"\n")
            actor.messages += [json.loads(line) for line in lines]


def _act(play: Callable[[Speaker], None], speaker: Speaker) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        play(speaker)
    except RegionError as error:
        speaker.say(error=str(error), typed=True)
    except BaseException:
        speaker.say(error=traceback.format_exc(), typed=False)
    os._exit(0)


def reap_always(directory: str) -> None:
    """A second reaper beside those of the engines, which must never take a living one's file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        reap(find_stale(directory), apply=True)
        time.sleep(0.003)


def arena_process(number: int, directory: str, seed: int, seconds: float, out_fd: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    arena = Arena(number, directory, seed)
    try:
        arena.play(seconds)
    except BaseException:
        arena.problems.append(traceback.format_exc())
    with os.fdopen(out_fd, "w") as stream:
        json.dump({"counts": arena.counts, "problems": arena.problems}, stream)
    os._exit(0)


@contextlib.contextmanager
def shared_memory_meter() -> Iterator[Callable[[], int]]:
    """Bytes of shared memory in use: of this program alone where a cgroup can be made, else all."""
    root = Path("/sys/fs/cgroup")
    for base in (root / "memory", root):
        group = base / f"stress-region-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        home = _move_to(group)
        if home is None or not (group / "memory.stat").exists():
            group.rmdir()
            continue
        try:
            yield partial(_field, group / "memory.stat", "shmem ")
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
        return
    yield lambda: 1024 * _field(Path("/proc/meminfo"), "Shmem:")


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


def run(seconds: float, arenas: int, seed: int) -> dict[str, Any]:
    directory = tempfile.mkdtemp(prefix="region-stress-", dir="/dev/shm")
    with shared_memory_meter() as used_bytes:
        before = used_bytes()
        reaper = os.fork()
        if reaper == 0:
            reap_always(directory)
        streams = []
        for number in range(arenas):
            out_read, out_write = os.pipe()
            if os.fork() == 0:
                os.close(out_read)
                arena_process(number, directory, seed, seconds, out_write)
            os.close(out_write)
            streams.append(os.fdopen(out_read))
        parts = [json.loads(stream.read() or "{}") for stream in streams]
        os.kill(reaper, signal.SIGKILL)
        for _ in range(arenas + 1):
            os.wait()
        problems = [problem for part in parts for problem in part["problems"]]
        problems += [f"{path} cannot be reaped" for path in _left_after_reaping(directory)]
        leaked = _settled(used_bytes, before) - before
        if leaked > (1 << 20):
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
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--arenas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    result = {"seed": options.seed, **run(options.seconds, options.arenas, options.seed)}
    print(json.dumps(result, indent=2))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
