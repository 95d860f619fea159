"""Byte geometry: every byte of a block is held, by exactly the workers that should hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.config import CacheConfig, KvGroup, ModelConfig, ParallelConfig
from backends.errors import ConfigError
from backends.layout import (
    check_sharding,
    cp_tokens,
    fingerprint,
    geometry_digest,
    heads_of,
    pipeline_layers,
    replica_worker_groups,
    slot_bytes,
    worker_groups,
)

MODEL = ModelConfig("m", "main", "bfloat16", 4)
CACHE = CacheConfig(tokens_per_block=16, tokens_per_hash=16, blocks_per_chunk=8)
GROUPS = (
    KvGroup("sliding_window", "sliding_window", (0, 2), 2, 16, 2, 128),
    KvGroup("full", "full", (1, 3), 2, 16, 2),
)


@dataclass(frozen=True)
class Sizes:
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.pcp_size


def parallel(sizes: Sizes, rank: int = 0, **changes: int) -> ParallelConfig:
    values = {
        "rank": rank,
        "world_size": sizes.world_size,
        "tp_size": sizes.tp_size,
        "pp_size": sizes.pp_size,
        "pcp_size": sizes.pcp_size,
        "dcp_size": sizes.dcp_size,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": 0,
        "data_parallel_size_local": 1,
        "node_rank": 0,
        "nnodes": 1,
        "local_rank": rank,
        "local_world_size": sizes.world_size,
    }
    return ParallelConfig(**(values | changes))


AXIS = st.integers(1, 6)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[ModelConfig, tuple[KvGroup, ...], CacheConfig, Sizes, int]:
    """Any model over any axes, many of which do not fit; with an interleave that does."""
    num_layers = draw(st.integers(1, 7))
    owner = draw(st.lists(st.integers(0, 2), min_size=num_layers, max_size=num_layers))
    groups = []
    for number in sorted(set(owner)):
        kind = draw(st.sampled_from(["full", "sliding_window", "mla"]))
        groups.append(
            KvGroup(
                name=str(number),
                kind=kind,
                layers=tuple(layer for layer in range(num_layers) if owner[layer] == number),
                kv_heads=1 if kind == "mla" else draw(st.sampled_from([1, 2, 3, 4, 8])),
                head_size=draw(st.integers(1, 5)),
                planes=1 if kind == "mla" else 2,
                sliding_window=8 if kind == "sliding_window" else None,
            )
        )
    interleave = draw(st.integers(1, 3))
    tokens = interleave * draw(st.integers(1, 3))
    dcp = draw(st.integers(1, 4))
    sizes = Sizes(
        tp_size=draw(st.sampled_from([dcp, 2 * dcp, 4 * dcp]) | AXIS),
        pp_size=draw(st.integers(1, 4)),
        pcp_size=draw(st.integers(1, 3)),
        dcp_size=dcp,
    )
    model = ModelConfig("m", "main", draw(st.sampled_from(["bfloat16", "int8"])), num_layers)
    return model, tuple(groups), CacheConfig(tokens, tokens, 2), sizes, interleave


def held(
    model: ModelConfig,
    groups: tuple[KvGroup, ...],
    cache: CacheConfig,
    sizes: Sizes,
    interleave: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Every (group, layer, head, token) that any rank holds, once for each that does."""
    for rank, worker in enumerate(replica_worker_groups(groups, model, cache, sizes)):
        tp_rank = rank % sizes.tp_size
        pcp_rank = rank // sizes.tp_size % sizes.pcp_size
        tokens = cp_tokens(
            cache.tokens_per_block,
            sizes.pcp_size * sizes.dcp_size,
            pcp_rank * sizes.dcp_size + tp_rank % sizes.dcp_size,
            interleave,
        )
        for group in worker:
            for layer in group.layers:
                for head in group.heads:
                    yield from ((group.group_index, layer, head, token) for token in tokens)


