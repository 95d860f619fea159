"""What each policy is for: the one thing that tells it from the others."""

from __future__ import annotations

import hashlib
import random
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import ConfigError
from backends.policy.admission import ADMISSIONS, open_admission
from backends.policy.base import EvictionPolicy
from backends.policy.prefix_cost import PrefixCost
from backends.policy.registry import PolicyRegistry
from backends.policy.returns import BINS, EDGES_S, Returns
from backends.policy.sketch import FrequencySketch
from backends.testing.policies import sequence


def opened(name: str, capacity: int) -> EvictionPolicy:
    return PolicyRegistry([]).open(name, capacity)


def singles(count: int, first: int = 0) -> list[bytes]:
    return [sequence([number])[0] for number in range(first, first + count)]


def test_lru_lets_go_in_the_order_of_use() -> None:
    policy = opened("lru", 8)
    one, two, three = sequence([1, 1, 1]), sequence([2, 2]), sequence([3])
    for now_s, keys in enumerate((one, two, three)):
        policy.insert(keys, now_s)
    policy.touch(one[:2], 9.0)
    assert policy.victims(6) == [one[2], two[1], two[0], three[0], one[1], one[0]]


@pytest.mark.parametrize("name", ["arc", "s3fifo", "tinylfu"])
def test_one_pass_over_many_keys_does_not_wash_out_what_is_used_often(name: str) -> None:
    policy, lru = opened(name, 20), opened("lru", 20)
    often = singles(10)
    for each in (policy, lru):
        for key in often:
            each.insert([key], 0.0)
        for _ in range(3):
            for key in often:
                each.touch([key], 1.0)
        for key in singles(100, 1000):
            if len(each) == 20:
                each.victims(1)
            each.insert([key], 2.0)
    assert not any(key in lru for key in often)
    assert sum(key in policy for key in often) >= 8


def test_sieve_spares_what_was_used_since_the_hand_came_by() -> None:
    policy = opened("sieve", 4)
    keys = singles(4)
    for key in keys:
        policy.insert([key], 0.0)
    policy.touch([keys[0]], 1.0)
    policy.touch([keys[2]], 1.0)
    assert policy.victims(2) == [keys[1], keys[3]]
    assert policy.victims(2) == [keys[0], keys[2]]


def test_arc_gives_room_to_the_half_whose_lost_keys_are_asked_for() -> None:
    policy = opened("arc", 4)
    once, often = singles(2), singles(2, 10)
    for key in (*often, *once):
        policy.insert([key], 0.0)
    policy.touch([often[0]], 1.0)
    policy.touch([often[1]], 1.0)
    gone = policy.victims(1)
    assert gone == [once[0]]
    policy.insert(gone, 2.0)  # missed soon after it went: what is used once has too little room
    assert policy.victims(1) == [often[0]]


