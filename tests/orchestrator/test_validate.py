"""What is known to be wrong before a process starts, and what is not asked for nothing."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from backends import machine
from backends.units import format_size
from orchestrator.problems import ConfigProblems
from orchestrator.schema import Config
from orchestrator.validate import RUN_DIR_BYTES, WORKER_BYTES, validate
from tests.kit import compose_config

TOO_MUCH = "900TiB"


@pytest.fixture(scope="module")
def defaults() -> Config:
    return compose_config()


def changed(config: Config, **values: Any) -> Config:
    """A configuration with some values of its groups changed: `region={"size": "1GiB"}`."""
    groups = {
        name: dataclasses.replace(getattr(config, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in values.items()
    }
    return dataclasses.replace(config, **groups)


def problems(config: Config, run_dir: Path) -> dict[str, str]:
    with pytest.raises(ConfigProblems) as caught:
        validate(config, run_dir)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_the_defaults_are_right_and_nothing_is_created(defaults: Config, tmp_path: Path) -> None:
    checked = validate(defaults, tmp_path)
    assert checked.topology.world_size == 2
    assert checked.model.name == "tiny"
    assert list(tmp_path.iterdir()) == []


def test_values_of_files_are_checked_as_typed_ones_are(defaults: Config, tmp_path: Path) -> None:
    config = changed(
        *(defaults,),
        action="rum",
        region={"size": "8gigs", "blocks_per_chunk": 0, "backing": "hugetlb"},
        engine={"copy_threads": 0, "device_cache_size": "0"},
        parallel={"tensor_parallel_size": 0},
        spawn={"start_timeout_s": float("nan"), "rdzv_port": -1},
        tiers={"order": ["fs"]},
        workload={"seed": 2**60},
    )
    assert set(problems(config, tmp_path)) == {
        *("action", "region.size", "region.blocks_per_chunk", "region.backing"),
        *("engine.copy_threads", "engine.device_cache_size", "parallel.tensor_parallel_size"),
        *("spawn.start_timeout_s", "spawn.rdzv_port", "tiers.order", "workload.seed"),
    }


def test_nothing_is_told_twice(defaults: Config, tmp_path: Path) -> None:
    config = changed(
        *(defaults,),
        parallel={"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
        region={"size": "1KiB", "blocks_per_chunk": 10**7},
        engine={"device": "cuda", "tokens_per_block": 0},
        spawn={"rdzv_port": 65536, "nnodes": 0},
    )
    with pytest.raises(ConfigProblems) as caught:
        validate(config, tmp_path)
    keys = [problem.key for problem in caught.value.problems]
    assert len(set(keys)) == len(keys)
    assert "spawn.nnodes" in keys


def test_planning_for_another_machine_asks_nothing_of_this_one(
    defaults: Config, tmp_path: Path
) -> None:
    config = changed(
        *(defaults,),
        action="plan",
        region={"size": TOO_MUCH, "backing": "shm"},
        engine={"device": "cuda"},
        spawn={"check_machine": False},
    )
    validate(config, tmp_path / "not there")
    asked = changed(config, spawn={"check_machine": True})
    found = problems(asked, tmp_path / "not there")
    assert {"region.size", "hydra.run.dir"} <= set(found)
    assert "spawn.check_machine=false" in found["region.size"]


def test_cleaning_needs_no_room(defaults: Config, tmp_path: Path) -> None:
    full = {"size": TOO_MUCH, "backing": "shm"}
    validate(changed(defaults, action="clean", region=full), tmp_path)
    assert "region.size" in problems(changed(defaults, action="run", region=full), tmp_path)


def test_only_the_replicas_of_this_node_are_asked_for(defaults: Config, tmp_path: Path) -> None:
    half = machine.tightest_memory_limit().available_bytes // 2
    config = changed(
        *(defaults,),
        action="plan",
        parallel={"data_parallel_size": 8, "tensor_parallel_size": 1, "nodes": 8},
        region={"size": str(half)},
        spawn={"nnodes": 8, "node_rank": 5},
    )
    validate(config, tmp_path)
    crowded = changed(config, spawn={"nnodes": 2, "node_rank": 1}, parallel={"nodes": 2})
    text = problems(crowded, tmp_path)["region.size"]
    assert "4 replicas on this node" in text
    assert "dp4" in text
    assert "dp3" not in text


def test_what_a_node_needs_is_counted_with_its_processes(defaults: Config, tmp_path: Path) -> None:
    mib = machine.tightest_memory_limit().available_bytes // 2**20
    config = changed(
        *(defaults,),
        parallel={"data_parallel_size": 1, "tensor_parallel_size": 1},
        region={"size": f"{mib // 3}MiB"},
        engine={"device_cache_size": f"{mib}MiB"},
    )
    text = problems(config, tmp_path)["engine.device_cache_size"]
    assert f"1 regions of {format_size(mib // 3 * 2**20)}" in text
    assert f"1 device caches of {format_size(mib * 2**20)}" in text
    assert f"{format_size(WORKER_BYTES)} for the workers' processes" in text
    inline = changed(config, spawn={"kind": "inline"})
    assert (
        "0 B for the workers' processes" in problems(inline, tmp_path)["engine.device_cache_size"]
    )


def test_only_the_ports_of_this_node_must_be_free(defaults: Config, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = changed(defaults, action="plan", spawn={"rdzv_port": port, "nnodes": 2})
        first = changed(first, parallel={"nodes": 2})
        assert str(port) in problems(first, tmp_path)["spawn.rdzv_port"]
        validate(changed(first, spawn={"node_rank": 1}), tmp_path)


def test_a_run_directory_without_room_is_told(
    defaults: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.validate.RUN_DIR_BYTES", 2**62)
    assert "free, logs and reports want" in problems(defaults, tmp_path)["hydra.run.dir"]
    assert RUN_DIR_BYTES < 2**30


@pytest.mark.parametrize("size", ["1KiB", "260KiB", "300KiB", "1MiB"])
def test_the_fix_of_a_small_region_is_enough(defaults: Config, tmp_path: Path, size: str) -> None:
    config = changed(defaults, region={"size": size})
    try:
        validate(config, tmp_path)
    except ConfigProblems as error:
        (problem,) = error.problems
        enough = problem.fix.split("region.size=")[1].split(" ")[0]
        validate(changed(config, region={"size": enough}), tmp_path)


@pytest.mark.parametrize("size", ["1KiB", "100KiB", "128KiB"])
def test_the_fix_of_a_small_device_cache_is_enough(
    defaults: Config, tmp_path: Path, size: str
) -> None:
    config = changed(defaults, engine={"device_cache_size": size})
    try:
        validate(config, tmp_path)
    except ConfigProblems as error:
        (problem,) = error.problems
        enough = problem.fix.split("device_cache_size=")[1].split(" ")[0]
        validate(changed(config, engine={"device_cache_size": enough}), tmp_path)


def test_huge_pages_that_may_be_had_are_not_required(defaults: Config, tmp_path: Path) -> None:
    small = {"size": "1MiB", "blocks_per_chunk": 4, "backing": "shm"}
    validate(changed(defaults, region=small | {"huge_pages": "try"}), tmp_path)
    required = changed(defaults, region=small | {"huge_pages": "require"})
    assert "none are granted" in problems(required, tmp_path)["region.huge_pages"]


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "cuda-pinned"), ("cuda", "numpy")])
def test_a_copy_kernel_is_for_one_kind_of_device(
    defaults: Config, tmp_path: Path, device: str, kernel: str
) -> None:
    config = changed(
        defaults,
        engine={"device": device, "copy_kernel": kernel},
        spawn={"check_machine": False},
    )
    assert f"is not for engine.device={device}" in problems(config, tmp_path)["engine.copy_kernel"]
    validate(changed(config, engine={"copy_kernel": "auto"}), tmp_path)
