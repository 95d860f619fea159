"""What a spawned process runs: find out who I am, map the region, serve, tell what was counted.

Started by an agent (`worker_main`), as a thread (`run_worker`), or by hand for one replica:

    torchrun --nproc-per-node=2 ... -m orchestrator.worker --plan RUN_DIR/plan.json --replica 0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from backends.machine import host_identity
from backends.region.region import Region
from backends.stack.stack import TierStack
from orchestrator.engine.lockstep import Turn
from orchestrator.engine.replica import Leader, follow, step_codec
from orchestrator.engine.runner import WorkerRunner
from orchestrator.engine.tiers import open_stack
from orchestrator.events import EventWriter
from orchestrator.groups import Group, Identity, TorchGroup, assert_planned, find_identity
from orchestrator.node import open_reader
from orchestrator.plan import Plan, WorkerPlan, read_plan, write_atomic
from orchestrator.regions import open_region
from orchestrator.rundir import ReplicaDir, RunDir
from orchestrator.spawn.lifeline import die_with_parent
from orchestrator.telemetry import Telemetry, Values, replica_values
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec

if TYPE_CHECKING:
    from backends.region.node.reader import NodeReader

DRAIN_TIMEOUT_S = 60.0
"""How long the last stores may take to land when all requests are served."""

LOCKSTEP_PATIENCE_S = 120.0
"""How long one request of another replica may take where replicas take turns."""


@record
def worker_main(plan_path: str, index: int, digest: str | None, agent_pid: int | None) -> None:
    """One worker process under a torchrun agent. `agent_pid` is None where nobody watches."""
    if agent_pid is not None:
        die_with_parent(agent_pid)
    plan = read_plan(Path(plan_path), expected_digest=digest)
    directory = RunDir(Path(plan.run.run_dir)).replica(index)
    directory.make()
    # Only what torchrun itself sets is read here, to find the file to write to before there is a
    # process group; who this worker is comes from the group.
    rank = int(os.environ["RANK"])
    with contextlib.closing(EventWriter(directory.events(rank))) as events:
        events.write("started", pid=os.getpid())
        if plan.topology.nnodes == 1:
            # The name of a host need not resolve to an address that works; loopback always does.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        group = TorchGroup(plan.settings.spawn.group_timeout_s)
        events.write("group")
        run_worker(plan, index, group, directory, events)
        group.close()


def run_worker(
    plan: Plan, index: int, group: Group, directory: ReplicaDir, events: EventWriter
) -> None:
    """Serve one replica's share of the workload as one of its workers."""
    host = host_identity()
    identity = find_identity(group, host)
    planned = assert_planned(identity, group.size, plan, index)
    with _telemetry(plan, index, identity) as telemetry:
        with (
            _region(plan, index, group, identity, host) as region,
            _reader(plan, index, planned) as reader,
        ):
            events.write("region", local_rank=identity.local_rank, slot=planned.slot)
            prefault_s = _prefault(plan, region, planned, group)
            device = _device(plan, planned)
            _pin(plan, region, device)
            runner = _runner(plan, index, identity, device, region, reader)
            observers = () if telemetry is None else telemetry.observers
            stack = open_stack(plan, index, region, observers) if identity.leader else None
            try:
                group.all_gather_json(None)  # nobody serves before everybody can
                events.write("ready")
                started_s = time.monotonic()
                leader = _serve(plan, index, group, identity, runner, events, stack, telemetry)
                answer = {
                    "rank": identity.rank,
                    "pid": os.getpid(),
                    "local_rank": identity.local_rank,
                    "slot": planned.slot,
                    "device": planned.device,
                    "duration_s": time.monotonic() - started_s,
                    "prefault_s": prefault_s,
                    "copy_kernel": runner.copy_kernel,
                    "region": region.report(),
                    "stats": asdict(runner.stats),
                }
                answers = group.all_gather_json(answer)
                if leader is not None and telemetry is not None:
                    leader.finish()
                    drained = leader.stack.drain(DRAIN_TIMEOUT_S)
                    values = replica_values(plan, index, leader.stats, leader.stack, answers)
                    history = telemetry.close_history()
                    values = telemetry.complete(values) | {"drained": drained, "history": history}
                    write_atomic(directory.result, msgspec.json.encode(values))
                    telemetry.finish(values)
            finally:
                runner.close()
                if stack is not None:
                    stack.close()
        if leader is not None and telemetry is not None:
            telemetry.linger(leader.tell)
    events.write("done")


