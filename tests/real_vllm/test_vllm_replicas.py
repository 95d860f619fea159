"""Two replicas of SmolLM2 on our tiers: each tier in turn the only source, and a damaged block."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.real_vllm.kit import Answer, Engine, block_files, make_plan, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1500)]

CHUNK_TOKENS = 64
HEADER_BYTES = 4096


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


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
        first = engine.ask(asked)
        assert tokens(first) == right
        assert [answer.cached for answer in first] == [0, 0, 0]
        # The region alone: the device has forgotten, the tiers below are not asked.
        assert engine.do("reset")
        again = engine.ask(asked)
        assert tokens(again) == right
        shm = [answer.cached for answer in again]
        assert all(cached > 4 * CHUNK_TOKENS and cached % CHUNK_TOKENS == 0 for cached in shm)
        counters = engine.do("counters")
        assert counters["vllm:external_prefix_cache_hits"] == sum(shm)
        engine.close()
    assert not list(Path("/dev/shm").glob("kvquay_*"))

    # Another replica and process, whose region is empty: files alone.
    shutil.move(objects, tmp_path / "elsewhere")
    with Engine(plan, 1, log) as engine:
        found = engine.ask(asked[:2])
        assert tokens(found) == right[:2]
        assert [answer.cached for answer in found] == shm[:2]
        # The third prompt's blocks were not read yet; each of them is damaged where it lies.
        read = set(engine.do("counters"))
        assert "vllm:external_prefix_cache_hits" in read
        for path in block_files(disk):
            data = bytearray(path.read_bytes())
            data[HEADER_BYTES + 100] ^= 0xFF
            path.write_bytes(data)
        damaged = engine.ask(asked[2:])
        assert tokens(damaged) == right[2:]
        assert damaged[0].cached < shm[2]
        engine.close()
    assert list((disk / "quarantine").iterdir())

    # Objects alone.
    shutil.rmtree(disk)
    shutil.rmtree(objects, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", objects)
    plan = make_plan(tmp_path / "objects_only", smollm2, "tiers=shm_object", *tiers[2:])
    with Engine(plan, 1, log) as engine:
        found = engine.ask(asked)
        assert tokens(found) == right
        assert [answer.cached for answer in found] == shm
        engine.close()