@given(geometries())
def test_every_byte_is_held_by_as_many_ranks_as_replicate_it_and_bad_axes_are_found(
    drawn: tuple[ModelConfig, tuple[KvGroup, ...], CacheConfig, Sizes, int],
) -> None:
    model, groups, cache, sizes, interleave = drawn
    logical = cache.tokens_per_block * sizes.pcp_size * sizes.dcp_size
    # Each head has max(1, TP / heads) copies, over which DCP spreads its tokens.
    expected = Counter(
        {
            (index, layer, head, token): max(1, sizes.tp_size // group.kv_heads) // sizes.dcp_size
            for index, group in enumerate(groups)
            for layer in group.layers
            for head in range(group.kv_heads)
            for token in range(logical)
        }
    )
    try:
        counted = Counter(held(model, groups, cache, sizes, interleave))
    except ConfigError:
        counted = Counter()
    # As dicts: two Counters are equal also where one lacks what the other counts as 0.
    assert (dict(counted) == dict(expected)) == (check_sharding(groups, sizes) == [])


@given(geometries())
def test_slots_cover_the_chunk_of_every_rank_and_group_and_waste_less_than_a_line(
    drawn: tuple[ModelConfig, tuple[KvGroup, ...], CacheConfig, Sizes, int],
) -> None:
    model, groups, cache, sizes, _ = drawn
    if check_sharding(groups, sizes):
        return
    workers = replica_worker_groups(groups, model, cache, sizes)
    slot = slot_bytes(workers, cache.blocks_per_chunk)
    chunks = [g.block_bytes * cache.blocks_per_chunk for worker in workers for g in worker]
    assert slot % 64 == 0
    assert max(chunks) <= slot < max(chunks) + 64


@given(geometries())
def test_a_worker_sees_of_itself_what_the_plan_says_of_its_rank(
    drawn: tuple[ModelConfig, tuple[KvGroup, ...], CacheConfig, Sizes, int],
) -> None:
    model, groups, cache, sizes, _ = drawn
    if check_sharding(groups, sizes):
        return
    assert replica_worker_groups(groups, model, cache, sizes) == tuple(
        worker_groups(groups, model, cache, parallel(sizes, rank))
        for rank in range(sizes.world_size)
    )


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "expected"),
    [
        (32, 4, [8, 8, 8, 8]),
        (22, 4, [5, 6, 6, 5]),
        (5, 3, [2, 2, 1]),
        (4, 3, [1, 2, 1]),
        (3, 2, [2, 1]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (7, 1, [7]),
    ],
)
def test_pipeline_stages_are_as_vllm_cuts_them(
    num_layers: int, pp_size: int, expected: list[int]
) -> None:
    stages = pipeline_layers(num_layers, pp_size)
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize("pp_size", [0, 5])
def test_a_stage_without_a_layer_is_refused(pp_size: int) -> None:
    with pytest.raises(ConfigError, match="num_layers = 4"):
        pipeline_layers(4, pp_size)


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "expected"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
        (3, 3, [[0], [1], [2]]),
    ],
)
def test_heads_are_divided_or_replicated_over_neighbouring_ranks(
    kv_heads: int, tp_size: int, expected: list[list[int]]
) -> None:
    assert [list(heads_of(kv_heads, tp_size, rank)) for rank in range(tp_size)] == expected


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 KV heads and tp_size 4"):
        heads_of(6, 4, 0)
    with pytest.raises(ConfigError, match="tp_rank is 4"):
        heads_of(4, 4, 4)


