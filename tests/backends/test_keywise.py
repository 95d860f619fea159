"""The stack, asked for one chunk at a time: runs, sources, resets."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backends.block import COMPLETE, BlockKey, write_header
from backends.keywise import KeywiseStack, Request
from backends.policy.lru import Lru
from backends.stack.settings import StackSettings
from backends.stack.stack import TierStack
from backends.testing import MemoryMedium, MemorySettings, MemoryTier
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context
from backends.tier.base import Lookup, Tier

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
TOKENS = 32
PATIENCE_S = 20.0
UNHURRIED = StackSettings(
    lookup_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S, store_timeout_s=PATIENCE_S
)


class Questions(TierStack):
    """Counts how often a stack is asked."""

    asked = 0

    def lookup(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().lookup(*args, **kwargs)


def open_stack(
    rows: int = 8, *, windowed: bool = False, tiers: Sequence[Tier] = ()
) -> KeywiseStack:
    return KeywiseStack(
        Questions(rows, Lru(rows), tiers, UNHURRIED),
        tokens_per_chunk=[TOKENS],
        windowed=[windowed],
        steps_in_flight=2,
    )


def ends(count: int, first: int = 0) -> list[tuple[BlockKey, int]]:
    """Chunks of one sequence with the token behind each."""
    numbers = range(first + 1, first + count + 1)
    return [(BlockKey(bytes([number]) * 32, 0), number * TOKENS) for number in numbers]


def keys(count: int, first: int = 0) -> list[BlockKey]:
    return [key for key, _ in ends(count, first)]


def new_request(stack: KeywiseStack, count: int) -> Request:
    request = stack.new_request()
    request.tell(ends(count))
    return request


def store(stack: KeywiseStack, request: Request, count: int) -> list[int]:
    rows = stack.prepare_store(request, ends(count))
    assert rows is not None
    stack.complete_store(rows.keys, success=True)
    return rows.rows


def answers(stack: KeywiseStack, request: Request, count: int) -> list[Lookup]:
    return [stack.lookup(request, key, end) for key, end in ends(count)]


def questions(stack: KeywiseStack) -> int:
    assert isinstance(stack.stack, Questions)
    return stack.stack.asked


def test_a_run_is_one_question_until_something_changes() -> None:
    stack = open_stack()
    request = new_request(stack, 4)
    assert answers(stack, request, 4) == [MISS] * 4
    assert questions(stack) == 1
    store(stack, request, 3)
    assert answers(stack, request, 4) == [HIT] * 3 + [MISS]
    assert questions(stack) == 2
    another = new_request(stack, 4)
    assert answers(stack, another, 4) == [HIT] * 3 + [MISS]
    assert questions(stack) == 3


def test_a_key_that_ends_no_whole_chunk_is_asked_for_alone() -> None:
    stack = open_stack()
    request = new_request(stack, 2)
    [(key, end)] = ends(1, first=2)
    assert stack.lookup(request, key, end - 1) == MISS
    assert stack.lookup(request, key, None) == MISS
    assert questions(stack) == 2


def test_windows_are_asked_for_key_by_key() -> None:
    stack = open_stack(windowed=True)
    request = new_request(stack, 3)
    store(stack, request, 3)
    assert [stack.lookup(request, *end) for end in reversed(ends(3))] == [HIT] * 3
    assert questions(stack) == 3


def test_loads_get_the_rows_of_their_keys_and_pins_are_given_back() -> None:
    stack = open_stack()
    request = new_request(stack, 3)
    rows = store(stack, request, 3)
    loading = stack.prepare_load(request, keys(2, first=1))
    assert loading == (rows[1:], keys(2, first=1))
    assert stack.stack.index.pinned == 2
    stack.complete_load(loading.keys)
    assert stack.stack.index.pinned == 0


def test_it_is_known_which_tier_a_chunk_came_from() -> None:
    rows, medium = RowBuffer(8, 2 * 4096), MemoryMedium()
    tier = MemoryTier(make_context(rows), MemorySettings(None), medium)
    with_tier = open_stack(tiers=[tier])
    request = new_request(with_tier, 3)
    storing = with_tier.prepare_store(request, ends(2))
    assert storing is not None
    for row, key in zip(storing.rows, storing.keys, strict=True):
        write_header(
            rows.row_view(row),
            key,
            fingerprint=FINGERPRINT,
            slot_lengths=[rows.row_bytes - 4096],
            created_ns=1,
            state=COMPLETE,
        )
    with_tier.complete_store(storing.keys, success=True)
    assert with_tier.stack.drain(PATIENCE_S)
    with_tier.reset()

    late = new_request(with_tier, 3)
    until_s = time.monotonic() + PATIENCE_S
    while PENDING in answers(with_tier, late, 3):
        with_tier.step()
        assert time.monotonic() < until_s
    assert answers(with_tier, late, 3) == [HIT, HIT, MISS]
    with_tier.prepare_load(late, keys(2))
    assert late.sources == dict.fromkeys(keys(2), "memory")
    with_tier.complete_load(keys(2))
    told: list[dict[str, object]] = []
    with_tier.close(PATIENCE_S, told.append)
    assert [counted["drained"] for counted in told] == [False, True]
    assert told[0].keys() == told[1].keys()


def test_a_region_that_is_full_stores_what_fits_and_asks_to_be_asked_again() -> None:
    stack = open_stack(rows=2)
    request = new_request(stack, 3)
    rows = stack.prepare_store(request, ends(3))
    assert rows is not None
    assert rows.keys == keys(2)
    assert stack.prepare_store(request, ends(1, first=2)) is None
    stack.complete_store(rows.keys, success=False)
    assert stack.stack.index.rows_free == 2


def test_after_a_reset_rows_of_cut_off_transfers_stay_out_of_use_until_they_have_ended() -> None:
    stack = open_stack(rows=4)
    request = new_request(stack, 4)
    store(stack, request, 2)
    stack.prepare_load(request, keys(1))
    assert stack.prepare_store(request, ends(2, first=2)) is not None
    stack.reset()
    assert answers(stack, new_request(stack, 2), 2) == [MISS] * 2
    for _ in range(3):
        assert stack.busy
        assert stack.stack.index.rows_free == 1
        stack.step()
    assert not stack.busy
    assert stack.stack.index.rows_free == 4
    assert stack.stack.index.pinned == 0


def test_an_engine_that_tells_when_they_have_ended_need_not_wait() -> None:
    stack = open_stack(rows=4)
    request = new_request(stack, 2)
    store(stack, request, 1)
    stack.prepare_load(request, keys(1))
    stack.reset()
    assert stack.busy
    stack.flushed()
    assert not stack.busy
    assert stack.stack.index.rows_free == 4
