"""The replay: hits counted as an engine would, Belady a bound, published figures met."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.policy.admission import open_admission
from backends.policy.registry import PolicyRegistry
from backends.testing.policies import sequence
from benchmarks.policies import read
from orchestrator.schema import SimulateConf
from orchestrator.simulate.access import Access, accesses, hash_tokens
from orchestrator.simulate.belady import Belady, Future
from orchestrator.simulate.check import check_simulation
from orchestrator.simulate.compare import Figure
from orchestrator.simulate.replay import replay
from orchestrator.simulate.run import predict
from orchestrator.simulate.study import replays, study
from orchestrator.simulate.timing import NO_TIME, TierTiming, Timing, Transfer
from orchestrator.workload.request import Request
from orchestrator.workload.spec import WorkloadSpec
from tests.kit import REPO, plan_for
from tests.orchestrator.harness import model_hit_tokens

TRACE = REPO.parent / "shared" / "traces" / "conversation_trace.jsonl"
CHUNK = 10


def access(words: Sequence[int], at_s: float = 0.0) -> Access:
    keys = tuple(sequence(words))
    return Access(at_s, len(keys) * CHUNK + 1, keys, len(keys))


def hits(requests: Sequence[Access], name: str, capacity: int) -> int:
    policy = (
        Belady(capacity, Future(requests))
        if name == "belady"
        else PolicyRegistry([]).open(name, capacity)
    )
    result = replay(requests, policy, open_admission("all", capacity), CHUNK)
    assert len(policy) <= capacity
    return result.total.hit_tokens // CHUNK


def test_a_hit_is_the_longest_run_of_first_chunks_that_are_there() -> None:
    requests = [access([1, 2, 3]), access([1, 2, 9]), access([4, 2, 3]), access([1, 2, 3, 4])]
    assert hits(requests, "lru", 100) == 0 + 2 + 0 + 3


def test_the_chunk_of_the_last_token_is_always_computed() -> None:
    request = Request(0, 0.0, 2 * CHUNK, 5, tuple(sequence([1, 2])))
    [found] = accesses([request], CHUNK, CHUNK)
    assert (len(found.keys), found.may_hit) == (2, 1)


def test_chunks_of_several_hashes_are_named_by_the_last() -> None:
    hashes = tuple(sequence(range(7)))
    [found] = accesses([Request(0, 0.0, 7 * CHUNK + 1, 0, hashes)], CHUNK, 3 * CHUNK)
    assert found.keys == (hashes[2], hashes[5])
    assert hash_tokens(WorkloadSpec(kind="trace"), 768) == 256


_REQUESTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(_REQUESTS, st.integers(2, 4))
def test_no_choice_of_victims_hits_more_than_belady(words: list[list[int]], capacity: int) -> None:
    requests = [access(each) for each in words]
    assert hits(requests, "belady", capacity) == most_hits(requests, capacity)


def most_hits(requests: Sequence[Access], capacity: int) -> int:
    """By trying everything: what may stay after each request is any set that keeps prefixes."""
    best = {frozenset[bytes](): 0}
    for request in requests:
        after: dict[frozenset[bytes], int] = {}
        for there, count in best.items():
            run = list(itertools.takewhile(there.__contains__, request.keys))
            total = count + len(run)
            everything = [*(there - set(request.keys)), *request.keys]
            for size in range(min(capacity, len(everything)) + 1):
                for kept in map(frozenset, itertools.combinations(everything, size)):
                    # What this request brought is in when the next one asks.
                    if kept >= set(request.keys[:capacity]):
                        after[kept] = max(after.get(kept, 0), total)
        best = after
    return max(best.values())


def test_a_study_has_a_row_a_policy_and_counts_its_replays() -> None:
    requests = [access([number % 7, 1, 2], float(number)) for number in range(50)]
    told: list[int] = []
    rows = list(
        study(
            requests, ["sieve", "lru"], [4, 9], "all", CHUNK, lambda what, done: told.append(done)
        )
    )
    assert [(row.capacity, row.policy) for row in rows] == [
        (capacity, name) for capacity in (4, 9) for name in ("lru", "sieve", "belady")
    ]
    assert told[-1] == 50 * replays(["sieve", "lru"], [4, 9], "all")
    assert told == sorted(told)
    for row in rows:
        found = row.to_dict()
        halves = (found["first_half"], found["second_half"])
        assert sum(half["hit_tokens"] for half in halves) == found["hit_tokens"]
        assert found["hit_tokens"] <= row.belady.total.hit_tokens


def test_mistakes_are_all_told() -> None:
    asked = SimulateConf(policies=["lru", "lrv", "lru"], capacities=[0, 5, 5])
    told = [str(problem) for problem in check_simulation(asked)]
    assert [line.split(":")[0] for line in told] == [
        "simulate.policies is 'lrv'",
        "simulate.policies is ['lru', 'lrv', 'lru']",
        "simulate.capacities is 0",
        "simulate.capacities is [0, 5, 5]",
    ]
    assert "did you mean 'lru'?" in told[0]


def test_parts_and_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    asked = SimulateConf(parts=["stak"], doctor=nowhere, compare=nowhere)
    told = [str(problem) for problem in check_simulation(asked)]
    assert [line.split(" is ")[0] for line in told] == [
        "simulate.parts",
        "simulate.doctor",
        "simulate.compare",
    ]
    assert "did you mean 'stack'?" in told[0]
    assert "action=doctor" in told[1]
    [empty] = check_simulation(SimulateConf(parts=[]))
    assert "simulate.parts" in str(empty)


@pytest.fixture(scope="module")
def trace() -> list[Access]:
    if not TRACE.is_file():
        pytest.skip(f"the published trace is not at {TRACE}")
    return read(str(TRACE), partial=True)


@pytest.mark.parametrize(
    ("name", "capacity", "share", "within"),
    [
        ("lru", 1000, 0.045, 0.001),
        ("lru", 3000, 0.067, 0.001),
        ("lru", 10_000, 0.216, 0.001),
        ("lru", 30_000, 0.332, 0.001),
        ("belady", 1000, 0.183, 0.001),
        ("belady", 3000, 0.296, 0.002),
        ("s3fifo", 3000, 0.093, 0.006),  # extensions before prefixes: a little better
    ],
)
def test_the_published_trace_gives_the_known_figures(
    trace: list[Access], name: str, capacity: int, share: float, within: float
) -> None:
    policy = (
        Belady(capacity, Future(trace))
        if name == "belady"
        else PolicyRegistry([]).open(name, capacity)
    )
    result = replay(trace, policy, open_admission("all", capacity), 512)
    assert result.total.share == pytest.approx(share, abs=within)


def test_prefix_cost_closes_a_quarter_of_the_gap_where_the_cache_is_small() -> None:
    if not TRACE.is_file():
        pytest.skip(f"the published trace is not at {TRACE}")
    requests = read(str(TRACE), partial=False)
    for row in study(requests, ["prefix_cost"], [1000, 3000], "all", 512):
        if row.policy == "prefix_cost":
            found = row.to_dict()
            assert found["gap_closed"] >= 0.25
            assert found["first_half"]["gap_closed"] > 0.2
            assert found["second_half"]["gap_closed"] > 0.2


@pytest.mark.parametrize("layout", ["parallel=dp1_tp1", "parallel=dp2_tp2"])
def test_region_hits_are_those_of_an_independent_model(layout: str, tmp_path: Path) -> None:
    sizes = ("region.size=2MiB", "engine.device_cache_size=640KiB")
    plan = plan_for(tmp_path, "profile=ci", layout, *sizes)
    found = predict(plan, NO_TIME)
    for replica in found["replicas"]:
        index = replica["data_parallel_index"]
        assert replica["hit_tokens"] == model_hit_tokens(plan, index)
    assert found["tiers"]["shm"]["evictions"] > 0
    assert found["hit_tokens"]["shm"] > 0


def test_a_prediction_does_not_depend_on_whether_the_run_is_in_lockstep(tmp_path: Path) -> None:
    tiers = ("tiers=shm_fs", "region.size=1536KiB", "tiers.stack.fs.capacity=4MiB")
    one = predict(plan_for(tmp_path, "profile=ci", *tiers), NO_TIME)
    two = predict(plan_for(tmp_path, "profile=ci", *tiers, "engine.lockstep=true"), NO_TIME)
    assert one["hit_tokens"] == two["hit_tokens"]
    assert one["hit_tokens"]["fs"] > 0
    assert one["tiers"]["fs"]["evictions"] > 0


def test_slow_tiers_cost_time_and_nothing_else(tmp_path: Path) -> None:
    tiers = ("tiers=shm_fs", "region.size=1536KiB", "tiers.stack.fs.capacity=64MiB")
    plan = plan_for(tmp_path, "profile=ci", *tiers, "engine.lockstep=true")
    load = Transfer(first_s=0.004, block_s=0.001)
    slow = Timing({"fs": TierTiming(load=load)}, Transfer(0.0001, 0.00005), chunk_bytes=4096)
    found, free = predict(plan, slow), predict(plan, NO_TIME)
    assert found["hit_tokens"] == free["hit_tokens"]
    assert found["ttft"]["load_s"] > free["ttft"]["load_s"] == 0.0
    assert found["ttft"]["saved_s"] < free["ttft"]["saved_s"]
    tier = found["tiers"]["fs"]
    assert tier["load_latency_s"]["mean"] >= 0.004
    assert tier["load_bytes_per_s"] <= plan.region.row_bytes / load.block_s
    assert found["tiers"]["shm"]["load_latency_s"]["mean"] >= 0.0001


def test_an_error_is_of_what_was_measured_and_nothing_beside_nothing_is_right() -> None:
    figures = [
        Figure("a", "bytes", 101, 100, 0.02),
        Figure("b", "bytes", 103, 100, 0.02),
        Figure("c", "tokens", 0, 0, 0.0),
        Figure("d", "tokens", 5, 0, 0.0),
        Figure("e", "s", None, 0.1, 0.2),
    ]
    assert [each.met for each in figures] == [True, False, True, False, False]
    assert [each.error for each in figures] == [
        pytest.approx(0.01),
        pytest.approx(0.03),
        0.0,
        None,
        None,
    ]


def test_simulate_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "launch.py", "action=simulate", "simulate.capacities=[20,40]"),
        *("simulate.policies=[prefix_cost]", f"hydra.run.dir={tmp_path}"),
        "workload.conversations=40",
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "simulate.json").read_text())
    stack = found["stack"]
    assert stack["requests"] + stack["rejected"] == found["requests"]
    assert sum(stack["hit_tokens"].values()) > 0
    assert set(stack["tiers"]) == {"shm"}
    assert "prompt tokens" in done.stdout
    assert [(row["capacity"], row["policy"]) for row in found["results"]] == [
        (capacity, name) for capacity in (20, 40) for name in ("lru", "prefix_cost", "belady")
    ]
    assert all(name in done.stdout for name in ("prefix_cost", "belady", "gap to Belady"))
    assert (
        found["requests"]
        == found["results"][0]["first_half"]["requests"]
        + (found["results"][0]["second_half"]["requests"])
    )
