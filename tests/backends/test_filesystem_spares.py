"""How many files of evicted blocks are kept to be written over."""

from __future__ import annotations

import pytest

from backends.tier.filesystem.spares import AHEAD, SHARE, Spares


@pytest.mark.parametrize(("blocks", "ahead"), [(0, 0), (8, 0), (SHARE, 1), (10_000, AHEAD)])
def test_what_is_made_ahead_is_a_small_part_of_the_blocks_that_are_there(
    blocks: int, ahead: int
) -> None:
    assert Spares(64).ahead(blocks) == ahead


def test_a_few_blocks_on_a_full_disk_never_ask_for_more_spares() -> None:
    assert not Spares(64).run_low(8)
    assert Spares(64).run_low(10_000)
