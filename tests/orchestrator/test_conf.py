"""Every file under `conf/` can be used."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.overrides import schema_fields
from orchestrator.plan import read_plan
from tests.kit import CONF, REPO, compose_config, plan_for

OPTIONS = sorted(
    (path.parent.relative_to(CONF).as_posix(), path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "hydra"
)
EXPERIMENTS = [option for group, option in OPTIONS if group == "experiment"]
PRESETS = [option for group, option in OPTIONS if group == "parallel"]
MODELS = [option for group, option in OPTIONS if group == "model"]
# What an option cannot do without.
NEEDS = {
    ("model", "hf"): [f"model.hf_config={REPO}/tests/data/hf/llama_3_1_8b.json"],
    ("workload", "trace"): ["workload.path=/some/trace.jsonl"],
    ("tier", "fs"): ["tiers=shm_fs"],
    ("tier", "object"): ["tiers=shm_object"],
    ("tier", "s3"): ["tiers=shm_fs_s3"],
}


def test_there_is_an_option_in_every_group() -> None:
    groups = {group for group, _ in OPTIONS}
    assert groups == {
        *("parallel", "tier", "tiers", "region", "model", "workload", "engine", "spawn"),
        *("profile", "experiment"),
    }


@pytest.mark.parametrize(
    ("group", "option"),
    [found for found in OPTIONS if found[0] not in ("experiment", "parallel", "model")],
)
def test_every_option_composes(group: str, option: str) -> None:
    # A bucket is another option of the tier that keeps objects.
    name = "object" if option == "s3" else option
    at = f"{group}@tiers.stack.{name}" if group == "tier" else group
    compose_config(f"{at}={option}", *NEEDS.get((group, option), []))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_plans(tmp_path: Path, experiment: str) -> None:
    plan = plan_for(tmp_path, f"experiment={experiment}", "spawn.check_machine=false")
    assert read_plan(tmp_path / "plan.json") == plan
    changed = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    assert_says(plan.settings, changed)


def assert_says(settings: object, said: dict[str, Any]) -> None:
    for key, value in said.items():
        found = getattr(settings, key)
        if isinstance(value, dict) and not isinstance(found, dict):
            assert_says(found, value)
        else:
            assert found == value, key


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parallel_preset_plans_what_its_name_says(tmp_path: Path, preset: str) -> None:
    plan = plan_for(tmp_path, f"parallel={preset}", "spawn.check_machine=false")
    said = {axis: int(size) for axis, size in re.findall(r"(dcp|pcp|dp|pp|tp)(\d+)", preset)}
    topology = plan.topology
    assert said == {
        axis: size
        for axis, size in (
            ("dp", topology.data_parallel_size),
            ("pp", topology.pp_size),
            ("pcp", topology.pcp_size),
            ("tp", topology.tp_size),
            ("dcp", topology.dcp_size),
        )
        if axis in said or size != 1
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_model_plans(tmp_path: Path, model: str) -> None:
    needs = NEEDS.get(("model", model), [])
    plan = plan_for(
        *(tmp_path, f"model={model}", "region.size=4GiB", "engine.device_cache_size=1GiB"),
        *("spawn.check_machine=false", *needs),
    )
    assert plan.region.rows >= len(plan.groups)


def keys_of(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from keys_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys_of(value)


def test_no_file_names_code_to_run_or_holds_a_secret() -> None:
    secret = re.compile(
        r"secret|passw|credential|token$|access_?key|api_?key|auth|private", re.IGNORECASE
    )
    keys = {key for path in CONF.rglob("*.yaml") for key in keys_of(yaml.safe_load(path.open()))}
    assert "data_parallel_size" in keys
    keys |= {part for key in schema_fields() for part in key.split(".")}
    assert [key for key in keys if secret.search(key) or key.startswith("_target")] == []


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("profile=ci", "--cfg", "job", "--resolve"), ("\n  nodes: 1\n", "\n  backing: memfd\n")),
        (("--help",), ("python launch.py action=plan", "parallel: dp1_tp1", "Exit status: 0")),
    ],
)
def test_the_configuration_is_shown(
    tmp_path: Path, arguments: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "launch.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []
