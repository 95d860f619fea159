"""The generator: the same for ever, and shaped like conversations."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections import Counter
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.multi_turn import (
    LONGEST_TIMES_MEAN,
    Conversations,
    MultiTurnGenerator,
)
from orchestrator.workload.request import Request

UNIT = 16


def generator(
    seed: int = 0,
    requests: int | None = None,
    tokens_per_hash: int = UNIT,
    salt: str = "",
    **shape: Any,
) -> MultiTurnGenerator:
    return MultiTurnGenerator(
        Conversations(**shape),
        seed=seed,
        requests=requests,
        tokens_per_hash=tokens_per_hash,
        salt=salt,
    )


def digest(requests: list[Request]) -> str:
    whole = blake2b(digest_size=16)
    for r in requests:
        whole.update(struct.pack("<QdQQ", r.index, r.arrival_s, r.prompt_tokens, r.output_tokens))
        whole.update(b"".join(r.hashes))
    return whole.hexdigest()


def threads(requests: list[Request]) -> list[list[Request]]:
    """The requests of each conversation, told apart by what the later ones extend."""
    found: list[list[Request]] = []
    latest: dict[tuple[int, bytes], list[Request]] = {}
    for request in requests:
        for units in range(request.prompt_tokens // UNIT, 0, -1):
            thread = latest.get((units, request.hashes[units - 1]))
            if thread is not None:
                break
        else:
            thread = []
            found.append(thread)
        thread.append(request)
        latest[len(request.hashes), request.hashes[-1]] = thread
    return found


def test_stream_stays_what_it_is() -> None:
    assert digest(list(generator(seed=7, conversations=12))) == "ef1eff0012a96864d8c5dadf35c4c10e"


def test_stream_does_not_depend_on_the_process() -> None:
    probe = (
        "from tests.orchestrator.test_workload_multi_turn import digest, generator\n"
        "print(digest(list(generator(seed=3, conversations=5))))"
    )
    for hash_seed in ("0", "1"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        out = subprocess.run(
            [sys.executable, "-c", probe],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert out.stdout.strip() == digest(list(generator(seed=3, conversations=5)))


def test_stream_can_be_read_again() -> None:
    stream = generator()
    assert list(stream) == list(stream)


def test_seed_and_salt_change_every_hash() -> None:
    def hashes(**options: Any) -> set[bytes]:
        return {h for request in generator(**options) for h in request.hashes}

    base = hashes()
    assert not base & hashes(seed=1)
    assert not base & hashes(salt="tenant")


def test_hashes_cover_prompt_and_output() -> None:
    for request in generator():
        assert len(request.hashes) == (request.prompt_tokens + request.output_tokens) // UNIT
        assert {len(h) for h in request.hashes} == {32}


def test_a_turn_extends_all_of_the_one_before() -> None:
    found = threads(list(generator(system_prompts=0, conversations=20)))
    assert len(found) == 20
    assert sum(len(thread) - 1 for thread in found) > 20
    for thread in found:
        for earlier, later in pairwise(thread):
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert later.hashes[: len(earlier.hashes)] == earlier.hashes
            assert later.arrival_s >= earlier.arrival_s


def test_conversations_share_their_system_prompt_and_nothing_else() -> None:
    requests = list(
        generator(conversations=200, turns=1, system_prompts=3, system_prompt_tokens=256)
    )
    users_of = Counter(h for request in requests for h in request.hashes)
    first_hash = Counter(request.hashes[0] for request in requests)
    assert len(first_hash) == 3
    for request in requests:
        shared = [h for h in request.hashes if users_of[h] > 1]
        assert request.hashes[: len(shared)] == tuple(shared)
        assert 128 - UNIT < len(shared) * UNIT <= 384
        assert {users_of[h] for h in shared} == {first_hash[request.hashes[0]]}


def test_popular_system_prompts_are_used_as_zipf_says() -> None:
    requests = generator(conversations=6000, turns=1, system_prompts=3, user_tokens=16)
    counts = sorted(Counter(r.hashes[0] for r in requests).values(), reverse=True)
    # 1 : 1/2 : 1/3 of 6000; four standard deviations are about 155.
    for found, expected in zip(counts, [3273, 1636, 1091], strict=True):
        assert abs(found - expected) < 155


def test_lengths_have_the_means_that_were_asked_for() -> None:
    requests = list(
        generator(conversations=4000, turns=1, system_prompts=0, user_tokens=200, output_tokens=80)
    )
    for mean, lengths in (
        (200, [r.prompt_tokens for r in requests]),
        (80, [r.output_tokens for r in requests]),
    ):
        # The deviation of a log-normal with sigma 0.6 is 0.66 of its mean; here of a mean of 4000.
        assert abs(sum(lengths) / len(lengths) / mean - 1) < 4 * 0.66 / 4000**0.5
        assert min(lengths) >= 1
        assert max(lengths) <= LONGEST_TIMES_MEAN * mean
        assert len(set(lengths)) > 50


@pytest.mark.parametrize("turns", [1, 2.5, 6])
def test_conversations_have_the_turns_that_were_asked_for(turns: float) -> None:
    count = generator(conversations=2000, turns=turns).count()
    # The deviation of a geometric is below its mean; of 2000 of them below mean / 44.
    assert abs(count / 2000 - turns) <= 4 * turns / 44 * (turns > 1)


def test_arrivals_are_in_order_and_conversations_interleave() -> None:
    requests = list(generator(system_prompts=0, conversations=20))
    assert [r.index for r in requests] == list(range(len(requests)))
    assert requests[0].arrival_s == 0
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    spans = [(t[0].index, t[-1].index, len(t)) for t in threads(requests)]
    assert sum(last - first + 1 > length for first, last, length in spans) > 5


def test_rates_set_the_time_scale() -> None:
    slow = list(generator(conversations=50, turns=1, conversations_per_s=1.0))
    fast = list(generator(conversations=50, turns=1, conversations_per_s=10.0))
    assert slow[-1].arrival_s == pytest.approx(10 * fast[-1].arrival_s, rel=1e-4)
    assert 20 < slow[-1].arrival_s < 100
    at_once = list(generator(conversations=1, turns=8, think_s=0, seed=4))
    assert {r.arrival_s for r in at_once} == {0.0}


def test_a_limit_cuts_the_stream_and_changes_nothing_before_the_cut() -> None:
    whole = list(generator())
    assert list(generator(requests=10)) == whole[:10]
    assert list(generator(requests=len(whole))) == whole


def test_more_requests_than_the_conversations_hold_bring_new_conversations() -> None:
    whole = list(generator(conversations=4))
    more = list(generator(conversations=4, requests=3 * len(whole)))
    assert len(more) == 3 * len(whole)
    assert more[: len(whole)] == whole
    arrivals = [r.arrival_s for r in more]
    assert arrivals == sorted(arrivals)


def test_conversations_may_be_as_many_as_the_limit_needs() -> None:
    assert len(list(generator(conversations=None, requests=300))) == 300


def test_count_is_the_length_of_the_stream() -> None:
    for options in ({}, {"seed": 5}, {"requests": 7}, {"max_sequence_tokens": 2000}):
        assert generator(**options).count() == len(list(generator(**options)))


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(2, 600),
    system_prompts=st.integers(0, 2),
    tokens=st.integers(1, 300),
    seed=st.integers(0, 2**63),
)
def test_no_sequence_is_longer_than_its_limit(
    limit: int, system_prompts: int, tokens: int, seed: int
) -> None:
    shape = {
        "conversations": 5,
        "system_prompts": system_prompts,
        "system_prompt_tokens": tokens,
        "max_sequence_tokens": limit,
    }
    if system_prompts and limit < tokens + tokens // 2 + 2:
        with pytest.raises(WorkloadError, match="max_sequence_tokens is"):
            generator(**shape)
        return
    requests = list(generator(seed, **shape))
    assert len(requests) >= 5
    for request in requests:
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert request.prompt_tokens + request.output_tokens <= limit


def test_select_gives_the_same_hashes_as_the_whole_stream() -> None:
    wanted = list(generator().select(lambda r: r.index % 3 == 1))
    assert wanted == [r for r in generator() if r.index % 3 == 1]


@settings(max_examples=30, deadline=None)
@given(unit=st.integers(1, 700), seed=st.integers(-5, 5))
def test_any_unit_of_hashing_works(unit: int, seed: int) -> None:
    requests = list(generator(seed, tokens_per_hash=unit, conversations=3))
    for request in requests:
        assert len(request.hashes) == (request.prompt_tokens + request.output_tokens) // unit
    lengths = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests]
    assert lengths == [
        (r.arrival_s, r.prompt_tokens, r.output_tokens) for r in generator(seed, conversations=3)
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversations", 0),
        ("turns", 0.5),
        ("turns", float("nan")),
        ("turns", float("inf")),
        ("system_prompts", -1),
        ("system_prompt_tokens", 0),
        ("user_tokens", 0),
        ("output_tokens", -4),
        ("conversations_per_s", 0),
        ("think_s", -1),
        ("max_sequence_tokens", 1),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_field(field: str, value: float) -> None:
    assert [name for name, _ in Conversations(**{field: value}).problems()] == [field]
    with pytest.raises(WorkloadError, match=f"{field} is {value}"):
        generator(**{field: value})


def test_a_stream_without_end_is_refused() -> None:
    with pytest.raises(WorkloadError, match="both None"):
        generator(conversations=None)
