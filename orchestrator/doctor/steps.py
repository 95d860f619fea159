"""How long workers take to copy chunks out of a region, as they do it in a run: some in a step, all
ranks of a replica at once, and an engine's other work in between.

Every rank of a replica on this node is a process with the engine's own runner, the first of them
with its scheduler and a tier stack. Prompts of many lengths come again and again, more than the
devices keep, so that each of them is loaded. Tensors and region are as large as in the plan, or as
there is room for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from backends import machine
from backends.errors import KvquayError
from backends.region.region import Region
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.curve import make_curve, numbers_of_blocks
from orchestrator.doctor.result import Curve
from orchestrator.engine.replica import Leader, follow, step_codec
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.step import ChunkWork
from orchestrator.engine.tiers import make_stack
from orchestrator.groups import Group
from orchestrator.lower_tiers import PRIMARY, stack_settings
from orchestrator.plan import Plan
from orchestrator.spawn.lifeline import default_signals, die_with_parent
from orchestrator.workload.request import Request

Int64Array = npt.NDArray[np.int64]
Records = list[tuple[int, float]]

_MOST_BYTES: Final = 256 << 20
_ROOM_SHARE: Final = 16
_EACH: Final = 2
"""Prompts of one length: with those of the others more than a device keeps."""
_NEW: Final = 4
"""Chunks that are computed and stored between two loads, so that those are as far apart as in a run
and find caches and clocks as an engine at work leaves them."""


@dataclass(frozen=True, slots=True)
class StepCopies:
    """`load` by chunks in a step, `chunk_bytes` of them of the first worker; `workers` at once."""

    workers: int
    chunk_bytes: int
    load: Curve


def measure_steps(plan: Plan, stop: Stop, seconds: float) -> StepCopies | None:
    """None where there is no memory for it, or a rank did not get through; for CPU devices.
    Raises RegionError."""
    bench = _bench_plan(plan)
    if bench is None:
        return None
    ranks = [worker.rank for worker in bench.replicas[0].workers if worker.node_rank == 0]
    spec = replace(
        bench.region_spec(0),
        backing="memfd",
        persist_name=False,
        huge_pages="try" if bench.settings.region.huge_pages == "require" else "off",
    )
    with contextlib.closing(Region.create(spec)) as region:
        found = _run_ranks(bench, ranks, region, stop, seconds)
    if found is None:
        return None
    curve = make_curve([record for records in found for record in records])
    block_bytes = bench.replicas[0].workers[0].worker_bytes_per_block
    per_chunk = plan.cache.blocks_per_chunk
    columns = [column.group for column in plan.columns]
    chunk_bytes = per_chunk * sum(block_bytes[group] for group in columns)
    return None if curve is None else StepCopies(len(ranks), chunk_bytes, curve)


def _bench_plan(plan: Plan) -> Plan | None:
    """The plan with the region alone, smaller where memory is short. None: no room at all."""
    per_chunk, columns = plan.cache.blocks_per_chunk, len(plan.columns)
    room = min(_MOST_BYTES, machine.memory_available_bytes() // _ROOM_SHARE)
    entries = min(plan.region.rows, room // plan.region.row_bytes) // columns
    # All prompts that come again are to fit, and as many new ones as come in between.
    for most in reversed(numbers_of_blocks(plan.device_blocks // per_chunk - 1)):
        new = min(_NEW, most) * _EACH * len(numbers_of_blocks(most))
        if 2 * most * _EACH + new <= entries:
            break
    else:
        return None
    settings, stack = plan.settings, plan.settings.tiers.stack
    # What a policy would not take, or let go first, is not what is measured here.
    keeps_all = replace(stack.shm, eviction="lru", admission="all")
    return replace(
        plan,
        region=replace(plan.region, rows=entries * columns),
        device_blocks=(most + 1) * per_chunk,
        settings=replace(
            settings,
            tiers=replace(settings.tiers, order=[PRIMARY], stack=replace(stack, shm=keeps_all)),
            engine=replace(settings.engine, lockstep=True),
            region=replace(settings.region, scope="replica"),
        ),
    )


def _run_ranks(
    plan: Plan, ranks: Sequence[int], region: Region, stop: Stop, seconds: float
) -> list[Records] | None:
    """What each rank recorded; None where one of them failed, or there was no time."""
    pairs = [socket.socketpair() for _ in ranks[1:]]
    answers = [os.pipe() for _ in ranks]
    pids: list[int] = []
    try:
        for place, rank in enumerate(ranks):
            peers = [near for near, _ in pairs] if not place else [pairs[place - 1][1]]

            def work(place: int = place, rank: int = rank, peers: Any = peers) -> bytes:
                group = PipeGroup(place, len(ranks), peers)
                return json.dumps(_serve(plan, rank, group, region, seconds)).encode()

            keep = [answers[place][1], *(peer.fileno() for peer in peers)]
            every = [fd for pipe in answers for fd in pipe]
            every += [end.fileno() for pair in pairs for end in pair]
            pids.append(_fork(work, answers[place][1], [fd for fd in every if fd not in keep]))
        for near, far in pairs:
            near.close()
            far.close()
        for _, write in answers:
            os.close(write)
        said = _read_all([read for read, _ in answers], stop)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        for read, _ in answers:
            os.close(read)
    return [json.loads(each) for each in said] if said and all(said) else None


def _fork(work: Callable[[], bytes], answer: int, others: Sequence[int]) -> int:
    """A process that writes what `work` gives to `answer`, or nothing, and ends. Torch is imported
    already, which would take a new program longer than the measurement."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # The other threads here hold nothing that the child needs: it neither prints nor imports.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        default_signals()
        die_with_parent(parent)
        for fd in others:
            os.close(fd)
        torch.set_num_threads(1)
        said = work()
        while said:
            said = said[os.write(answer, said) :]
    finally:
        os._exit(0)


