"""The adapter's parts by themselves: what it refuses, and what it makes of vLLM's questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from backends.deployment import Deployment, Plan, inline_options, plan_of, read_plan_file
from backends.errors import ConfigError, RegionError
from backends.keywise import KeywiseStack
from backends.policy.lru import Lru
from backends.region.region import Region
from backends.region.spec import RegionSpec
from backends.stack.headers import RowHeaders
from backends.stack.stack import TierStack
from backends.vllm.hashes import none_hash
from backends.vllm.interface import VllmMismatch, check_interface
from backends.vllm.manager import RowsSpec, StackManager, block_key
from backends.vllm.place import open_as_scheduler
from backends.vllm.spec import find_deployment
from backends.vllm.worker import RegionWorker
from tests.real_vllm.kit import make_plan, plain_config

pytestmark = pytest.mark.vllm

CHUNK_BLOCKS = 2
BLOCK_TOKENS = 16
BLOCK_BYTES = 64
LAYERS = 3
GROUP = OffloadingGroupConfig(32, ("model.layers.1.attn",), 0)


@pytest.fixture(scope="module")
def plan(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plan(tmp_path_factory.mktemp("plan"), tiny_model)


def offloading_config(plan: Plan, index: int = 0, **changes: Any) -> OffloadingConfig:
    """What vLLM would say of this plan's engine; it says 1 replica for dense models."""
    config = replace(
        plain_config(plan.replicas[index].engine_id),
        extra_config={"kvquay": {"options": inline_options(plan), "replica": index}},
    )
    parallel = replace(config.parallel, data_parallel_index=index)
    config = replace(config, parallel=parallel)
    return replace(config, **changes)


def test_this_vllm_has_the_interface_that_the_adapter_knows() -> None:
    assert check_interface()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((base.OffloadingManager, "lookup"), "OffloadingManager.lookup"),
        ((base.OffloadingWorker, "submit_load"), "OffloadingWorker.submit_load"),
        ((kv_cache_utils, "resolve_none_hash_seed"), "resolve_none_hash_seed"),
    ],
)
def test_another_interface_is_refused_with_the_versions(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], told: str
) -> None:
    monkeypatch.setattr(*place, lambda one, another, third_and_required, fourth: None)
    with pytest.raises(VllmMismatch, match=told) as refused:
        check_interface()
    assert "Found vLLM" in str(refused.value)
    assert "expected 0.32.0" in str(refused.value)
    monkeypatch.delattr(*place)
    with pytest.raises(VllmMismatch, match="is not there"):
        check_interface()


def test_sizes_and_indices_are_the_plans_where_vllm_says_one(plan: Path) -> None:
    read = read_plan_file(str(plan))
    found = find_deployment(offloading_config(read, 1)).offload_config(0).parallel
    assert (found.data_parallel_index, found.data_parallel_size) == (1, 2)
    assert (found.data_parallel_rank_local, found.data_parallel_size_local) == (1, 2)
    assert found.local_rank == 0


def test_inline_options_say_what_the_file_says(plan: Path) -> None:
    read = read_plan_file(str(plan))
    assert plan_of(json.loads(json.dumps(inline_options(read)))) == read


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine_id": "somebody_else"}, "engine_id is 'somebody_else' in the engine"),
        ({"cache": OffloadingCacheConfig(32, 7)}, "blocks_per_chunk is 7 in the engine"),
        ({"model": OffloadingModelConfig("tiny", "float16")}, "KV dtype is .float16. in"),
        (
            {"groups": (GROUP,)},
            r"group 0 has layers \[1\] in the engine and \[0, 1, 2, 3\] in the plan",
        ),
        ({"groups": (GROUP, GROUP)}, r"block sizes is \[32, 32\] in the engine and \[32\] in"),
        ({"extra_config": {}}, "has no mapping 'kvquay'"),
    ],
)
def test_an_engine_that_is_not_the_plans_is_refused(
    plan: Path, changes: dict[str, Any], told: str
) -> None:
    config = offloading_config(read_plan_file(str(plan)), **changes)
    with pytest.raises(ConfigError, match=told):
        find_deployment(config)


