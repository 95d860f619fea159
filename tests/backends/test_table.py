"""The table of rows by key: both kinds answer as a dict does, and neither keeps what it let go."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.table import KeyTable, kinds, open_table

NONE = -1
# Short ones too, so that a machine meets each again and again; some differ in one byte alone.
KEYS = [
    *(bytes([n]) * length for n in (0, 7) for length in (0, 1, 7, 8, 9, 15, 16, 17)),
    *(bytes(at) + b"\1" + bytes(35 - at) for at in range(36)),
    *(bytes(at) + b"\1" + bytes(149 - at) for at in (0, 63, 64, 65, 127, 128, 149)),
]


@pytest.fixture(params=sorted(kinds()))
def make(request: pytest.FixtureRequest) -> Callable[[], KeyTable]:
    return kinds()[request.param]


def random_keys(count: int, length: int = 36) -> list[bytes]:
    return [os.urandom(length) for _ in range(count)]


def copies(keys: list[bytes]) -> list[bytes]:
    return [bytes(bytearray(key)) for key in keys]


def test_a_machine_with_a_compiler_has_the_compiled_table() -> None:
    assert "compiled" in kinds(), "python setup.py build_ext --inplace builds it"


def test_without_the_compiled_extension_a_dict_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backends.table._table", None)
    assert list(kinds()) == ["dict"]
    assert type(open_table()).__name__ == "DictTable"


def test_the_best_kind_is_opened() -> None:
    assert isinstance(open_table(), type(next(iter(kinds().values()))()))


def test_a_large_batch_is_found_by_copies_of_its_keys(make: Callable[[], KeyTable]) -> None:
    table, keys = make(), random_keys(1000)
    assert table.isdisjoint(keys)
    assert table.add(keys, range(1000)) == 1000
    asked = copies(keys)
    assert table.contains_all(asked)
    assert table.rows(asked) == list(range(1000))
    assert table.pop(asked[100:900]) == list(range(100, 900))
    assert table.contains(asked) == [True] * 100 + [False] * 800 + [True] * 100
    assert len(table) == 200


def test_one_strange_key_anywhere_in_a_batch_is_seen(make: Callable[[], KeyTable]) -> None:
    table, keys, strange = make(), random_keys(200), os.urandom(36)
    table.add(keys, range(200))
    for at in (0, 1, 63, 64, 65, 127, 128, 199, 200):
        mixed = [*keys[:at], strange, *keys[at:]]
        assert not table.contains_all(mixed)
        assert table.contains(mixed).index(False) == at
        assert table.rows_or(mixed, NONE)[at] == NONE
        with pytest.raises(KeyError) as raised:
            table.rows(mixed)
        assert raised.value.args == (strange,)
    assert table.isdisjoint([strange] * 100)
    assert not table.isdisjoint([strange] * 100 + keys[:1])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 20, 32, 36, 63, 64, 65, 128, 200])
def test_keys_that_differ_in_one_bit_are_different(
    make: Callable[[], KeyTable], length: int
) -> None:
    base = int.from_bytes(os.urandom(length))
    flipped = [(base ^ (1 << bit)).to_bytes(length) for bit in range(8 * length)]
    keys = [base.to_bytes(length), *flipped, b"\0" * (length + 1)]
    table = make()
    assert table.add(keys, range(len(keys))) == len(keys)
    assert table.rows(copies(keys)) == list(range(len(keys)))
    table.pop(keys[1:])
    assert table.contains(keys) == [True] + [False] * (len(keys) - 1)


def test_taking_out_a_key_that_is_not_there_names_it(make: Callable[[], KeyTable]) -> None:
    table, keys = make(), random_keys(3)
    table.add(keys[:2], (1, 2))
    with pytest.raises(KeyError) as raised:
        table.pop([keys[0], keys[2], keys[1]])
    assert raised.value.args == (keys[2],)
    assert table.pop_or(keys, NONE) == [NONE, 2, NONE]
    assert len(table) == 0


def test_what_cannot_be_put_in_leaves_all_as_it_was(make: Callable[[], KeyTable]) -> None:
    table, keys = make(), random_keys(3)
    table.add(keys[:1], [5])
    with pytest.raises(ValueError):  # noqa: PT011 - the message is Python's own in one of them
        table.add(keys, [1, 2])
    with pytest.raises(TypeError, match="expected bytes"):
        table.add([*keys[1:], "a"], [1, 2, 3])  # type: ignore[list-item]
    assert table.items() == [(keys[0], 5)]


def test_a_key_given_twice_counts_once_and_has_its_last_row(make: Callable[[], KeyTable]) -> None:
    table, [key] = make(), random_keys(1)
    assert table.add([key, *copies([key])], [1, 2]) == 1
    assert table.add([key], [3]) == 0
    assert table.items() == [(key, 3)]


def test_a_table_that_is_always_full_and_always_changing_stays_right(
    make: Callable[[], KeyTable],
) -> None:
    table, known = make(), dict[bytes, int]()
    for turn in range(300):
        keys = random_keys(64)
        rows = range(turn * 64, turn * 64 + 64)
        table.add(keys, rows)
        known.update(zip(keys, rows, strict=True))
        if len(known) > 2000:
            old = list(known)[:64]
            assert table.pop(old) == [known.pop(key) for key in old]
            assert table.isdisjoint(old)
    assert dict(table.items()) == known
    assert dict(zip(table.keys(), table.values(), strict=True)) == known


def test_every_reference_that_is_taken_is_given_back(make: Callable[[], KeyTable]) -> None:
    keys = random_keys(300)
    row, absent = 1 << 20, 1 << 21
    before = [sys.getrefcount(key) for key in keys]
    numbers = sys.getrefcount(row), sys.getrefcount(absent), sys.getrefcount(True)
    table = make()
    for _ in range(3):
        table.add(keys, [row] * 300)
        table.add(keys, [row] * 300)
        table.contains(keys), table.contains_all(keys), table.isdisjoint(keys)
        table.rows(keys), table.rows_or(keys, absent), table.items(), table.keys(), table.values()
        with pytest.raises(KeyError):
            table.rows([*keys, b"none"])
        table.pop(keys[:100])
        table.pop_or(keys[:200], absent)
    del table
    assert [sys.getrefcount(key) for key in keys] == before
    assert abs(sys.getrefcount(row) - numbers[0]) < 5
    assert abs(sys.getrefcount(absent) - numbers[1]) < 5
    assert abs(sys.getrefcount(True) - numbers[2]) < 50


def test_memory_is_that_of_what_it_holds(make: Callable[[], KeyTable]) -> None:
    def turn(table: KeyTable) -> None:
        keys = random_keys(64)
        table.add(keys, range(64))
        table.pop(keys)

    table = make()
    turn(table)
    tracemalloc.start()
    try:
        for _ in range(200):
            turn(table)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 20_000, "12,800 keys went through it, and none is left"


def test_the_compiled_table_refuses_what_is_no_key() -> None:
    table = kinds()["compiled"]()
    for ask in (table.contains, table.contains_all, table.isdisjoint, table.rows, table.pop):
        with pytest.raises(TypeError, match="expected bytes"):
            ask([b"a", "a"])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="not a sequence"):
            ask(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected bytes"):
        "a" in table  # type: ignore[operator] # noqa: B015
    with pytest.raises(OverflowError):
        table.add([b"a"], [1 << 31])
    with pytest.raises(TypeError, match="int"):
        table.add([b"a"], ["1"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        table.rows_or([b"a"])  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        kinds()["compiled"](1)  # type: ignore[call-arg]
    assert len(table) == 0


def test_the_order_of_slots_is_secret_and_each_table_has_its_own() -> None:
    """Whoever can choose keys does not know which of them meet in one place."""
    keys = random_keys(200)
    orders = set()
    for _ in range(3):
        table = kinds()["compiled"]()
        table.add(keys, range(200))
        orders.add(tuple(table.values()))
    assert len(orders) == 3


class AgainstADict(RuleBasedStateMachine):
    """Both kinds at once, beside a dict."""

    some = st.lists(st.sampled_from(KEYS), max_size=80)

    @initialize()
    def open(self) -> None:
        self.tables = [make() for make in kinds().values()]
        self.model: dict[bytes, int] = {}

    @rule(keys=some, first=st.integers(-(1 << 31), (1 << 31) - 100))
    def add(self, keys: list[bytes], first: int) -> None:
        before, rows = len(self.model), range(first, first + len(keys))
        self.model.update(zip(keys, rows, strict=True))
        for table in self.tables:
            assert table.add(copies(keys), rows) == len(self.model) - before

    @rule(keys=some)
    def pop_or(self, keys: list[bytes]) -> None:
        rows = [self.model.pop(key, NONE) for key in keys]
        for table in self.tables:
            assert table.pop_or(tuple(keys), NONE) == rows

    @rule(keys=some)
    def pop(self, keys: list[bytes]) -> None:
        missing: bytes | None = None
        rows = []
        for key in keys:
            if key not in self.model:
                missing = key
                break
            rows.append(self.model.pop(key))
        for table in self.tables:
            if missing is None:
                assert table.pop(keys) == rows
            else:
                with pytest.raises(KeyError) as raised:
                    table.pop(keys)
                assert raised.value.args == (missing,)

    @rule(keys=some)
    def ask(self, keys: list[bytes]) -> None:
        model = self.model
        there = [key for key in keys if key in model]
        for table in self.tables:
            assert table.contains(keys) == [key in model for key in keys]
            assert table.contains_all(keys) == (there == keys)
            assert table.isdisjoint(keys) == (not there)
            assert table.rows(there) == [model[key] for key in there]
            assert table.rows_or(keys, 5) == [model.get(key, 5) for key in keys]

    @rule(key=st.sampled_from(KEYS))
    def ask_for_one(self, key: bytes) -> None:
        for table in self.tables:
            assert (key in table) == (key in self.model)

    @invariant()
    def the_same(self) -> None:
        for table in self.tables:
            assert len(table) == len(self.model)
            assert dict(table.items()) == self.model


AgainstADict.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstADict = AgainstADict.TestCase


@given(st.lists(st.binary(max_size=200), unique=True, max_size=300))
@settings(max_examples=50)
def test_any_bytes_are_keys(keys: list[bytes]) -> None:
    for make in kinds().values():
        table = make()
        assert table.add(keys, range(len(keys))) == len(keys)
        assert table.rows(copies(keys)) == list(range(len(keys)))