@pytest.mark.parametrize(
    ("interleave", "expected"),
    [
        (1, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_tokens_are_dealt_out_as_vllm_maps_slots(
    interleave: int, expected: list[tuple[int, ...]]
) -> None:
    assert [cp_tokens(4, 2, rank, interleave) for rank in range(2)] == expected


def test_an_interleave_that_splits_a_block_unevenly_is_refused() -> None:
    with pytest.raises(ConfigError, match="divisor of tokens_per_block = 4"):
        cp_tokens(4, 2, 0, 3)
    with pytest.raises(ConfigError, match="cp_rank is 2"):
        cp_tokens(4, 2, 2)


def test_bytes_of_llama_8b_over_tp4_are_the_known_ones() -> None:
    model = ModelConfig("llama", "main", "bfloat16", 32)
    groups = (KvGroup("full", "full", tuple(range(32)), 8, 128, 2),)
    (group,) = worker_groups(groups, model, CACHE, parallel(Sizes(tp_size=4)))
    assert (group.plane_bytes, group.layer_bytes) == (8192, 16384)
    assert group.block_bytes == 16384 * 32 == 128 * 1024 * CACHE.tokens_per_block // 4


def test_every_tp_rank_holds_the_whole_latent() -> None:
    model = ModelConfig("v3", "main", "bfloat16", 61)
    groups = (KvGroup("mla", "mla", tuple(range(61)), 1, 576, 1),)
    for worker in replica_worker_groups(groups, model, CACHE, Sizes(tp_size=16)):
        assert worker[0].block_bytes == 61 * 576 * 2 * CACHE.tokens_per_block


def test_a_stage_without_a_layer_of_a_group_holds_no_byte_of_it() -> None:
    groups = (replace(GROUPS[0], layers=(0, 1)), replace(GROUPS[1], layers=(2, 3)))
    first, second = replica_worker_groups(groups, MODEL, CACHE, Sizes(pp_size=2))
    assert [group.block_bytes for group in first] == [2 * 2 * 16 * 2 * 16 * 2, 0]
    assert [group.layers for group in second] == [(), (2, 3)]


def test_a_slot_holds_one_groups_chunk_and_not_the_sum_of_all() -> None:
    workers = replica_worker_groups(GROUPS, MODEL, CACHE, Sizes())
    one = workers[0][0].block_bytes * CACHE.blocks_per_chunk
    assert slot_bytes(workers, CACHE.blocks_per_chunk) == one


def test_a_slot_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one of each"):
        slot_bytes([], 8)
    with pytest.raises(ConfigError, match="a slot of 0 blocks"):
        slot_bytes(replica_worker_groups(GROUPS, MODEL, CACHE, Sizes()), 0)


def test_groups_that_miss_or_repeat_a_layer_are_refused() -> None:
    for layers in ((1,), (1, 2, 3), (1, 4)):
        groups = (GROUPS[0], replace(GROUPS[1], layers=layers))
        with pytest.raises(ConfigError, match=r"expected each of 0\.\.3 once"):
            worker_groups(groups, MODEL, CACHE, parallel(Sizes()))


@pytest.mark.parametrize(
    ("sizes", "kv_heads", "keys"),
    [
        (Sizes(tp_size=0, dcp_size=-1), 8, {"tensor", "decode_context"}),
        (Sizes(pp_size=5), 8, {"pipeline"}),
        (Sizes(tp_size=3), 8, {"tensor"}),
        (Sizes(tp_size=12), 8, {"tensor"}),
        (Sizes(tp_size=4, dcp_size=3), 1, {"decode_context"}),
        (Sizes(tp_size=8, dcp_size=2), 8, {"decode_context"}),  # vLLM: TP must exceed the heads
        (Sizes(tp_size=16, dcp_size=4), 8, {"decode_context"}),
        (Sizes(tp_size=12, dcp_size=4), 2, {"decode_context"}),  # would straddle two heads
        (Sizes(tp_size=3, pp_size=9, dcp_size=2), 8, {"tensor", "pipeline", "decode_context"}),
        (Sizes(tp_size=16, dcp_size=2), 8, set()),
        (Sizes(tp_size=8, dcp_size=8), 1, set()),
        (Sizes(tp_size=2, pp_size=4, pcp_size=3), 8, set()),
    ],
)
def test_axes_that_cannot_divide_a_model_are_named_all_at_once(
    sizes: Sizes, kv_heads: int, keys: set[str]
) -> None:
    groups = (KvGroup("full", "full", (0, 1, 2, 3), kv_heads, 16, 2),)
    findings = check_sharding(groups, sizes)
    assert {finding.key for finding in findings} == {
        f"parallel.{axis}_parallel_size" for axis in keys
    }
    assert all(finding.fix for finding in findings)


def test_the_fix_for_dcp_over_divided_heads_is_a_size_that_works() -> None:
    groups = (KvGroup("full", "full", (0, 1, 2, 3), 8, 16, 2),)
    (finding,) = check_sharding(groups, Sizes(tp_size=8, dcp_size=2))
    assert "tensor_parallel_size=16" in finding.fix
    assert check_sharding(groups, Sizes(tp_size=16, dcp_size=2)) == []


def digest(
    groups: tuple[KvGroup, ...] = GROUPS,
    model: ModelConfig = MODEL,
    cache: CacheConfig = CACHE,
    sizes: Sizes | ParallelConfig = Sizes(tp_size=2),
    layout: str = "layers_first",
    interleave: int = 1,
) -> str:
    return geometry_digest(groups, model, cache, sizes, layout, interleave=interleave)


def test_the_digest_of_a_geometry_does_not_drift() -> None:
    # A change here makes every stored block and every running peer a stranger: change the format
    # version with it, knowingly.
    assert digest() == "d16ea02a2ebfa5c54a21971adfec5307ed877b7c0b92e9499b0840da794fabec"


def test_the_digest_does_not_know_replica_node_or_rank() -> None:
    sizes = Sizes(tp_size=2)
    elsewhere = parallel(
        sizes,
        rank=1,
        data_parallel_index=3,
        data_parallel_size=8,
        data_parallel_size_local=4,
        node_rank=1,
        nnodes=2,
        local_rank=0,
    )
    assert digest(sizes=elsewhere) == digest(sizes=parallel(sizes)) == digest(sizes=sizes)


def test_the_digest_does_not_know_names() -> None:
    renamed = tuple(replace(group, name=group.name + "x") for group in GROUPS)
    assert digest(groups=renamed, model=replace(MODEL, name="n", revision="r")) == digest()


def test_whatever_moves_a_byte_changes_the_digest() -> None:
    changed = [
        digest(),
        digest(groups=GROUPS[::-1]),
        digest(groups=(replace(GROUPS[0], sliding_window=64), GROUPS[1])),
        digest(groups=(replace(GROUPS[0], head_size=32), GROUPS[1])),
        digest(groups=(replace(GROUPS[0], layers=(2, 0)), GROUPS[1])),
        digest(model=replace(MODEL, dtype="float16")),
        digest(cache=replace(CACHE, tokens_per_block=32)),
        digest(cache=replace(CACHE, tokens_per_hash=8)),
        digest(cache=replace(CACHE, blocks_per_chunk=4)),
        digest(sizes=Sizes(tp_size=4)),
        digest(sizes=Sizes(tp_size=2, pp_size=2)),
        digest(sizes=Sizes(tp_size=2, pcp_size=2)),
        digest(sizes=Sizes(tp_size=2, dcp_size=2)),
        digest(layout="blocks_first"),
        digest(interleave=2),
    ]
    assert len(set(changed)) == len(changed)


def test_whatever_changes_the_bytes_under_a_key_changes_the_fingerprint() -> None:
    def namespace(
        model: ModelConfig = MODEL,
        layout: str = "layers_first",
        rope: str = "",
        hash_algorithm: str = "xxh3",
        format_version: int = 1,
        kv_quantization: str = "",
        tenant_salt: str = "",
    ) -> str:
        return fingerprint(
            GROUPS,
            model,
            CACHE,
            Sizes(),
            layout,
            rope=rope,
            hash_algorithm=hash_algorithm,
            format_version=format_version,
            kv_quantization=kv_quantization,
            tenant_salt=tenant_salt,
        )

    changed = [
        namespace(),
        namespace(model=replace(MODEL, name="n")),
        namespace(model=replace(MODEL, revision="r")),
        namespace(model=replace(MODEL, dtype="float16")),
        namespace(layout="blocks_first"),
        namespace(rope="theta"),
        namespace(hash_algorithm="sha256"),
        namespace(format_version=2),
        namespace(kv_quantization="fp8"),
        namespace(tenant_salt="theta"),  # the same text elsewhere is another namespace
    ]
    assert len(set(changed)) == len(changed)
    assert namespace() == namespace()