def test_vllm_s_own_replicas_under_an_external_launcher_are_refused(plan: Path) -> None:
    """vLLM counts all their workers as one replica's, and no store would ever be complete."""
    config = offloading_config(read_plan_file(str(plan)))
    config = replace(config, parallel=replace(config.parallel, world_size=2))
    with pytest.raises(ConfigError, match="workers of a replica is 2 in the engine and 1"):
        find_deployment(config)


def test_a_plan_that_was_edited_since_the_export_is_refused(plan: Path, tmp_path: Path) -> None:
    copy = tmp_path / "plan.json"
    copy.write_bytes(plan.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="it was changed since the command was made"):
        read_plan_file(str(copy), "0" * 64)
    link = tmp_path / "link.json"
    link.symlink_to(copy)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan_file(str(link))


def test_hashes_by_which_processes_would_disagree_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(none_hash("sha256")) == 32
    assert none_hash("sha256") != none_hash("sha256_cbor")
    with pytest.raises(ConfigError, match="expected sha256"):
        none_hash("xxhash")
    before = none_hash("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert none_hash("sha256") != before
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ConfigError, match="PYTHONHASHSEED is 'random'"):
        none_hash("sha256")


@contextmanager
def machine(
    rows: int = 8, device: str = "cpu"
) -> Iterator[tuple[StackManager, RegionWorker, list[torch.Tensor]]]:
    """A real region, stack and copier under the adapter, and tensors as vLLM has them."""
    blocks = 40
    tensors = [
        torch.arange(blocks * BLOCK_BYTES)
        .add(layer)
        .to(torch.int8)
        .reshape(blocks, BLOCK_BYTES)
        .to(device)
        for layer in range(LAYERS)
    ]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, BLOCK_BYTES) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, BLOCK_BYTES) for layer in range(LAYERS)]],
    )
    slot = CHUNK_BLOCKS * LAYERS * BLOCK_BYTES
    spec = RegionSpec("adapter_dp0", "adapter", "memfd", rows, slot, 1, "ab" * 32)
    with Region.create(spec) as region:
        worker = RegionWorker(
            caches,
            Region.attach(region.handle(), spec),
            0,
            bytes_per_block=[LAYERS * BLOCK_BYTES],
            blocks_per_chunk=CHUNK_BLOCKS,
            threads=1,
            kernel="auto",
        )
        headers = RowHeaders(region.row_headers(), bytes(32), [[slot]])
        kv_cache_utils.init_none_hash(lambda seed: b"n" * 32)
        keywise = KeywiseStack(
            TierStack(rows, Lru(rows), headers=headers),
            tokens_per_chunk=[CHUNK_BLOCKS * BLOCK_TOKENS],
            windowed=[False],
            steps_in_flight=2,
        )
        manager = StackManager(
            keywise, none_hash=b"n" * 32, tell=lambda counted: None, closed=lambda: None
        )
        yield manager, worker, tensors
        worker.shutdown()
        manager.shutdown()


def request(name: str, chunks: int) -> tuple[ReqContext, list[Any]]:
    context = ReqContext(name)
    keys = [make_offload_key(bytes([chunk + 1]) * 32, 0) for chunk in range(chunks)]
    for chunk, key in enumerate(keys):
        context.set_offload_key_position(key, (chunk + 1) * CHUNK_BLOCKS * BLOCK_TOKENS)
    return context, keys


def finish(worker: RegionWorker, job: int) -> None:
    worker.wait({job})
    [result] = worker.get_finished()
    assert (result.job_id, result.success) == (job, True)
    assert result.transfer_size


