"""The leader's decisions against an independent model of the caches, and under failed loads."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.layout import Column
from backends.policy.registry import PolicyRegistry
from backends.stack.stack import TierStack
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.paging import Paging
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.step import FILL, LOAD, ChunkWork
from orchestrator.workload.request import Request
from tests.models.cache_model import ReplicaCacheModel


def chain(prefix: list[int], per_hash: int = 1) -> tuple[bytes, ...]:
    parent, hashes = b"", []
    for token in prefix:
        parent = hashlib.blake2b(parent + bytes([token]), digest_size=32).digest()
        hashes.append(parent)
    return tuple(hashes)


def make_request(rng: random.Random, index: int, tokens_per_hash: int) -> Request:
    """Few distinct units, so that prefixes are shared often."""
    units = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
    prompt = max(1, len(units) * tokens_per_hash - rng.randrange(tokens_per_hash))
    output = rng.randrange(0, 3 * tokens_per_hash)
    known = rng.choice([prompt, prompt + output]) // tokens_per_hash
    units += [rng.randrange(2) for _ in range(known - len(units))]
    return Request(index, float(index), prompt, output, chain(units[:known]))


def serve(scheduler: Scheduler, request: Request, agree: object = None) -> list[ChunkWork]:
    steps, done = scheduler.steps(request), []
    chunks = next(steps, None)
    while chunks is not None:
        loads = sum(chunk.loads for chunk in chunks)
        agreed = loads if agree is None else min(loads, agree(loads))  # type: ignore[operator]
        done += chunks
        try:
            chunks = steps.send(agreed)
        except StopIteration:
            break
    scheduler.settle()
    return done


def make(
    device: int,
    rows: int,
    tokens: int,
    chunk: int,
    per_hash: int,
    groups: int,
    per_step: int = 2,
    eviction: str = "lru",
) -> Scheduler:
    return Scheduler(
        DeviceCache(device),
        TierStack(rows, PolicyRegistry().open(eviction, rows // groups), groups=groups),
        Paging(
            block_tokens=tokens,
            hashes_per_block=tokens // per_hash,
            blocks_per_chunk=chunk,
            pieces=(1,),
            columns=tuple(Column(group, 0, 1, None) for group in range(groups)),
            windows=(),
        ),
        chunks_per_step=per_step,
    )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    device=st.integers(2, 30),
    chunks=st.integers(1, 8),
    groups=st.integers(1, 3),
    hashes_per_block=st.sampled_from([1, 2]),
    chunk=st.integers(1, 4),
    per_step=st.integers(1, 3),
    eviction=st.sampled_from(PolicyRegistry().names()),
)
def test_counts_what_an_independent_model_of_the_caches_counts(
    seed: int,
    device: int,
    chunks: int,
    groups: int,
    hashes_per_block: int,
    chunk: int,
    per_step: int,
    eviction: str,
) -> None:
    rng, per_hash = random.Random(seed), 4
    tokens = per_hash * hashes_per_block
    rows = chunks * groups + rng.randrange(groups)
    scheduler = make(device, rows, tokens, chunk, per_hash, groups, per_step, eviction)
    model = ReplicaCacheModel(device, rows, tokens, chunk, per_hash, groups, eviction)
    for index in range(60):
        request = make_request(rng, index, per_hash)
        serve(scheduler, request)
        model.process(
            request.prompt_tokens, request.output_tokens, request.hashes, request.arrival_s
        )
    expected, counters = model.totals(), scheduler._stack.counters
    assert scheduler.stats.rejected == expected.rejected
    assert scheduler.stats.requests == expected.requests
    assert scheduler.stats.prompt_tokens == expected.prompt_tokens
    assert scheduler.stats.hit_tokens_device == expected.hit_tokens_device
    assert scheduler.stats.hit_tokens_shm == expected.hit_tokens_region
    assert counters.stored == expected.stored_chunks
    assert counters.evictions == expected.evicted_chunks
    assert counters.skipped_stores + counters.refused == expected.skipped_stores


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 3), groups=st.integers(1, 2))
def test_what_is_loaded_and_found_is_what_was_written_even_when_loads_fail(
    seed: int, chunk: int, groups: int
) -> None:
    """Follows the bytes by name: each device block and each row remembers what it was given."""
    rng = random.Random(seed)
    scheduler = make(14, 6 * groups, 4, chunk, 4, groups)
    device: dict[int, int] = {}
    rows: dict[int, tuple[int, ...]] = {}
    for index in range(50):
        request = make_request(rng, index, 4)
        # Predict nothing: execute each step as the workers would, failing some loads.
        steps = scheduler.steps(request)
        chunks = next(steps, None)
        while chunks is not None:
            loading = [c for c in chunks if c.loads]
            agreed = rng.randrange(len(loading) + 1) if rng.random() < 0.3 else len(loading)
            missed = {c.key for c in loading[agreed:]}
            for work in chunks:
                for place, (action, block) in enumerate(
                    zip(work.actions, work.block_ids, strict=True)
                ):
                    if action == LOAD and work.key not in missed:
                        for row in work.rows:
                            assert rows[row][place] == work.hashes[place]
                        device[int(block)] = int(work.hashes[place])
                    elif action in (FILL, LOAD):
                        device[int(block)] = int(work.hashes[place])
                if work.store:
                    for row in work.rows:
                        rows[row] = tuple(device[int(block)] for block in work.block_ids)
                        assert rows[row] == tuple(work.hashes)
            try:
                chunks = steps.send(agreed)
            except StopIteration:
                break
        cache = scheduler._device
        for block_hash, block in cache._by_hash.items():
            assert device[block] == int.from_bytes(block_hash[:8], "little", signed=True)
        assert len(cache._free) == cache.blocks


def test_a_chunk_that_one_rank_could_not_load_counts_as_a_miss_and_is_stored_again_later() -> None:
    scheduler = make(8, 8, 4, 2, 4, 1)
    first = Request(0, 0.0, 17, 0, chain([1, 1, 1, 1]))
    other = Request(1, 1.0, 32, 0, chain([0] * 8))
    serve(scheduler, first)
    serve(scheduler, other)  # pushes the first one off the device
    serve(scheduler, first, agree=lambda loads: 0)
    assert scheduler.stats.hit_tokens_shm == 0
    assert scheduler._stack.counters.errors == 1
    serve(scheduler, other)
    stored = scheduler._stack.counters.stored
    serve(scheduler, first)
    assert scheduler._stack.counters.stored == stored + 1


def test_a_request_larger_than_the_device_cache_is_rejected_and_changes_nothing() -> None:
    scheduler = make(4, 4, 4, 2, 4, 1)
    assert serve(scheduler, Request(0, 0.0, 17, 0, chain([1, 1, 1, 1]))) == []
    assert scheduler.stats.rejected == 1
    assert scheduler.stats.prompt_tokens == 0
    assert scheduler._stack.index.rows_used == 0


def test_taking_more_blocks_than_are_free_is_refused() -> None:
    cache = DeviceCache(2)
    cache.take_free(1)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 free of 2"):
        cache.take_free(2)


def test_step_messages_carry_every_field_unchanged() -> None:
    from orchestrator.engine.step import StepCodec

    codec = StepCodec(3, 4, 2)
    rng = np.random.default_rng(0)
    chunks = [
        ChunkWork(
            key=rng.bytes(32),
            rows=(int(rng.integers(-1, 9)), int(rng.integers(-1, 9))),
            store=bool(rng.integers(2)),
            actions=rng.integers(0, 3, 4),
            block_ids=rng.integers(-1, 100, 4),
            hashes=rng.integers(-(2**63), 2**63 - 1, 4),
        )
        for _ in range(3)
    ]
    message = codec.empty()
    for count in (3, 1, 0):
        codec.encode(message, chunks[:count])
        decoded = codec.decode(message)
        assert decoded is not None
        assert len(decoded) == count
        for found, meant in zip(decoded, chunks[:count], strict=True):
            assert (found.key, found.rows, found.store) == (meant.key, meant.rows, meant.store)
            assert (found.actions == meant.actions).all()
            assert (found.block_ids == meant.block_ids).all()
            assert (found.hashes == meant.hashes).all()
