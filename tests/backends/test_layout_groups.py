"""Columns of an entry, reaches of windows, and slots that ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.config import CacheConfig, KvGroup, ModelConfig
from backends.errors import ConfigError
from backends.layout import (
    blocks_per_unit,
    check_blocks,
    columns,
    geometry_digest,
    rank_slots,
    unit_tokens,
)
from orchestrator.topology import Topology

CACHE = CacheConfig(tokens_per_block=16, tokens_per_hash=16, blocks_per_chunk=8)
FULL = KvGroup("full", "full", (0,), 2, 16, 2)
MLA = KvGroup("mla", "mla", (0,), 1, 36, 1)
ONE = Topology(1, 1, 1, 1, 1, 1)


def window(tokens: int, tokens_per_block: int | None = None) -> KvGroup:
    return KvGroup("w", "sliding_window", (1,), 2, 16, 2, tokens, tokens_per_block)


def sizes(tp: int, pp: int = 1, pcp: int = 1, dcp: int = 1) -> Topology:
    return Topology(1, pp, pcp, tp, dcp, 1)


def needed_chunks(window_tokens: int, chunk_tokens: int, parts: int, entries: int) -> set[int]:
    """Which of a group's chunks hold a token that is looked at from a hit's end on, one by one."""
    end = entries * parts * chunk_tokens
    return {token // chunk_tokens for token in range(max(0, end - window_tokens + 1), end)}


@pytest.mark.parametrize("tokens", [1, 2, 128, 129, 130, 200, 257, 1000])
@pytest.mark.parametrize("block", [None, 8, 4])
def test_a_window_reaches_as_far_back_as_attention_looks(tokens: int, block: int | None) -> None:
    groups = (FULL, window(tokens, block))
    own = [column for column in columns(groups, CACHE, ONE) if column.group == 1]
    entries, chunk_tokens = 40, (block or 16) * 8
    found = set()
    for column in own:
        assert column.reach is not None
        for entry in range(entries - column.reach, entries):
            found.add(entry * column.parts + column.part)
    assert found == needed_chunks(tokens, chunk_tokens, len(own), entries)


def test_a_column_is_the_groups_index_wherever_all_blocks_are_equal() -> None:
    found = columns((window(5), FULL), CACHE, ONE)
    assert [(c.group, c.part, c.parts) for c in found] == [(0, 0, 1), (1, 0, 1)]
    longer = replace(FULL, tokens_per_block=32)
    found = columns((FULL, longer, window(5)), CACHE, ONE)
    assert [(c.group, c.part) for c in found] == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    assert unit_tokens((FULL, longer), CACHE) == 32


def test_a_block_that_does_not_fill_the_longest_is_named() -> None:
    groups = (FULL, replace(FULL, tokens_per_block=24))
    [found] = check_blocks(groups, CACHE)
    assert found.key == "model.groups[0].tokens_per_block"
    with pytest.raises(ConfigError, match="must divide the longest block"):
        blocks_per_unit(groups, CACHE)


@pytest.mark.parametrize(
    ("group", "topology", "local", "slots"),
    [
        (MLA, sizes(4), 4, (0, 0, 0, 0)),
        (MLA, sizes(2, pp=2), 4, (0, 0, 1, 1)),
        (MLA, sizes(2, pp=2), 2, (0, 0, 0, 0)),
        (MLA, sizes(4, dcp=2), 4, (0, 1, 0, 1)),
        (MLA, sizes(2, pcp=2), 4, (0, 0, 1, 1)),
        (FULL, sizes(2), 2, (0, 1)),
        (FULL, sizes(4), 4, (0, 0, 1, 1)),
        (FULL, sizes(4, dcp=2), 4, (0, 1, 2, 3)),
    ],
)
def test_ranks_share_a_slot_where_they_hold_the_same(
    group: KvGroup, topology: Topology, local: int, slots: tuple[int, ...]
) -> None:
    assert rank_slots((group,), topology, local) == slots


def test_a_group_that_is_divided_keeps_ranks_apart_whatever_the_others_do() -> None:
    assert rank_slots((MLA, replace(FULL, layers=(1,))), sizes(2), 2) == (0, 1)


def test_blocks_and_shared_slots_decide_the_bytes() -> None:
    model = ModelConfig("m", "main", "bfloat16", 1)

    def digest(group: KvGroup) -> str:
        return geometry_digest((group,), model, CACHE, sizes(2), "layers_first")

    assert digest(FULL) != digest(replace(FULL, tokens_per_block=32))