class Conversations:
    """Turns by the minute: those that begin with an even word come back, the others never do."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.present: set[bytes] = set()

    def request(self, keys: list[bytes], now_s: float) -> int:
        policy, present = self.policy, self.present
        hits = next((n for n, key in enumerate(keys) if key not in present), len(keys))
        policy.touch(keys[:hits], now_s)
        missing, parent = keys[hits:], keys[hits - 1] if hits else None
        room = policy.capacity - len(present)
        if len(missing) > room:
            missing = missing[: policy.admit(missing, room, now_s, hits, parent)]
            present.difference_update(policy.victims(len(missing) - room, set(keys[:hits])))
        if missing:
            policy.insert(missing, now_s, hits, parent)
        present.update(missing)
        return hits

    def play(self, seconds: int) -> int:
        """A conversation begins each second; half of them, those with short prompts, go on a
        minute later."""
        hits = 0
        for second in range(seconds):
            length = 3 if second % 2 else 12
            self.request(sequence([second] * length), float(second))
            before = second - 60
            if before >= 0 and before % 2:
                hits += self.request(sequence([before] * 3 + [1]), second + 0.5)
        return hits


def test_prefix_cost_learns_what_comes_back_and_keeps_that() -> None:
    hits = Conversations(PrefixCost(200)).play(3000)
    by_recency = Conversations(opened("lru", 200)).play(3000)
    assert by_recency == 0, "the case is to be one where recency is of no use"
    possible = 3 * (3000 - 60) // 2
    assert hits > 0.8 * possible


def test_prefix_cost_is_as_good_as_recency_before_it_has_learned() -> None:
    policy = PrefixCost(8)
    for now_s in range(8):
        policy.insert(singles(1, now_s), 10.0 * now_s)
    policy.touch(singles(1), 90.0)
    assert policy.victims(3) == singles(3, 1)


def test_prefix_cost_remembers_a_bounded_number_of_requests() -> None:
    policy = PrefixCost(16)
    talk = Conversations(policy)
    rng = random.Random(1)
    for second in range(2000):
        talk.request(sequence([second] * rng.randint(1, 9)), float(second))
    assert len(policy) <= 16
    assert sum(len(ages) for ages in policy._ages) <= 6 * 16
    assert len(policy._marks) <= 6 * 16 * 10


def test_returns_rank_what_comes_back_above_what_does_not() -> None:
    returns = Returns(2, 1)
    for _ in range(500):
        for kind in (0, 1):
            for at in range(10):
                returns.reach(kind, at)
        returns.come_back(0, 9)
    good, bad = returns.indices()
    assert all(good[at] > 3 * bad[at] for at in range(10))
    assert max(good) == good[9], "the index is greatest just before they come back"
    assert len(good) == len(EDGES_S) == BINS


@given(st.lists(st.integers(0, 40), max_size=900), st.integers(1, 30))
@settings(max_examples=40)
def test_both_ways_to_count_sights_count_the_same(numbers: list[int], expected: int) -> None:
    """Across halvings, however the sights are divided into calls."""
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(41)]
    ours, plain = (FrequencySketch(expected, compiled=compiled) for compiled in (True, False))
    for start in range(0, len(numbers), 130):
        seen = [keys[number] for number in numbers[start : start + 130]]
        ours.add(seen)
        for key in seen:
            plain.add((key,))
        assert list(map(ours.count, keys)) == list(map(plain.count, keys))


def test_a_machine_with_a_compiler_counts_sights_with_compiled_code() -> None:
    assert find_spec("backends.policy._sketch"), "python setup.py build_ext --inplace builds it"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sketch_refuses_what_is_no_digest(compiled: bool) -> None:
    sketch, digest = FrequencySketch(8, compiled=compiled), bytes(16)
    for ask in (lambda: sketch.add([digest, bytes(15)]), lambda: sketch.count(bytes(15))):
        with pytest.raises(ConfigError, match="a key of 15 bytes"):
            ask()
    assert sketch.count(digest) == 0


def test_the_sketch_counts_and_forgets_by_halves() -> None:
    sketch = FrequencySketch(64)
    key, other = sequence([1, 2])
    sketch.add([key] * 6)
    assert sketch.count(key) == 6
    assert sketch.count(other) == 0
    sketch.add([other] * (10 * 64 - 6))
    assert sketch.count(key) == 3


def test_second_hit_admits_the_beginning_that_was_asked_for_before() -> None:
    admission = open_admission("second_hit", 8)
    keys = sequence([1, 2, 3])
    admission.seen(keys)
    assert admission.admit(keys) == 0
    admission.seen(keys[:2])
    assert admission.admit(keys) == 2


def test_tinylfu_admission_admits_all_until_something_goes() -> None:
    admission = open_admission("tinylfu", 8)
    rare, frequent = sequence([1]), sequence([2])
    admission.seen(rare)
    assert admission.admit(rare) == 1
    for _ in range(4):
        admission.seen(frequent)
    admission.gone(frequent * 100)
    assert admission.admit(rare) == 0
    for _ in range(5):
        admission.seen(rare)
    assert admission.admit(rare) == 1


def test_admission_by_name() -> None:
    assert {"all", "second_hit", "tinylfu"} == set(ADMISSIONS)
    assert open_admission("all", 1).admit(sequence([1, 2])) == 2
    with pytest.raises(ConfigError, match=r"no admission policy 'al'"):
        open_admission("al", 1)
    with pytest.raises(ConfigError, match="capacity 0"):
        open_admission("all", 0)
