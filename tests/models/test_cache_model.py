"""The model is what the engine is judged by, so it is itself checked by hand and by law."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.cache_model import HitRecord, ReplicaCacheModel

B = 4  # tokens a block


def hashes_of(text: str, output: str = "", tokens_per_hash: int = B) -> tuple[bytes, ...]:
    """Chained hashes of a sequence of which every letter is one token."""
    tokens = text + output
    ends = range(tokens_per_hash, len(tokens) + 1, tokens_per_hash)
    return tuple(blake2b(tokens[:end].encode(), digest_size=32).digest() for end in ends)


def model(device: int = 100, rows: int = 100, chunk: int = 1, **more: int) -> ReplicaCacheModel:
    return ReplicaCacheModel(device, rows, B, chunk, more.pop("tokens_per_hash", B), **more)


def ask(cache: ReplicaCacheModel, prompt: str, output: int = 0) -> HitRecord:
    return cache.process(len(prompt), output, hashes_of(prompt))


def test_first_request_hits_nothing_and_stores_its_full_chunks() -> None:
    # 10 tokens: blocks aaaa bbbb cc, of which two are known.
    record = ask(model(), "aaaabbbbcc")
    assert record == HitRecord(requests=1, prompt_tokens=10, stored_chunks=2)


def test_the_last_prompt_token_is_always_computed() -> None:
    cache = model()
    ask(cache, "aaaabbbb")
    # 8 tokens again: floor(7 / 4) = 1 block may be a hit, though both are held.
    assert ask(cache, "aaaabbbb").hit_tokens_device == 4
    # 9 tokens: floor(8 / 4) = 2.
    assert ask(cache, "aaaabbbbc").hit_tokens_device == 8


def test_hits_end_at_the_first_block_that_differs() -> None:
    cache = model()
    ask(cache, "aaaabbbbccccd")
    assert ask(cache, "aaaaXbbbccccd").hit_tokens_device == 4


def test_request_larger_than_the_device_cache_is_rejected_and_changes_nothing() -> None:
    cache = model(device=3)
    assert cache.process(12, 1, hashes_of("aaaabbbbcccc")) == HitRecord(rejected=1)
    assert cache.totals() == HitRecord(rejected=1)
    assert list(cache.free) == [0, 1, 2]
    assert not cache.region
    assert cache.process(12, 0, hashes_of("aaaabbbbcccc")).requests == 1


def test_blocks_lost_on_the_device_are_hits_in_the_region() -> None:
    cache = model(device=3)
    ask(cache, "aaaabbbbcccc")
    ask(cache, "ddddeeeeffff")  # takes all three blocks
    record = ask(cache, "aaaabbbbc")
    assert (record.hit_tokens_device, record.hit_tokens_region) == (0, 8)


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    cache = model(device=4, rows=0)
    ask(cache, "aaaabbbbcccc")
    ask(cache, "ddddeeee")  # the fourth block, then that of cccc
    record = ask(cache, "aaaabbbbccccd")
    assert record.hit_tokens_device == 8


def test_blocks_without_content_are_reused_first() -> None:
    cache = model(device=3, rows=0)
    ask(cache, "aaaabbbb")
    ask(cache, "cc")  # the third block, partial: it goes to the head of the free list
    ask(cache, "dd")  # and is taken again, before those of aaaa and bbbb
    assert len(cache.hash_of_block) == 2
    assert ask(cache, "aaaabbbbc").hit_tokens_device == 8


def test_region_loads_whole_chunks_from_the_one_that_the_device_hits_end_in() -> None:
    cache = model(device=6, rows=10, chunk=2)
    ask(cache, "aaaabbbbccccddddeeee")  # 5 blocks; chunks ab, cd
    ask(cache, "xxxxyyyy")  # blocks: the sixth, then that of eeee
    # Free now: dddd cccc bbbb aaaa yyyy xxxx.
    ask(cache, "ppppqqqqrrrr")  # takes dddd cccc bbbb
    record = ask(cache, "aaaabbbbccccddddeeeef")  # 6 blocks, at most 5 hits
    # On the device: aaaa. Chunk 0 is loaded for bbbb, chunk 1 for cccc and dddd.
    assert (record.hit_tokens_device, record.hit_tokens_region) == (4, 12)


def test_a_chunk_beyond_the_hit_limit_is_not_loaded_in_part() -> None:
    cache = model(device=4, rows=10, chunk=2)
    ask(cache, "aaaabbbbccccdddd")
    ask(cache, "wwwwxxxxyyyyzzzz")
    # 16 tokens: floor(15 / 4) = 3 blocks may be hits, so only chunk 0 is loaded.
    assert ask(cache, "aaaabbbbccccdddd").hit_tokens_region == 8


def test_a_prefix_outlives_its_extension_in_the_region() -> None:
    cache = model(device=100, rows=3)
    ask(cache, "aaaabbbbcccc")
    record = ask(cache, "dddd")
    assert (record.stored_chunks, record.evicted_chunks) == (1, 1)
    kept = hashes_of("aaaabbbbcccc")
    assert [key in cache.region for key in kept] == [True, True, False]


def test_a_request_never_evicts_its_own_chunks() -> None:
    cache = model(rows=2)
    record = ask(cache, "aaaabbbbccccdddd")
    assert (record.stored_chunks, record.evicted_chunks, record.skipped_stores) == (2, 0, 2)
    assert cache.region == set(hashes_of("aaaabbbb"))


def test_chunks_found_on_the_device_become_recent_in_the_region_too() -> None:
    cache = model(device=100, rows=3)
    ask(cache, "aaaabbbb")
    ask(cache, "cccc")
    assert ask(cache, "aaaabbbbd").hit_tokens_device == 8
    ask(cache, "eeee")
    assert cache.region == {*hashes_of("aaaabbbb"), *hashes_of("eeee")}


def test_every_group_takes_a_row() -> None:
    cache = model(rows=5, groups=2)
    record = ask(cache, "aaaabbbbcccc")
    assert (record.stored_chunks, record.skipped_stores) == (2, 1)


def test_known_output_becomes_part_of_the_next_prompt() -> None:
    cache = model()
    cache.process(6, 6, hashes_of("aaaabb", "bbcccc"))
    assert ask(cache, "aaaabbbbccccd").hit_tokens_device == 12


def test_unknown_output_takes_blocks_but_is_never_found() -> None:
    cache = model(device=3)
    cache.process(4, 8, hashes_of("aaaa"))
    assert len(cache.hash_of_block) == 1
    assert len(cache.region) == 1


def test_a_block_spans_several_hashes() -> None:
    cache = model(tokens_per_hash=2)
    cache.process(10, 0, hashes_of("aaaabbbbcc", tokens_per_hash=2))
    record = cache.process(9, 0, hashes_of("aaaabbbbd", tokens_per_hash=2))
    assert record.hit_tokens_device == 8


def test_the_earlier_of_two_blocks_with_one_content_stays_the_one_that_is_found() -> None:
    cache = model(device=6, rows=0)
    ask(cache, "aaaabbbb")
    first = dict(cache.block_of_hash)
    # The prompt is 8 tokens: aaaa is a hit, bbbb is computed again into another block.
    ask(cache, "aaaabbbb")
    assert cache.block_of_hash == first
    assert len(cache.hash_of_block) == 2


def test_totals_are_the_sum_of_the_records() -> None:
    cache = model(device=4, rows=2)
    records = [ask(cache, text) for text in ("aaaabbbbc", "aaaabbbbc", "ddddeeeef", "a" * 40)]
    total = HitRecord()
    for record in records:
        total = total + record
    assert cache.totals() == total
    assert (total.requests, total.rejected, total.prompt_tokens) == (3, 1, 27)


texts = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=30), st.integers(0, 12)), min_size=1, max_size=25
)


@settings(max_examples=200, deadline=None)
@given(
    requests=texts,
    device=st.integers(1, 12),
    rows=st.integers(0, 12),
    chunk=st.integers(1, 3),
    groups=st.integers(1, 2),
    tokens_per_hash=st.sampled_from([1, 2, 4]),
    knows_output=st.booleans(),
)
def test_laws_hold_after_every_request(
    requests: list[tuple[str, int]],
    device: int,
    rows: int,
    chunk: int,
    groups: int,
    tokens_per_hash: int,
    knows_output: bool,
) -> None:
    cache = ReplicaCacheModel(device, rows, B, chunk, tokens_per_hash, groups)
    seen: set[bytes] = set()
    for prompt, output in requests:
        answer = "z" * output if knows_output else ""
        hashes = hashes_of(prompt, answer, tokens_per_hash)
        record = cache.process(len(prompt), output, hashes)
        assert record.requests + record.rejected == 1

        hit = record.hit_tokens_device + record.hit_tokens_region
        assert hit <= (len(prompt) - 1) // B * B
        block_hashes = hashes[B // tokens_per_hash - 1 :: B // tokens_per_hash]
        assert all(key in seen for key in block_hashes[: hit // B])
        if record.requests:
            seen.update(block_hashes)

        assert sorted(cache.free) == list(range(device))
        assert {b: h for h, b in cache.block_of_hash.items()} == cache.hash_of_block
        assert len(cache.region) * groups <= rows
        assert len(cache.region) == cache.totals().stored_chunks - cache.totals().evicted_chunks


@settings(max_examples=100, deadline=None)
@given(requests=texts, chunk=st.integers(1, 3))
def test_caches_that_never_fill_find_everything_that_was_computed(
    requests: list[tuple[str, int]], chunk: int
) -> None:
    cache = model(device=2000, rows=2000, chunk=chunk)
    seen: set[bytes] = set()
    for prompt, output in requests:
        hashes = hashes_of(prompt)
        limit = (len(prompt) - 1) // B
        expected = next((i for i in range(limit) if hashes[i] not in seen), limit)
        assert cache.process(len(prompt), output, hashes).hit_tokens_device == expected * B
        seen.update(hashes)
    assert cache.totals().evicted_chunks == cache.totals().skipped_stores == 0


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(AssertionError):
        model().process(0, 1, ())
