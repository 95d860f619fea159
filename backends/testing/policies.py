"""What every eviction policy must do, ours or a user's: subclass PolicyConformance in a test.

    class TestClock(PolicyConformance):
        def open(self, capacity: int) -> EvictionPolicy:
            return Clock(capacity)

It says nothing of quality: `python launch.py action=simulate` measures that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from backends.errors import ConfigError
from backends.policy.base import EvictionPolicy

CAPACITY = 24
_LONGEST = 9


def sequence(words: Iterable[int]) -> list[bytes]:
    """A key for each word, which stands for all words up to it."""
    keys: list[bytes] = []
    parent = b""
    for word in words:
        parent = blake2b(parent + word.to_bytes(4, "little"), digest_size=16).digest()
        keys.append(parent)
    return keys


class PolicyConformance(ABC):
    """The contract of `backends.policy.base`, one test a sentence, and at random."""

    @abstractmethod
    def open(self, capacity: int) -> EvictionPolicy:
        """A new policy."""

    def filled(self, *runs: Sequence[bytes], capacity: int = CAPACITY) -> EvictionPolicy:
        policy = self.open(capacity)
        for number, keys in enumerate(runs):
            policy.touch([], float(number))
            policy.insert(keys, float(number))
        return policy

    def test_an_entry_is_there_from_insert_to_victim(self) -> None:
        first, second = sequence([1, 2, 3]), sequence([4, 5])
        policy = self.filled(first, second)
        assert len(policy) == 5
        assert all(key in policy for key in first + second)
        gone = policy.victims(2)
        assert len(gone) == len(set(gone)) == 2
        assert len(policy) == 3
        assert not any(key in policy for key in gone)

    def test_more_victims_than_entries_are_all_entries_once(self) -> None:
        keys = sequence(range(7))
        policy = self.filled(keys)
        assert policy.victims(100) == keys[::-1]
        assert len(policy) == 0
        assert policy.victims(1) == []

    def test_an_extension_that_came_in_later_goes_before_its_prefix(self) -> None:
        keys = sequence(range(9))
        policy = self.filled(keys[:3])
        policy.insert(keys[3:6], 5.0, 3, keys[2])
        policy.touch(keys[:6], 9.0)
        policy.insert(keys[6:], 9.0, 6, keys[5])
        assert policy.victims(9) == keys[::-1]

    def test_both_branches_go_before_the_prefix_that_they_share(self) -> None:
        one, other = sequence([1, 2, 3, 4]), sequence([1, 2, 7, 8])
        policy = self.filled(one)
        policy.touch(one[:2], 1.0)
        policy.insert(other[2:], 1.0, 2, other[1])
        gone = policy.victims(6)
        assert set(gone[:4]) == {*one[2:], *other[2:]}
        assert gone[4:] == [one[1], one[0]]

    def test_what_is_held_stays_with_its_prefix(self) -> None:
        keys = sequence(range(6))
        policy = self.filled(keys)
        assert policy.victims(6, {keys[3]}) == [keys[5], keys[4]]
        assert policy.victims(6, set(keys)) == []
        assert policy.victims(6) == keys[3::-1]

    def test_no_keys_change_nothing(self) -> None:
        policy = self.filled(sequence([1]))
        policy.insert([], 1.0)
        policy.touch([], 1.0)
        policy.remove([])
        assert policy.victims(0) == []
        assert len(policy) == 1

    def test_unknown_keys_are_passed_over(self) -> None:
        keys = sequence([1, 2])
        policy = self.filled(keys)
        policy.touch(sequence([9]), 1.0)
        policy.remove(sequence([9]))
        policy.touch(sequence([1, 2, 3]), 1.0)
        assert len(policy) == 2

    def test_a_removed_entry_may_come_back(self) -> None:
        keys = sequence([1, 2, 3])
        policy = self.filled(keys)
        policy.remove([keys[1]])
        assert len(policy) == 2
        assert keys[1] not in policy
        policy.insert([keys[1]], 3.0, 1, keys[0])
        assert sorted(policy.victims(3)) == sorted(keys)

    def test_a_capacity_below_one_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="capacity 0"):
            self.open(0)

    def test_a_prefix_that_comes_back_is_again_before_its_extensions(self) -> None:
        keys = sequence([1, 2, 3])
        policy = self.filled(keys)
        policy.remove([keys[0]])
        policy.insert([keys[0]], 3.0)
        assert policy.victims(3) == keys[::-1]

    def test_it_holds_for_any_use(self) -> None:
        class Machine(_Machine):
            make = staticmethod(self.open)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=60,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


_WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=_LONGEST)


class _Machine(RuleBasedStateMachine):
    """Two policies that are told the same, and a set of keys with their parents."""

    make: Callable[[int], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.twin = self.make(CAPACITY), self.make(CAPACITY)
        self.present: dict[bytes, bytes | None] = {}
        self.held: set[bytes] = set()
        self.now_s = 0.0

    @rule(words=_WORDS, passed_s=st.floats(0, 500), piece=st.integers(1, _LONGEST))
    def request(self, words: list[int], passed_s: float, piece: int) -> None:
        """A request that hits what it can and stores the rest, in pieces."""
        self.now_s += passed_s
        keys = sequence(words)
        hits = next((n for n, key in enumerate(keys) if key not in self.present), len(keys))
        for policy in (self.policy, self.twin):
            policy.touch(keys[:hits], self.now_s)
        pinned = self.held | set(keys)
        for begin in range(hits, len(keys), piece):
            parent = keys[begin - 1] if begin else None
            if parent is not None and parent not in self.present:
                return
            run = keys[begin : begin + piece]
            # What was there behind a hole is stored anew: the owner drops it first.
            self.drop([key for key in run if key in self.present])
            missing = len(self.present) + len(run) - CAPACITY
            if missing > 0 and self.take(missing, pinned) < missing:
                return
            for policy in (self.policy, self.twin):
                policy.insert(run, self.now_s, begin, parent)
            self.present.update(zip(run, [parent, *run[:-1]], strict=True))

    @rule(words=_WORDS, at=st.integers(0, _LONGEST))
    def drop_one(self, words: list[int], at: int) -> None:
        keys = sequence(words)
        self.drop([keys[at % len(keys)]])

    def drop(self, keys: list[bytes]) -> None:
        for policy in (self.policy, self.twin):
            policy.remove(keys)
        for key in keys:
            self.present.pop(key, None)

    @rule(words=_WORDS)
    def hold(self, words: list[int]) -> None:
        self.held.update(key for key in sequence(words) if key in self.present)

    @rule()
    def let_go(self) -> None:
        self.held.clear()

    @rule(count=st.integers(0, CAPACITY))
    def evict(self, count: int) -> None:
        self.take(count, self.held)

    def take(self, count: int, held: set[bytes]) -> int:
        gone = self.policy.victims(count, held)
        assert self.twin.victims(count, held) == gone, "the same calls gave other victims"
        assert len(gone) <= count
        for key in gone:
            assert key in self.present, "a victim was not there, or came twice"
            assert key not in held, "a victim was held"
            assert key not in self.present.values(), "a prefix went before its extension"
            del self.present[key]
        if len(gone) < count:
            extended = set(self.present.values())
            free = [key for key in self.present if key not in extended and key not in held]
            assert not free, f"{len(gone)} of {count} victims, but {len(free)} more may go"
        return len(gone)

    @invariant()
    def knows_what_is_there(self) -> None:
        assert len(self.policy) == len(self.present)
        assert all(key in self.policy for key in self.present)