@contextlib.contextmanager
def _telemetry(plan: Plan, index: int, identity: Identity) -> Iterator[Telemetry | None]:
    """The leader's business, like the tiers."""
    if not identity.leader:
        yield None
        return
    with contextlib.closing(Telemetry(plan, index)) as telemetry:
        yield telemetry


@contextlib.contextmanager
def _region(
    plan: Plan, index: int, group: Group, identity: Identity, host: str
) -> Iterator[Region]:
    region = open_region(group, identity, host, plan.region_spec(index))
    try:
        yield region
    finally:
        region.close()


@contextlib.contextmanager
def _reader(plan: Plan, index: int, planned: WorkerPlan) -> Iterator[NodeReader | None]:
    reader = open_reader(plan, index, planned.slot)
    try:
        yield reader
    finally:
        if reader is not None:
            reader.close()


def _prefault(plan: Plan, region: Region, planned: WorkerPlan, group: Group) -> float:
    settings = plan.settings.region
    if not settings.prefault:
        return 0.0
    seconds = region.prefault(planned.slot).seconds
    if settings.huge_pages != "off":
        # Pages that a peer has made huge since are mapped as such only by looking again.
        group.all_gather_json(None)
        seconds += region.prefault(planned.slot).seconds
    return seconds


def _device(plan: Plan, planned: WorkerPlan) -> torch.device:
    if planned.device != "cuda":
        return torch.device("cpu")
    # With a virtual local rank the worker sees its own device alone, as number 0.
    virtual = plan.settings.spawn.virtual_local_rank
    device = torch.device("cuda", 0 if virtual else planned.device_index)
    torch.cuda.set_device(device)
    return device


def _pin(plan: Plan, region: Region, device: torch.device) -> None:
    """Page-lock the region for the device's DMA; what was got stands in the region's report."""
    if device.type != "cuda" or plan.settings.region.pin != "auto":
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    region.pin(
        lambda address, nbytes: int(runtime.cudaHostRegister(address, nbytes, 0)),
        lambda address: int(runtime.cudaHostUnregister(address)),
    )


def _runner(
    plan: Plan,
    index: int,
    identity: Identity,
    device: torch.device,
    region: Region,
    reader: NodeReader | None,
) -> WorkerRunner:
    engine = plan.settings.engine
    return WorkerRunner(
        plan.offload_config(index, identity.rank),
        region,
        device,
        device_blocks=plan.device_blocks,
        verify=engine.verify,
        copy_threads=engine.copy_threads,
        copy_kernel=engine.copy_kernel,
        reader=reader,
    )


def _serve(
    plan: Plan,
    index: int,
    group: Group,
    identity: Identity,
    runner: WorkerRunner,
    events: EventWriter,
    stack: TierStack | None,
    telemetry: Telemetry | None,
) -> Leader | None:
    if stack is None or telemetry is None:
        follow(runner, step_codec(plan), group)
        return None

    def progress(fields: dict[str, Any]) -> None:
        events.write("progress", **fields, **telemetry.progress())

    turn = None
    if plan.settings.engine.lockstep and plan.topology.data_parallel_size > 1:
        turn = Turn(Path(plan.run.run_dir) / f"turn_{plan.run.run_id}", LOCKSTEP_PATIENCE_S)
    leader = Leader(plan, runner, stack, group, progress, turn)

    def look() -> Values:
        own = {"rank": identity.rank, "stats": asdict(runner.stats)}
        return replica_values(plan, index, leader.stats, stack, [own])

    telemetry.watch(look)
    telemetry.record(stack, leader.stats, runner.stats)
    spec = workload_spec(plan.settings.workload, plan.cache)
    stream = stream_for_replica(spec, plan.topology.data_parallel_size, index)
    leader.serve(stream)
    if turn is not None:
        turn.close()
    leader.stats.skipped_lines = stream.skipped
    return leader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--plan", required=True, help="path of plan.json")
    parser.add_argument("--replica", type=int, required=True, help="data_parallel_index")
    args = parser.parse_args()
    worker_main(args.plan, args.replica, None, None)


if __name__ == "__main__":
    main()