def _read_all(fds: Sequence[int], stop: Stop) -> list[bytes]:
    said = dict.fromkeys(fds, b"")
    waiting = set(fds)
    while waiting and not stop.asked():
        for fd in select.select(list(waiting), [], [], 0.02)[0]:
            data = os.read(fd, 1 << 16)
            said[fd] += data
            if not data:
                waiting.discard(fd)
                if not said[fd]:
                    return []  # the others may be waiting for it
    return [b"" if fd in waiting else said[fd] for fd in fds]


def _serve(plan: Plan, rank: int, group: PipeGroup, region: Region, seconds: float) -> Records:
    """One rank's part."""
    worker, engine = plan.replicas[0].workers[rank], plan.settings.engine
    if plan.settings.region.prefault:
        region.prefault(worker.slot)
    runner = _Recorded(
        plan.offload_config(0, rank),
        region,
        torch.device("cpu"),
        device_blocks=plan.device_blocks,
        verify=engine.verify,
        copy_threads=engine.copy_threads,
        copy_kernel=engine.copy_kernel,
    )
    if group.rank:
        follow(runner, step_codec(plan), group)
        return runner.records
    own = stack_settings(plan.settings, plan.region.tokens_per_row)
    stack = make_stack(plan, region, [], own)
    Leader(plan, runner, stack, group, lambda _: None).serve(_prompts(plan, seconds))
    return runner.records


def _prompts(plan: Plan, seconds: float) -> Iterator[Request]:
    """The same ones over and over, at least twice; before each of them one that is new."""
    most = plan.device_blocks // plan.cache.blocks_per_chunk - 1
    prompts = [_Prompt.of(plan, chunks) for _ in range(_EACH) for chunks in numbers_of_blocks(most)]
    began_s, numbers = time.monotonic(), itertools.count()
    for turn in itertools.count():
        for prompt in prompts:
            if turn > 1 and time.monotonic() - began_s > seconds:
                return
            yield _Prompt.of(plan, min(_NEW, most)).request(next(numbers))
            yield prompt.request(next(numbers))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Whole chunks and one token, which is always computed."""

    tokens: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, plan: Plan, chunks: int) -> _Prompt:
        tokens = chunks * plan.region.tokens_per_row
        units = tokens // plan.cache.tokens_per_hash
        return cls(tokens + 1, tuple(secrets.token_bytes(32) for _ in range(units)))

    def request(self, number: int) -> Request:
        return Request(number, 0.0, self.tokens, 0, self.hashes)


class _Recorded(WorkerRunner):
    """Keeps how many chunks each step loaded, and how long its copies took."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.records: Records = []

    def execute(self, chunks: Sequence[ChunkWork], group: Group) -> int:
        before_s = self.stats.loaded_s
        agreed = super().execute(chunks, group)
        loads = sum(chunk.loads for chunk in chunks)
        if loads and agreed == loads:
            self.records.append((loads, self.stats.loaded_s - before_s))
        return agreed


class PipeGroup:
    """Ranks of one machine over sockets: rank 0 has one to each of the others, they one to it."""

    def __init__(self, rank: int, size: int, peers: Sequence[socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self._peers = peers

    def broadcast(self, values: Int64Array) -> None:
        if not self.rank:
            for peer in self._peers:
                peer.sendall(values.data)
        else:
            self._receive(self._peers[0], values)

    def all_reduce_min(self, values: Int64Array) -> None:
        if self.rank:
            self._peers[0].sendall(values.data)
        else:
            other = np.empty_like(values)
            for peer in self._peers:
                self._receive(peer, other)
                np.minimum(values, other, out=values)
        self.broadcast(values)

    def all_gather_json(self, value: Any) -> list[Any]:
        raise NotImplementedError("a step gathers nothing")

    def _receive(self, peer: socket.socket, values: Int64Array) -> None:
        left = values.data.cast("B")
        while left:
            got = peer.recv_into(left)
            if not got:
                raise KvquayError("another rank has ended")
            left = left[got:]