def store(manager: StackManager, worker: RegionWorker, context: ReqContext, keys: list[Any]) -> Any:
    output = manager.prepare_store(keys, context)
    assert output is not None
    count = len(output.keys_to_store) * CHUNK_BLOCKS
    worker.submit_store(1, GPULoadStoreSpec(list(range(count)), [count], [0]), output.store_spec)
    finish(worker, 1)
    manager.complete_store(output.keys_to_store, context)
    return output


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
            ],
        ),
    ],
)
def test_what_was_stored_comes_back_also_from_the_middle_of_a_chunk(device: str) -> None:
    with machine(device=device) as (manager, worker, tensors):
        context, keys = request("a", 3)
        manager.on_new_request(context)
        assert [manager.lookup(key, context) for key in keys] == [LookupResult.MISS] * 3
        assert store(manager, worker, context, keys).keys_to_store == keys
        again, _ = request("b", 3)
        manager.on_new_request(again)
        assert [manager.lookup(key, again) for key in keys] == [LookupResult.HIT] * 3
        # The device had the first three blocks: vLLM loads from block 3 on, in chunk 1.
        spec = manager.prepare_load(keys[1:], again)
        worker.submit_load(2, spec, GPULoadStoreSpec([33, 34, 35], [3], [3]))
        finish(worker, 2)
        manager.complete_load(keys[1:], again)
        for tensor in tensors:
            assert torch.equal(tensor[33:36], tensor[3:6])
            assert not torch.equal(tensor[36], tensor[6])
        assert manager.keywise.stack.index.pinned == 0


def test_a_row_that_is_not_the_blocks_is_never_loaded() -> None:
    with machine() as (manager, worker, _):
        context, keys = request("a", 1)
        manager.on_new_request(context)
        store(manager, worker, context, keys)
        spec = manager.prepare_load(keys, context)
        assert isinstance(spec, RowsSpec)
        stranger = RowsSpec(spec.rows, [spec.keys[0]._replace(hash=b"x" * 32)])
        with pytest.raises(RegionError, match="is not meant for block"):
            worker.submit_load(2, stranger, GPULoadStoreSpec([30, 31], [2], [0]))
        manager.complete_load(keys, context)


def test_a_reset_goes_on_until_the_steps_that_are_in_flight_are_over() -> None:
    with machine(rows=2) as (manager, worker, _):
        context, keys = request("a", 2)
        manager.on_new_request(context)
        store(manager, worker, context, keys[:1])
        manager.prepare_load(keys[:1], context)
        manager.reset_cache()
        assert manager.lookup(keys[0], context) == LookupResult.MISS
        assert manager.has_pending_work()
        for _ in range(3):
            manager.on_schedule_end(ScheduleEndContext((), ()))
        assert not manager.has_pending_work()


def test_vllm_is_told_in_its_own_words_where_a_block_came_from() -> None:
    with machine() as (manager, worker, _):
        context, keys = request("a", 3)
        manager.on_new_request(context)
        store(manager, worker, context, keys)
        seen = manager._request(context)
        seen.sources |= {block_key(keys[1]): "fs", block_key(keys[2]): "object"}
        assert [manager.get_load_source(key, context) for key in keys] == [
            CacheHitSource.HOST,
            CacheHitSource.DISK,
            CacheHitSource.EXTERNAL_UNSPECIFIED,
        ]


def test_a_scheduler_inside_one_of_several_workers_is_refused(plan: Path) -> None:
    """As under torchrun with external_launcher: every rank has a scheduler of its own."""
    read = read_plan_file(str(plan))
    several = replace(read, topology=replace(read.topology, tp_size=2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="external_launcher"):
            open_as_scheduler(Deployment(several, 0))
    finally:
        dist.destroy_process_group()


def test_hashes_that_begin_otherwise_than_the_command_said_are_refused() -> None:
    with machine() as (manager, _, _):
        kv_cache_utils.init_none_hash(lambda seed: b"m" * 32)
        with pytest.raises(ConfigError, match="prefix_caching_hash_algo or PYTHONHASHSEED"):
            manager.on_new_request(ReqContext("a"))


def test_workers_of_another_geometry_are_refused() -> None:
    tensor = torch.zeros(4, 32, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 32)], [[CanonicalKVCacheRef(0, 32)]])
    spec = RegionSpec("adapter_dp1", "adapter", "memfd", 2, 64, 1, "ab" * 32)
    with Region.create(spec) as region, pytest.raises(ConfigError, match=r"\[32\].*\[64\]"):
        RegionWorker(
            caches,
            region,
            0,
            bytes_per_block=[64],
            blocks_per_chunk=1,
            threads=1,
            kernel="auto",
        )
