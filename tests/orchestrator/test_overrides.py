"""What is checked of a command line before Hydra sees it, and how Hydra's own errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.overrides import NICKNAMES, check_overrides, explain, schema_fields
from orchestrator.values import CHOICES, NOT_YET, check_value, leaves
from tests.kit import CONF, REPO


def found(*typed: str) -> list[str]:
    return [str(problem) for problem in check_overrides(typed, CONF)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--cfg job --resolve profile=ci",
        "action=plan parallel=dp4_tp1 region.size=1GiB",
        "workload=trace workload.path=/some/where.jsonl workload.requests=500",
        "-m parallel.data_parallel_size=1,2,4 parallel.tensor_parallel_size=1,2",
        "-m parallel.tensor_parallel_size=range(1,3) model=glob(*)",
        "-m region=default,shm hydra.sweep.dir=/somewhere",
        "parallel.data_parallel_size=64 parallel.tensor_parallel_size=8 spawn.nnodes=64",
        "region=[default,shm] experiment=[tight_region,shared_prompts]",
        "experiment=null workload.requests=null engine.tokens_per_hash=null spawn.devices=null",
        "++region.size=1GiB",
        "tier@tiers.stack.shm=shm",
        "spawn.devices=[3,1,0,2] tiers.order=[shm]",
        "model.groups=[{layers:[0,1,2,3]}] model.groups.0.name=x",
        "region.size=${engine.device_cache_size} workload.salt=${oc.env:HOME}",
        "workload.turns=3 workload.turns=3.5 spawn.start_timeout_s=120",
        "model.name=123 model.revision=true",
        "hydra.searchpath=[file:///elsewhere] model=from_elsewhere",
        "hydra.run.dir=/x hydra.job.chdir=false hydra.verbose=true hydra/job_logging=none",
    ],
)
def test_nothing_is_wrong_with(line: str) -> None:
    assert found(*line.split()) == []


def test_an_option_that_is_none_ends_the_program_as_argparse_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        found("--nope")
    assert end.value.code == 2
    assert "unrecognized arguments: --nope" in capsys.readouterr().err


def test_every_key_with_a_letter_missing_leads_back_to_the_key() -> None:
    known = schema_fields()
    wrong, meant = [], []
    for key, _ in leaves():
        parent, _, name = key.rpartition(".")
        for place in range(len(name)):
            typed = f"{parent}.{name[:place]}{name[place + 1 :]}".strip(".")
            assert typed not in known
            wrong.append(f"{typed}=1")
            meant.append(f"did you mean '{key}'?")
    assert [problem.fix for problem in check_overrides(wrong, CONF)] == meant


@pytest.mark.parametrize(("short", "name"), sorted(NICKNAMES.items()))
def test_what_people_call_an_axis_leads_to_its_key(short: str, name: str) -> None:
    (text,) = found(f"parallel.{short}=2")
    assert f"did you mean 'parallel.{name}'?" in text


def test_types_are_checked_in_a_sweep_but_values_are_left_to_its_jobs() -> None:
    assert found("-m", "region.size=1GiB,8gigs", "action=run,rum") == []
    (text,) = found("-m", "parallel.tensor_parallel_size=1,two,2")
    assert "parallel.tensor_parallel_size is 'two': must be a whole number" in text
    (text,) = found("-m", "model=tiny,tinny")
    assert "did you mean 'tiny'?" in text


def test_nothing_that_works_is_refused_as_not_there_yet() -> None:
    for key, names in NOT_YET.items():
        options = {path.stem for path in (CONF / key).glob("*.yaml")}
        assert not options & set(names), f"{key}={names} works; take it off NOT_YET"
        assert not set(CHOICES.get(key, ())) & set(names), f"{key}={names} works"


def test_options_in_a_directory_of_the_users_own_are_options(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\nnum_layers: 2\n")
    (tmp_path / "model" / "vendor").mkdir()
    (tmp_path / "model" / "vendor" / "big.yaml").write_text("name: big\n")
    own = ("--config-dir", str(tmp_path))
    assert found(*own, "model=mine") == found(*own, "model=vendor/big") == []
    (text,) = found(*own, "model=min")
    assert "mine" in text
    (text,) = found("model=mine")
    assert "is not an option" in text


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("region: {sizee: 1GiB}", ["region.sizee", "not in 'RegionConf'"]),
        ("region: {", ["mine.yaml", "line 3"]),
        ("region: {size: 16MiB}", []),
    ],
)
def test_a_file_of_the_users_own_is_checked_too(
    tmp_path: Path, content: str, told: list[str]
) -> None:
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{content}\n")
    command = [
        *(sys.executable, str(REPO / "launch.py"), "--config-dir", str(tmp_path / "conf")),
        *("experiment=mine", "action=plan", f"hydra.run.dir={tmp_path}/run"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if told else 0), done.stderr
    assert "Traceback" not in done.stderr
    for expected in told:
        assert expected in done.stderr
    if not told:
        plan = json.loads((tmp_path / "run" / "plan.json").read_text())
        assert plan["settings"]["region"]["size"] == "16MiB"


def test_a_directory_that_cannot_be_made_is_told_with_its_name() -> None:
    try:
        Path("/proc/kvquay").mkdir()
    except OSError as error:
        problem = explain(error)
    assert (problem.key, problem.value) == ("hydra.run.dir", "/proc/kvquay")
    wrapped = ValueError("Unable to configure handler 'file'")
    wrapped.__cause__ = PermissionError(13, "Permission denied", "/x/launch.log")
    assert "'/x/launch.log': cannot be made or written: Permission denied" in str(explain(wrapped))


def test_a_config_that_is_not_found_is_no_failing_directory() -> None:
    assert issubclass(MissingConfigException, OSError)
    problem = explain(MissingConfigException("Cannot find primary config 'x'\nConfig search path:"))
    assert problem.key != "hydra.run.dir"
    assert problem.limit == "cannot be composed: Cannot find primary config 'x'"


def test_what_hydra_wraps_is_told_by_its_cause_and_key() -> None:
    config = OmegaConf.structured({"size": 1})
    OmegaConf.set_struct(config, True)
    with pytest.raises(OmegaConfBaseException) as caught:
        config.region = 3
    wrapped = ConfigCompositionException("Could not override 'region'")
    wrapped.__cause__ = caught.value
    problem = explain(wrapped)
    assert problem.key == "region"
    assert "Key 'region' is not in struct" in problem.limit
    assert "\n" not in problem.limit


def test_defaults_are_right_by_themselves() -> None:
    assert [check_value(key, value) for key, value in leaves() if check_value(key, value)] == []
