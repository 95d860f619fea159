"""Routers: pure, deterministic, and doing what each policy says."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.mooncake import MooncakeReader
from orchestrator.workload.request import Request
from orchestrator.workload.router import POLICIES, Router


def request(
    text: str = "", prompt: int = 100, output: int = 0, at_s: float = 0.0, index: int = 0
) -> Request:
    """A request whose hashes are those of the prefixes of `text`, a letter a unit."""
    hashes = tuple(
        blake2b(text[: end + 1].encode(), digest_size=32).digest() for end in range(len(text))
    )
    return Request(index, at_s, prompt, output, hashes)


def affinity(replicas: int = 2, **options: Any) -> Router:
    options = {"tokens_per_s": 1.0, "max_imbalance": 1e9, **options}
    return Router("prefix_affinity", replicas, **options)


def test_round_robin_takes_turns() -> None:
    router = Router("round_robin", 3)
    assert [router.route(request(index=7 * n)) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_counts_prompt_and_output() -> None:
    router = Router("least_loaded", 2)
    assert router.route(request(prompt=100, output=50)) == 0
    assert router.route(request(prompt=120)) == 1
    assert router.route(request(prompt=100)) == 1
    assert router.loads == (150.0, 220.0)


def test_equal_loads_go_to_the_lowest_index() -> None:
    router = Router("least_loaded", 4)
    assert [router.route(request()) for _ in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_idle_replicas_take_turns_by_the_work_they_were_sent() -> None:
    router = Router("least_loaded", 3, tokens_per_s=1000)
    sizes = (300, 200, 100, 150, 90, 60)
    taken = [router.route(request(prompt=p, at_s=10.0 * n)) for n, p in enumerate(sizes)]
    # Sent before each, all idle: 0 0 0, 300 0 0, 300 200 0, 300 200 100, 300 200 250, 300 290 250.
    assert taken == [0, 1, 2, 2, 1, 2]


def test_load_drains_in_the_time_of_the_stream_and_not_below_zero() -> None:
    router = Router("least_loaded", 2, tokens_per_s=100)
    router.route(request(prompt=1000))
    router.route(request(prompt=200))
    assert router.route(request(prompt=10, at_s=5.0)) == 1
    assert router.loads == (500.0, 10.0)
    assert router.route(request(prompt=10, at_s=60.0)) == 1
    assert router.loads == (0.0, 10.0)


def test_affinity_follows_the_longest_prefix() -> None:
    router = affinity(3)
    assert router.route(request("abc")) == 0
    assert router.route(request("xyz")) == 1
    assert router.route(request("xyq")) == 1
    assert router.route(request("abcd")) == 0
    assert router.route(request("abcd")) == 0
    assert router.route(request("new")) == 2


def test_affinity_prefers_the_deeper_of_two_holders() -> None:
    router = affinity(2, max_imbalance=1.0)
    assert router.route(request("a", prompt=100)) == 0
    assert router.route(request("abc", prompt=10)) == 1  # replica 0 is above the mean
    assert router.route(request("abd", prompt=10)) == 1  # "ab" is only on 1
    assert router.loads == (100.0, 20.0)


def test_among_equal_holders_the_least_loaded_takes_it() -> None:
    router = affinity(3, max_imbalance=1.0)
    assert [router.route(request("sys" + c, prompt=p)) for c, p in (("a", 30), ("b", 20))] == [0, 1]
    assert router.route(request("sysc", prompt=5)) == 2
    router = affinity(3)
    router.route(request("sys"))
    assert router.route(request("sys", prompt=1)) == 0


def test_overloaded_holder_is_passed_over() -> None:
    router = affinity(2, max_imbalance=1.5)
    assert router.route(request("abc", prompt=100)) == 0
    # The load of 0 is 100, the mean 50: 100 > 1.5 x 50.
    assert router.route(request("abcd", prompt=40)) == 1
    # 100 and 40: the mean is 70, and 100 is not above 105. Both hold "abc", so the lighter.
    assert router.route(request("abc", prompt=1)) == 1
    # "abcd" is on 1 only; make 1 the heavier one, but not beyond the limit: 100 and 141.
    assert router.route(request("abcd", prompt=100)) == 1
    assert router.route(request("abcd", prompt=1)) == 1
    # 100 and 242 is: the mean is 171, and 242 is not above 256; 100 more and it is above.
    assert router.route(request("abcd", prompt=200)) == 1
    assert router.loads == (100.0, 342.0)
    assert router.route(request("abcd", prompt=1)) == 0


def test_prefixes_are_seen_at_the_stride() -> None:
    router = affinity(2, stride=3)
    assert router.route(request("aaabbb")) == 0
    assert router.index_size == 2
    assert router.route(request("aab", prompt=300)) == 1  # differs within the first stride
    assert router.route(request("aaaccc")) == 0
    assert router.route(request("aa")) == 0  # too short to be known; the least loaded


def test_index_is_bounded_and_forgets_extensions_before_prefixes() -> None:
    router = affinity(2, index_entries=3)
    assert router.route(request("abcde", prompt=10)) == 0
    assert router.index_size == 3
    assert router.route(request("abq", prompt=10)) == 0
    assert router.route(request("xyz", prompt=10)) == 1
    assert router.index_size == 3
    assert router.route(request("abc", prompt=1)) == 1  # forgotten: the least loaded


def test_only_affinity_needs_hashes() -> None:
    assert [p for p in POLICIES if Router(p, 2).needs_hashes] == ["prefix_affinity"]


streams = st.lists(
    st.tuples(st.text("ab", max_size=6), st.integers(1, 50), st.integers(0, 50), st.integers(0, 3)),
    max_size=40,
)


def as_requests(stream: list[tuple[str, int, int, int]]) -> list[Request]:
    at_s, made = 0.0, []
    for index, (text, prompt, output, gap_s) in enumerate(stream):
        at_s += gap_s
        made.append(request(text, prompt, output, at_s, index))
    return made


def plain_affinity(
    requests: list[Request], replicas: int, rate: float, imbalance: float
) -> list[int]:
    """The policy once more, word by word and with no bound."""
    chosen: list[int] = []
    sent: list[set[bytes]] = [set() for _ in range(replicas)]
    loads, totals = [0.0] * replicas, [0] * replicas
    for earlier, now in pairwise([None, *requests]):
        assert now is not None
        waited = now.arrival_s - (earlier.arrival_s if earlier else 0.0)
        loads = [max(0.0, load - waited * rate) for load in loads]
        depth = []
        for known in sent:
            unknown = [i for i, h in enumerate(now.hashes) if h not in known]
            depth.append(unknown[0] if unknown else len(now.hashes))
        order = sorted(range(replicas), key=lambda r: (loads[r], totals[r], r))
        pick = min(order, key=lambda r: (-depth[r], order.index(r))) if max(depth) else order[0]
        if loads[pick] > imbalance * sum(loads) / replicas:
            pick = order[0]
        sent[pick].update(now.hashes)
        loads[pick] += now.prompt_tokens + now.output_tokens
        totals[pick] += now.prompt_tokens + now.output_tokens
        chosen.append(pick)
    return chosen


@settings(max_examples=300, deadline=None)
@given(
    stream=streams,
    replicas=st.integers(1, 5),
    rate=st.sampled_from([1, 8, 64]),
    imbalance=st.sampled_from([1.0, 1.25, 2.0]),
)
def test_affinity_is_what_its_plain_reading_says(
    stream: list[tuple[str, int, int, int]], replicas: int, rate: int, imbalance: float
) -> None:
    requests = as_requests(stream)
    router = Router("prefix_affinity", replicas, tokens_per_s=rate, max_imbalance=imbalance)
    assert [router.route(r) for r in requests] == plain_affinity(
        requests, replicas, rate, imbalance
    )


@settings(max_examples=100, deadline=None)
@given(
    stream=streams,
    replicas=st.integers(1, 5),
    policy=st.sampled_from(POLICIES),
    entries=st.integers(1, 8),
)
def test_every_leader_comes_to_the_same_decisions(
    stream: list[tuple[str, int, int, int]], replicas: int, policy: str, entries: int
) -> None:
    requests = as_requests(stream)
    one, other = (Router(policy, replicas, index_entries=entries) for _ in range(2))
    decisions = [one.route(r) for r in requests]
    assert decisions == [other.route(r) for r in requests]
    assert all(0 <= replica < replicas for replica in decisions)
    assert one.index_size <= entries


def test_affinity_finds_more_of_the_published_trace_than_round_robin(trace_path: str) -> None:
    def hits(policy: str) -> tuple[int, list[int]]:
        router = Router(policy, 4)
        caches: list[set[bytes]] = [set() for _ in range(4)]
        tokens = [0] * 4
        found = 0
        for request in MooncakeReader(trace_path, tokens_per_hash=512, requests=4000):
            replica = router.route(request)
            known = caches[replica]
            unknown = (i for i, h in enumerate(request.hashes) if h not in known)
            found += next(unknown, len(request.hashes))
            known.update(request.hashes)
            tokens[replica] += request.prompt_tokens + request.output_tokens
        return found, tokens

    blind, _ = hits("round_robin")
    guided, tokens = hits("prefix_affinity")
    assert guided > 1.2 * blind
    assert max(tokens) < 1.5 * sum(tokens) / 4


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "random"},
        {"replicas": 0},
        {"stride": 0},
        {"index_entries": 0},
        {"tokens_per_s": 0.0},
        {"tokens_per_s": float("nan")},
        {"max_imbalance": 0.5},
        {"max_imbalance": float("inf")},
    ],
)
def test_parameters_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        Router(**{"policy": "round_robin", "replicas": 2, **options})
