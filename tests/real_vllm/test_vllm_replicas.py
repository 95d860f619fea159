"""Two replicas of SmolLM2 on our tiers: each tier in turn the only source, and a damaged block."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from backends.block import HEADER_BYTES, read_header
from tests.real_vllm.kit import (
    Answer,
    Engine,
    block_files,
    make_plan,
    prompts,
    save_hybrid,
    token_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1500)]

CHUNK_TOKENS = 64


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached_from(engine: Engine, source: str) -> int:
    """Prompt tokens that vLLM says it did not compute, because they came from there."""
    return int(engine.do("counters")[f"vllm:prompt_tokens_cached_by_source|source={source}"])


def damage_one_block(disk: Path, since_ns: int) -> None:
    """The first one that was made since then: one byte of its payload."""
    made = {path: read_header(np.fromfile(path, np.uint8)).created_ns for path in block_files(disk)}
    path = min((p for p in made if made[p] > since_ns), key=made.__getitem__)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 0xFF
    path.write_bytes(data)


def test_every_tier_gives_the_tokens_of_an_engine_without_offload(
    smollm2: Path, tmp_path: Path
) -> None:
    asked = prompts(3)
    disk, objects, log = tmp_path / "fs", tmp_path / "objects", tmp_path / "engine.log"
    tiers = (
        *(f"tiers.stack.fs.paths=[{disk}]", "tiers.stack.fs.capacity=256MiB"),
        f"tiers.stack.object.url=file:{objects}",
    )
    plan = make_plan(tmp_path / "both", smollm2, "tiers=shm_fs_object", *tiers)

    with Engine(plan, 0, log, offload=False) as engine:
        right = tokens(engine.ask(asked))
        engine.close()

    with Engine(plan, 0, log) as engine:
        first = engine.ask(asked[:2])
        third_ns = time.time_ns()
        first += engine.ask(asked[2:])
        assert tokens(first) == right
        assert [answer.cached for answer in first] == [0, 0, 0]
        # The region alone: the device has forgotten, the tiers below are not asked.
        assert engine.do("reset")
        again = engine.ask(asked)
        assert tokens(again) == right
        shm = [answer.cached for answer in again]
        assert all(cached > 3 * CHUNK_TOKENS and cached % CHUNK_TOKENS == 0 for cached in shm)
        assert cached_from(engine, "host") == sum(shm)
        engine.close()
    assert not list(Path("/dev/shm").glob("kvquay_*"))

    # Another replica and process, whose region is empty: files alone.
    shutil.move(objects, tmp_path / "elsewhere")
    with Engine(plan, 1, log) as engine:
        found = engine.ask(asked[:2])
        assert tokens(found) == right[:2]
        assert [answer.cached for answer in found] == shm[:2]
        assert cached_from(engine, "disk") == sum(shm[:2])
        damage_one_block(disk, third_ns)
        [damaged] = engine.ask(asked[2:])
        assert damaged.tokens == right[2]
        assert damaged.cached < shm[2]
        engine.close()
    assert len(list((disk / "quarantine").iterdir())) == 1

    # Objects alone.
    shutil.rmtree(disk)
    shutil.rmtree(objects, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", objects)
    plan = make_plan(tmp_path / "objects_only", smollm2, "tiers=shm_object", *tiers[2:])
    with Engine(plan, 1, log) as engine:
        found = engine.ask(asked)
        assert tokens(found) == right
        assert [answer.cached for answer in found] == shm
        assert cached_from(engine, "external_unspecified") == sum(shm)
        engine.close()


def test_two_workers_of_a_replica_load_what_they_have_stored(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Tensor parallelism: each worker copies its own heads into its own slots of one region."""
    loads_what_it_stored(tiny_model, tmp_path, "parallel.tensor_parallel_size=2")


def test_layers_with_and_without_a_window_load_what_they_have_stored(tmp_path: Path) -> None:
    """Two KV-cache groups, whose blocks are asked for, stored and loaded each for itself."""
    home = tmp_path / "model"
    home.mkdir()
    loads_what_it_stored(save_hybrid(home), tmp_path)


def loads_what_it_stored(model: Path, home: Path, *overrides: str) -> None:
    plan = make_plan(
        home / "plan",
        model,
        *("parallel.data_parallel_size=1", "tiers=shm", "engine.vllm.load_format=dummy"),
        *overrides,
    )
    asked = token_prompts(2)
    with Engine(plan, 0, home / "engine.log") as engine:
        right = engine.ask(asked)
        assert [answer.cached for answer in right] == [0, 0]
        assert engine.do("reset")
        again = engine.ask(asked)
        assert tokens(again) == tokens(right)
        assert [answer.cached for answer in again] == [384, 384]
        engine.close()
