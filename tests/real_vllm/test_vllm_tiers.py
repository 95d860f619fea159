"""Our tiers under vLLM's own TieringOffloadingManager, over vLLM's own shared memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from tests.real_vllm.kit import Engine, block_files, make_plan, plain_config, token_prompts

pytestmark = pytest.mark.vllm

CHUNK_BYTES = 8192
CHUNKS = 16
KEYS = [make_offload_key(bytes([number + 1]) * 32, 0) for number in range(12)]
STEP = ScheduleEndContext((), ())
TIMEOUT_S = 30.0


@contextmanager
def tiering(engine: str, tier: dict[str, Any]) -> Iterator[tuple[TieringOffloadingManager, Any]]:
    """A manager as a fresh engine has it, and its primary tier's memory, uint8 [chunks, bytes]."""
    region = SharedOffloadRegion(engine, CHUNKS, None, CHUNK_BYTES, CHUNK_BYTES)
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks=CHUNKS, cache_policy="lru", mmap_region=region
    )
    view = primary.get_kv_memoryview()
    spec = SimpleNamespace(config=plain_config(engine))
    secondary = SecondaryTierFactory.create_secondary_tier(
        {"module_path": "backends.vllm.tiers", **tier}, view, spec
    )
    manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[secondary])
    memory = np.frombuffer(view, np.uint8).reshape(CHUNKS, CHUNK_BYTES)
    try:
        yield manager, memory
    finally:
        del memory, view
        manager.shutdown()
        region.cleanup()


def settle(manager: TieringOffloadingManager) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while manager.has_pending_work():
        manager.on_schedule_end(STEP)
        assert time.monotonic() < until_s
        time.sleep(0.002)


def find(manager: TieringOffloadingManager, context: ReqContext) -> list[LookupResult]:
    """Ask as the scheduler does, until nothing is to be asked again."""
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        found = [manager.lookup(key, context) for key in KEYS]
        if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
            return found
        assert time.monotonic() < until_s
        manager.on_schedule_end(STEP)
        time.sleep(0.002)


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


@pytest.fixture(params=["fs", "object"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "fs":
        return {
            "type": "KvquayFilesystemTier",
            "paths": [str(tmp_path / "fs")],
            "capacity": "64MiB",
            "staging_rows": 4,  # fewer than there are keys: jobs go in parts
        }
    return {"type": "KvquayObjectTier", "url": f"file:{tmp_path / 'objects'}", "staging_rows": 4}


def write(manager: TieringOffloadingManager, memory: Any) -> None:
    context = ReqContext("writer")
    manager.on_new_request(context)
    output = manager.prepare_store(KEYS, context)
    assert output is not None
    for number, chunk in enumerate(output.store_spec.block_ids):
        memory[chunk] = content(number)
    manager.complete_store(output.keys_to_store, context)
    settle(manager)


def test_another_engine_finds_and_loads_what_one_has_written(tier: dict[str, Any]) -> None:
    with tiering("tiers_dp0", tier) as (manager, memory):
        write(manager, memory)
    with tiering("tiers_dp1", tier) as (manager, memory):
        context = ReqContext("reader")
        manager.on_new_request(context)
        assert find(manager, context) == [LookupResult.HIT] * len(KEYS)
        spec = manager.prepare_load(KEYS, context)
        for number, chunk in enumerate(spec.block_ids):
            assert np.array_equal(memory[chunk], content(number))
        manager.complete_load(KEYS, context)
        del memory


def test_a_damaged_block_is_a_miss_and_its_neighbours_are_not(tmp_path: Path) -> None:
    disk = tmp_path / "fs"
    tier = {"type": "KvquayFilesystemTier", "paths": [str(disk)], "capacity": "64MiB"}
    with tiering("tiers_dp0", tier) as (manager, memory):
        write(manager, memory)
    damaged = min(block_files(disk))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with tiering("tiers_dp1", tier) as (manager, _):
        context = ReqContext("reader")
        manager.on_new_request(context)
        found = find(manager, context)
        assert sorted(result.name for result in found) == ["HIT"] * (len(KEYS) - 1) + ["MISS"]
    assert len(list((disk / "quarantine").iterdir())) == 1


def test_other_models_and_hashes_do_not_see_each_others_blocks(tmp_path: Path) -> None:
    tier = {
        "type": "KvquayFilesystemTier",
        "paths": [str(tmp_path / "fs")],
        "capacity": "64MiB",
    }
    with tiering("tiers_dp0", tier) as (manager, memory):
        write(manager, memory)
    for other in ({"revision": "trained-further"}, {"hash": "sha256_cbor"}):
        with tiering("tiers_dp1", tier | other) as (manager, _):
            context = ReqContext("reader")
            manager.on_new_request(context)
            assert find(manager, context) == [LookupResult.MISS] * len(KEYS)


@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_an_engine_on_vllm_s_tiering_finds_in_our_tiers_what_another_has_written(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The scheduler, the primary tier and its shared memory are vLLM's, the tiers under it ours."""
    plan = make_plan(tmp_path / "plan", tiny_model, "engine.vllm.load_format=dummy")
    disk, log = tmp_path / "fs", tmp_path / "log"
    asked = token_prompts(2)

    def transfer(name: str, objects: Path) -> dict[str, Any]:
        fs = {"type": "KvquayFilesystemTier", "paths": [str(disk)], "capacity": "64MiB"}
        stores = {"type": "KvquayObjectTier", "url": f"file:{objects}"}
        tiers = [{"module_path": "backends.vllm.tiers", **tier} for tier in (fs, stores)]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"tiering_{os.getpid()}_{name}",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.real_vllm.cpu_tiering",
                "cpu_bytes_to_use": 16 << 20,
                "blocks_per_chunk": 2,
                "secondary_tiers": tiers,
            },
        }

    objects = tmp_path / "objects"
    with Engine(plan, 0, log, kv_transfer_config=transfer("a", objects)) as engine:
        first = engine.ask(asked)
        assert [answer.cached for answer in first] == [0, 0]
        engine.close()
    assert list(block_files(disk))
    # The disk is the only source of the first prompt, the objects of the second.
    with Engine(plan, 0, log, kv_transfer_config=transfer("b", tmp_path / "none")) as engine:
        [answer] = engine.ask(asked[:1])
        assert (answer.tokens, answer.cached) == (first[0].tokens, 384)
        engine.close()
    shutil.rmtree(disk)
    with Engine(plan, 0, log, kv_transfer_config=transfer("c", objects)) as engine:
        [answer] = engine.ask(asked[1:])
        assert (answer.tokens, answer.cached) == (first[1].tokens, 384)
        engine.close()
    assert not list(Path("/dev/shm").glob(f"vllm_offload_tiering_{os.getpid()}_*"))
