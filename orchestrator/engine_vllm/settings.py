"""What follows from `engine=vllm` and `engine.model`, before anything is checked or planned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from orchestrator.problems import Problem
from orchestrator.schema import Config

KIND = "vllm"
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


def check(config: Config) -> Iterator[Problem]:
    """What of `engine=vllm` cannot work."""
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
    if config.action == "run" and vllm.python is None and find_spec("vllm") is None:
        yield Problem(
            "engine.kind",
            KIND,
            "needs vLLM, which is not installed here",
            "pip install 'kvquay[vllm]', or name an interpreter that has it: engine.vllm.python",
        )
    if config.spawn.nnodes > 1:
        yield Problem(
            "spawn.nnodes",
            config.spawn.nnodes,
            "a vLLM replica of several nodes has no region that its scheduler could see whole",
            "run each replica on one node",
        )
    last = vllm.port + config.parallel.data_parallel_size - 1
    if not 1 <= vllm.port <= last <= 65535:
        limit = f"each replica takes one port: {vllm.port} to {last} must lie in 1 to 65535"
        yield Problem("engine.vllm.port", vllm.port, limit, "choose a lower port")


def weights_digest(path: Path) -> str:
    """Tells two models apart that have one name: names, sizes and samples of all their files.

    Reading whole weights would take minutes; a file that was trained further differs all over, so
    its first and last 64 KiB do.
    """
    digest = hashlib.sha256()
    for file in sorted({found for pattern in _WEIGHTS for found in path.glob(pattern)}):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name}\0{size_bytes}\0".encode())
        with open(file, "rb") as data:
            digest.update(data.read(_SAMPLE_BYTES))
            data.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(data.read(_SAMPLE_BYTES))
    return f"sha256-{digest.hexdigest()[:32]}"
