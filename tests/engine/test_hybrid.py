"""Groups that keep a window or have blocks of their own: from what is hit one can go on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from backends.config import CacheConfig
from backends.layout import unit_tokens
from orchestrator.workload.request import Request
from tests.engine.hybrid_kit import NamedReplica, make_group
from tests.engine.test_scheduler import chain

CASES = 12
TOKENS_MOST = 48
SHAPES = {
    "full and window": (make_group("f"), make_group("w", 5)),
    "window first": (make_group("w", 9), make_group("f")),
    "window of one token": (make_group("f"), make_group("w", 1)),
    "only a window": (make_group("w", 6),),
    "two windows": (make_group("f"), make_group("w", 3), make_group("v", 14)),
    "two block sizes": (make_group("a", None, 2), make_group("b", None, 4)),
    "window with shorter blocks": (make_group("a", None, 4), make_group("w", 7, 2)),
    "window with longer blocks": (make_group("a", None, 2), make_group("w", 7, 4)),
    "window with blocks of a third": (make_group("a", None, 6), make_group("w", 5, 2)),
}


def conversations(rng: random.Random, count: int) -> Iterator[Request]:
    """Turns of a few conversations, behind two system prompts; sometimes one is asked again, or
    parts from what was said before."""
    histories = [[start] * rng.randrange(4, 12) for start in (0, 1, 0, 1)]
    for index in range(count):
        history = rng.choice(histories)
        units = history[: rng.randrange(1, len(history) + 1)] if rng.random() < 0.2 else history
        if rng.random() < 0.8:
            units = units + [rng.randrange(2, 5) for _ in range(rng.randrange(1, 10))]
        units = units[:TOKENS_MOST]
        prompt = rng.randrange(len(units) // 2, len(units)) + 1
        yield Request(index, float(index), prompt, len(units) - prompt, chain(units))
        history[:] = units if len(units) < TOKENS_MOST else history[:6]


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_is_hit_can_be_gone_on_from(name: str) -> None:
    hits = 0
    for seed in range(CASES):
        rng = random.Random(seed)
        rows, chunk = rng.randrange(12, 80), rng.randrange(1, 4)
        cache = CacheConfig(tokens_per_block=2, tokens_per_hash=1, blocks_per_chunk=chunk)
        device_blocks = rng.choice([TOKENS_MOST, 80]) // unit_tokens(SHAPES[name], cache) + 1
        replica = NamedReplica(SHAPES[name], cache, device_blocks, rows)
        fails = rng.random() < 0.5
        for request in conversations(rng, 30):
            fail_at = rng.randrange(3) if fails and rng.random() < 0.3 else None
            replica.serve(request, fail_at)
        hits += replica.scheduler.stats.hit_tokens_shm
        stack = replica.stack
        assert stack.index.pinned == stack.index.rows_leaving == 0
        assert stack.index.rows_free + stack.index.rows_used == rows
    assert hits > 0
