"""What a plan says, when two plans are the same, and which files are no plans."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator import __version__
from orchestrator.plan import (
    Plan,
    PlanError,
    RunInfo,
    make_plan,
    plan_digest,
    read_plan,
    write_plan,
)
from orchestrator.render import print_plan
from orchestrator.schema import Config
from orchestrator.validate import validate
from tests.kit import REPO, compose_config

GOLDEN = REPO / "tests" / "golden" / "plan.json"
GOLDEN_OVERRIDES = (
    *("action=plan", "model=tiny", "spawn.check_machine=false", "engine.tokens_per_block=16"),
    *("parallel.data_parallel_size=4", "parallel.pipeline_parallel_size=2"),
    *("parallel.tensor_parallel_size=4", "parallel.decode_context_parallel_size=2"),
    *("spawn.nnodes=2", "spawn.rdzv_port=29500", "spawn.virtual_local_rank=true"),
    *("region.backing=shm", "region.size=8MiB", "region.blocks_per_chunk=8"),
    "engine.device_cache_size=2MiB",
)
RUN = RunInfo("20261130-042337-1f9c0a", "/data/runs/first", 0.0)


def plan_of(config: Config, run: RunInfo = RUN) -> Plan:
    checked = validate(config, Path(tempfile.gettempdir()))
    return make_plan(config, checked.topology, checked.model, checked.groups, run)


@pytest.fixture(scope="module")
def small() -> Plan:
    """Two nodes, two replicas on each, eight workers in each."""
    return plan_of(compose_config(*GOLDEN_OVERRIDES))


@pytest.fixture(scope="module")
def spread() -> Plan:
    """Two replicas of eight workers, each over four nodes."""
    return plan_of(
        compose_config(
            *("action=plan", "spawn.nnodes=8", "spawn.check_machine=false", "region.size=8MiB"),
            *("parallel.pipeline_parallel_size=4", "parallel.tensor_parallel_size=2"),
        )
    )


def golden_text(plan: Plan, directory: Path) -> str:
    """`plan.json` without the settings, which another test holds, and what depends on them."""
    content = json.loads(write_plan(plan, directory).read_text())
    del content["settings"], content["digest"], content["version"]
    return json.dumps(content, indent=1) + "\n"


def test_the_plan_of_a_small_deployment_is_the_golden_one(small: Plan, tmp_path: Path) -> None:
    found = golden_text(small, tmp_path)
    assert found == GOLDEN.read_text(), (
        "plan.json changed. If that is meant, raise PLAN_FORMAT where old plans can no longer be "
        "read, and write the golden file anew: python -m tests.orchestrator.test_plan"
    )


def test_a_device_is_counted_over_the_replicas_of_a_node(small: Plan) -> None:
    local_world_size = small.topology.local_world_size
    for replica in small.replicas:
        for worker in replica.workers:
            expected = replica.data_parallel_rank_local * local_world_size + worker.local_rank
            assert worker.device_index == expected
    node_0 = [w.device_index for r in small.replicas for w in r.workers if w.node_rank == 0]
    assert node_0 == list(range(small.topology.workers_per_node))


def test_named_devices_change_the_device_and_not_the_slot() -> None:
    plan = plan_of(compose_config("spawn.devices=[7,0,2,5]", "action=plan"))
    workers = [worker for replica in plan.replicas for worker in replica.workers]
    assert [worker.device_index for worker in workers] == [7, 0, 2, 5]
    assert [worker.slot for worker in workers] == [0, 1, 0, 1]


def test_a_region_has_slots_for_the_workers_of_its_node_alone(spread: Plan) -> None:
    region, topology = spread.region, spread.topology
    assert (topology.world_size, topology.local_world_size) == (8, 2)
    spec = spread.region_spec(0)
    assert spec.local_world_size == 2
    assert spec.row_bytes == region.row_bytes < 2 * region.slot_bytes + 2 * 4096
    assert spec.nbytes <= 8 * 2**20 < spec.nbytes + region.row_bytes
    assert region.bytes_per_replica == 4 * spec.nbytes
    assert region.bytes_per_node == spec.nbytes
    assert {w.slot for r in spread.replicas for w in r.workers} == {0, 1}


def test_names_ports_and_directories_of_replicas_differ(small: Plan) -> None:
    for field in ("engine_id", "region_name", "directory", "rdzv_endpoint", "command"):
        values = [getattr(replica, field) for replica in small.replicas]
        assert len(set(values)) == len(values), field


def test_a_worker_is_told_the_same_as_the_plan_says(spread: Plan) -> None:
    for replica in spread.replicas:
        for worker in replica.workers:
            told = spread.offload_config(replica.data_parallel_index, worker.rank)
            parallel = told.parallel
            assert told.engine_id == replica.engine_id
            assert (parallel.pp_rank, parallel.pcp_rank, parallel.tp_rank, parallel.dcp_rank) == (
                *(worker.pp_rank, worker.pcp_rank, worker.tp_rank, worker.dcp_rank),
            )
            assert (parallel.rank, parallel.local_rank) == (worker.rank, worker.local_rank)
            assert parallel.node_rank == worker.node_rank
            assert parallel.data_parallel_size == 2


def test_the_command_can_be_pasted_whatever_the_run_directory_is_called() -> None:
    run = dataclasses.replace(RUN, run_dir="/data/my runs/it's $HOME")
    plan = plan_of(compose_config("action=plan"), run)
    words = shlex.split(plan.replicas[1].command)
    assert words[words.index("--plan") + 1] == "/data/my runs/it's $HOME/plan.json"
    assert words[words.index("--replica") + 1] == "1"


@pytest.mark.parametrize(
    "run_dir", ["/elsewhere", "/", "/data/runs/first/second", "/data/runs/a b'c", "/replicas"]
)
def test_the_digest_does_not_depend_on_what_names_the_run(small: Plan, run_dir: str) -> None:
    other = RunInfo("20270101-000000-abcdef", run_dir, 1.0)
    again = plan_of(small.settings, other)
    assert again.digest == small.digest
    assert again.run != small.run


def test_a_path_inside_the_run_directory_does_not_change_the_digest() -> None:
    config = compose_config("action=plan")
    workload = dataclasses.replace(config.workload, salt="/data/runs/first/x")
    config = dataclasses.replace(config, workload=workload)
    other = dataclasses.replace(RUN, run_dir="/data/runs/second")
    assert plan_of(config).digest == plan_of(config, other).digest


def test_a_run_has_the_digest_that_its_plan_was_shown_with() -> None:
    digests = {
        plan_of(compose_config(*overrides)).digest
        for overrides in ((), ("action=plan",), ("view=quiet",), ("clean.apply=true",))
    }
    assert len(digests) == 1


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("parallel", {"data_parallel_size": 4}),
    ("parallel", {"tensor_parallel_size": 1}),
    ("model", {"name": "other"}),
    ("model", {"revision": "v2"}),
    ("model", {"dtype": "float16"}),
    ("model", {"rope": "x"}),
    ("region", {"size": "64MiB"}),
    ("region", {"backing": "shm"}),
    ("region", {"prefault": False}),
    ("engine", {"verify": "off"}),
    ("engine", {"tokens_per_hash": 8}),
    ("engine", {"device_cache_size": "48MiB"}),
    ("engine", {"layout": "blocks_first"}),
    ("workload", {"seed": 1}),
    ("workload", {"salt": "tenant"}),
    ("workload", {"requests": 7}),
    ("spawn", {"kind": "inline"}),
    ("spawn", {"devices": [3, 2, 1, 0]}),
    ("spawn", {"virtual_local_rank": True}),
    ("spawn", {"group_timeout_s": 61.0}),
)


def test_any_change_of_a_setting_changes_the_digest() -> None:
    config = compose_config()
    digests = {plan_of(config).digest: "nothing"}
    for group, values in CHANGES:
        changed = dataclasses.replace(getattr(config, group), **values)
        digest = plan_of(dataclasses.replace(config, **{group: changed})).digest
        assert digest not in digests, f"{values} of {group} plans as {digests[digest]} does"
        digests[digest] = f"{values} of {group}"


def test_a_written_plan_reads_back_equal(small: Plan, tmp_path: Path) -> None:
    path = write_plan(small, tmp_path)
    assert read_plan(path, expected_digest=small.digest) == small
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["plan.json"]


def edited(path: Path, *keys: Any, value: Any) -> None:
    content = json.loads(path.read_text())
    node = content
    for key in keys[:-1]:
        node = node[key]
    assert node[keys[-1]] != value
    node[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("replicas", 1, "workers", 0, "slot"), 1),
        (("replicas", 1, "engine_id"), RUN.run_id + "_dp0"),
        (("replicas", 0, "command"), "rm -rf /"),
        (("region", "rows"), 1),
        (("model", "dtype"), "int8"),
        (("settings", "engine", "verify"), "off"),
        (("digest",), "0" * 64),
    ],
)
def test_an_edited_plan_is_refused(
    small: Plan, tmp_path: Path, keys: tuple[Any, ...], value: Any
) -> None:
    path = write_plan(small, tmp_path)
    edited(path, *keys, value=value)
    with pytest.raises(PlanError, match=r"changed after it was planned: plan again") as error:
        read_plan(path)
    assert str(path) in str(error.value)


def test_the_plan_of_another_configuration_is_refused(small: Plan, tmp_path: Path) -> None:
    path = write_plan(small, tmp_path)
    with pytest.raises(PlanError, match=f"digest is {small.digest}, expected {'1' * 64}"):
        read_plan(path, expected_digest="1" * 64)


@pytest.mark.parametrize(("key", "value"), [("version", "0.0.1"), ("format", 99)])
def test_a_plan_of_another_version_is_refused(
    small: Plan, tmp_path: Path, key: str, value: Any
) -> None:
    path = write_plan(small, tmp_path)
    edited(path, key, value=value)
    with pytest.raises(PlanError, match=f"this is {__version__}.*plan again") as error:
        read_plan(path)
    assert str(value) in str(error.value)


def test_a_plan_of_another_version_may_look_different_altogether(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": 99, "version": "9.9", "ranks": []}))
    with pytest.raises(PlanError, match=r"written by kvquay 9\.9 \(format 99\)"):
        read_plan(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data + b"}",
        lambda data: b"\x00" * len(data),
        lambda data: b"[]",
        lambda data: b'{"format": "one"}',
        lambda data: data.replace(b'"rank": 0', b'"rank": "0"', 1),
        lambda data: data.replace(b'"digest"', b'"digets"', 1),
        lambda data: data.replace(b"tiny", b"\xff\xfe\xfd\xfc"),
        lambda data: data.replace(b'"kind": "full"', b'"kind": "half"', 1),
    ],
)
def test_a_damaged_plan_is_refused(small: Plan, tmp_path: Path, damage: Any) -> None:
    path = write_plan(small, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PlanError, match=r"plan\.json: ") as error:
        read_plan(path)
    assert "plan again" in str(error.value)


def test_a_missing_plan_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file or directory; run action=plan"):
        read_plan(tmp_path / "plan.json")


def test_a_plan_that_cannot_be_written_leaves_the_old_one(small: Plan, tmp_path: Path) -> None:
    path = write_plan(small, tmp_path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from orchestrator.plan import read_plan, write_plan\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "plan = read_plan(Path(sys.argv[1]))\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {limits[1]}))\n"
        "try:\n    write_plan(plan, Path(sys.argv[1]).parent)\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=REPO, capture_output=True, text=True
    )
    assert done.stdout == "File too large\n", done.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def shown(plan: Plan, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    print_plan(console, plan)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_shown_plan_has_every_column_and_cuts_nothing(small: Plan, width: int) -> None:
    lines = shown(small, width)
    text = "\n".join(lines)
    for column in ("replica", "node", "rank", "PP/PCP/TP/DCP", "local_rank", "device", "slot"):
        assert column in text
    for column in ("region", "bytes", "directory", "rendezvous", "per rank", "per replica"):
        assert column in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for replica in small.replicas:
        assert f"  {replica.command}" in lines  # in one piece, to be pasted
        assert width < 100 or any(replica.region_name in line for line in lines)
    tables = [line for line in lines if "torchrun" not in line]
    assert max(map(len, tables)) <= width
    assert sum(line.split()[:3] == ["1", "0", "7"] for line in lines) == 1


def test_a_folded_name_is_still_there_in_whole(small: Plan) -> None:
    lines = shown(small, 80)
    start = next(i for i, line in enumerate(lines) if line.startswith("replica  node  region"))
    place = lines[start].index("region")
    end = lines[start].index("bytes")
    rows = [line[place:end].strip() for line in lines[start + 1 : start + 1 + 2 * 4]]
    assert "".join(rows) == "".join(replica.region_name for replica in small.replicas)


def test_a_large_plan_is_shown_in_part_and_says_so() -> None:
    plan = plan_of(
        compose_config(
            *("action=plan", "spawn.check_machine=false", "parallel.data_parallel_size=100"),
            "parallel.tensor_parallel_size=2",
        )
    )
    lines = shown(plan, 120)
    assert len(lines) < 110
    for more in ("136 more workers", "84 more replicas", "96 more commands"):
        assert f"... {more} in plan.json" in lines


def test_a_name_is_shown_as_it_is() -> None:
    plan = plan_of(compose_config("model.name='[red]x[/y] :smile:'", "region.backing=shm"))
    assert any("model [red]x[/y] :smile:," in line for line in shown(plan, 120))


@pytest.mark.slow
def test_512_replicas_of_64_ranks_are_planned_at_once(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(REPO / "launch.py"), "action=plan", f"hydra.run.dir={tmp_path}"),
        *("parallel.data_parallel_size=512", "parallel.tensor_parallel_size=8"),
        *("parallel.pipeline_parallel_size=8", "spawn.nnodes=4096", "model=llama3_1_70b"),
        *("region.size=4GiB", "spawn.check_machine=false"),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    plan = read_plan(tmp_path / "plan.json")
    assert sum(len(replica.workers) for replica in plan.replicas) == 512 * 64
    assert plan_digest(plan) == plan.digest
    # About 1.5 s where nobody else is working; the bound is for what grows with the square.
    assert cpu_s < 6, f"planning took {cpu_s:.1f} s of CPU"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(golden_text(plan_of(compose_config(*GOLDEN_OVERRIDES)), Path(folder)))
    print(f"wrote {GOLDEN}")
