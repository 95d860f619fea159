"""TierMachine: Hypothesis drives a tier in any order it can think of, against a simple model.

The model is a dict: for each key, what may be stored under it now. Every answer of the tier has to
be one that some possible state explains, and narrows down what is possible.
"""

from __future__ import annotations

import enum
import shutil
import tempfile
import time
import unittest
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.block import BlockKey
from backends.testing.bench import TierBench, require
from backends.testing.harness import TierHarness
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context, make_keys
from backends.tier.base import JobResult, Lookup, Outcome

_KEYS = make_keys("machine", 6) + make_keys("machine", 2, group=1)
_BATCH = st.lists(st.sampled_from(_KEYS), max_size=4)


class Stored(enum.Enum):
    """What may stand under a key."""

    ABSENT = "absent"
    WHOLE = "whole"
    DAMAGED = "damaged"


class _Flight:
    """A job without a result: its keys, and all that was stored under them since its submit.

    `shared` are keys that another job was at meanwhile: which of them came first is not known.
    """

    def __init__(self, keys: Sequence[BlockKey], is_load: bool, late: bool) -> None:
        self.keys = tuple(keys)
        self.is_load = is_load
        self.late = late
        self.seen: dict[BlockKey, set[Stored]] = {}
        self.shared: set[BlockKey] = set()


class TierMachine(RuleBasedStateMachine):
    """Set `harness_type`; give `capacity_blocks` to have the tier run against its quota.

    Run it through `machine_test`. Which rules may come next never depends on how far the tier has
    got by now: Hypothesis takes that for a test whose data depend on something else.
    """

    harness_type: ClassVar[type[TierHarness]]
    row_bytes: ClassVar[int] = 2 * 4096
    rows: ClassVar[int] = 24
    patience_s: ClassVar[float] = 20.0
    capacity_blocks: ClassVar[int | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tier-machine-"))
        self.harness = self.harness_type(self.directory)
        self.capabilities = self.harness.capabilities
        self.possible: dict[BlockKey, set[Stored]] = {key: {Stored.ABSENT} for key in _KEYS}
        self.flights: dict[int, _Flight] = {}
        self.evicted = False
        self.closing = False
        self.bench = self._open()

    @rule(keys=_BATCH)
    def store(self, keys: list[BlockKey]) -> None:
        self._submit(keys, is_load=False)
        self.settle()

    @rule(keys=_BATCH)
    def load(self, keys: list[BlockKey]) -> None:
        self._submit(keys, is_load=True)
        self.settle()

    @rule(keys=_BATCH, is_load=st.booleans(), late=st.booleans())
    def submit(self, keys: list[BlockKey], is_load: bool, late: bool) -> None:
        self._submit(keys, is_load=is_load, late=late)

    @rule()
    def poll(self) -> None:
        self._judge(self.bench.poll())

    @rule()
    def settle(self) -> None:
        self._judge(self.bench.settle().values())

    @rule(keys=_BATCH)
    def lookup(self, keys: list[BlockKey]) -> None:
        before = {key: set(self.possible[key]) for key in keys}
        answers = self.bench.lookup(keys)
        self._see_evictions()
        for key, answer in zip(keys, answers, strict=True):
            fitting = (Stored.WHOLE, Stored.DAMAGED)
            if answer is Lookup.MISS:
                fitting = (Stored.ABSENT, Stored.DAMAGED)
            self._explain(key, before[key], fitting, f"lookup says {answer}")
            if answer is Lookup.MISS and key not in self._busy():
                self.possible[key] = self._less(key, Stored.WHOLE) or {Stored.ABSENT}

    @rule(keys=_BATCH)
    def touch(self, keys: list[BlockKey]) -> None:
        self.bench.tier.touch(keys)

    @precondition(lambda self: self.capabilities.corruption)
    @rule(pick=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
    def damage(self, pick: int, place: float, cut: bool) -> None:
        self.settle()
        if not self._whole():
            self.store([_KEYS[pick % len(_KEYS)]])
        whole = self._whole()
        if not whole:
            return
        key = whole[pick % len(whole)]
        data = self.harness.raw_read(FINGERPRINT, key)
        if not data:
            require(self.evicted, "a block that is surely stored cannot be read from behind")
            return
        at = int(place * len(data))
        bad = data[:at] if cut else data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        self.harness.raw_write(FINGERPRINT, key, bad)
        self.possible[key] = {Stored.DAMAGED}

    @rule(in_good_order=st.booleans())
    def reopen(self, in_good_order: bool) -> None:
        if in_good_order:
            require(self.bench.tier.drain(self.patience_s), "drain does not end")
        self._see_evictions()
        self.bench.close()
        lost = [job_id for job_id in self.flights if job_id not in self.bench.results]
        require(not lost, f"jobs {lost} have no result after close")
        self.closing = True
        self._judge([self.bench.results[job_id] for job_id in self.flights])
        self.closing = False
        if not self.capabilities.persistent:
            for states in self.possible.values():
                states.add(Stored.ABSENT)
        self.bench = self._open()

    @invariant()
    def capacity_is_kept(self) -> None:
        usage = self.bench.tier.usage()
        if self.capacity_bytes is not None:
            require(
                usage.bytes <= self.capacity_bytes,
                f"{usage.bytes} bytes are used of {self.capacity_bytes}",
            )

    def teardown(self) -> None:
        try:
            self.bench.close()
            self.harness.close()
        finally:
            shutil.rmtree(self.directory)

    @property
    def capacity_bytes(self) -> int | None:
        return None if self.capacity_blocks is None else self.capacity_blocks * self.row_bytes

    def _open(self) -> TierBench:
        rows = RowBuffer(self.rows, self.row_bytes)
        tier = self.harness.opener(self.capacity_bytes)(make_context(rows))
        return TierBench(tier, rows, self.patience_s)

    def _submit(self, keys: list[BlockKey], *, is_load: bool, late: bool = False) -> None:
        if self.bench.free_rows < len(keys):
            self.settle()
        flight = _Flight(keys, is_load, late)
        for key in keys:
            if not is_load:
                self._widen(key, {Stored.WHOLE})
            flight.seen[key] = set(self.possible[key])
        for other in self.flights.values():
            common = set(flight.keys) & set(other.keys)
            flight.shared |= common
            other.shared |= common
        deadline_s = time.monotonic() - 1 if late else None
        submit = self.bench.submit_load if is_load else self.bench.submit_store
        self.flights[submit(keys, deadline_s)] = flight

    def _judge(self, results: Iterable[JobResult]) -> None:
        self._see_evictions()
        for result in results:
            flight = self.flights.pop(result.job_id)
            for key, outcome in zip(flight.keys, result.outcomes, strict=True):
                if flight.late and not (self.closing and outcome is Outcome.SHED):
                    require(outcome is Outcome.LATE, f"{outcome} though its deadline had passed")
                    if flight.is_load:
                        continue
                    self._settle_on(key, flight, self.possible[key])
                elif flight.is_load:
                    self._judge_load(key, flight, outcome)
                else:
                    self._judge_store(key, flight, outcome)

    def _judge_load(self, key: BlockKey, flight: _Flight, outcome: Outcome) -> None:
        if outcome is Outcome.SHED:
            require(self.closing, "a load is SHED by a tier that is open and idle")
            return
        fitting = {
            Outcome.DONE: (Stored.WHOLE,),
            Outcome.CORRUPT: (Stored.DAMAGED,),
            Outcome.MISSING: (Stored.ABSENT, Stored.DAMAGED),
        }.get(outcome, ())
        self._explain(key, flight.seen[key], fitting, f"a load is {outcome}")
        now = Stored.WHOLE if outcome is Outcome.DONE else Stored.ABSENT
        self._settle_on(key, flight, {now})

    def _judge_store(self, key: BlockKey, flight: _Flight, outcome: Outcome) -> None:
        if outcome is Outcome.SHED:
            full = self.capacity_blocks is not None
            require(full or self.closing, "a store is SHED and there is room")
            self._settle_on(key, flight, self.possible[key] | {Stored.ABSENT})
            return
        require(outcome is Outcome.DONE, f"a store is {outcome} and nothing is wrong")
        # A store may believe a damaged block that nobody has read.
        self._settle_on(key, flight, {Stored.WHOLE} | (flight.seen[key] & {Stored.DAMAGED}))

    def _explain(
        self, key: BlockKey, states: set[Stored], fitting: Sequence[Stored], what: str
    ) -> None:
        if self.evicted and Stored.ABSENT in fitting:
            return
        require(
            bool(states & set(fitting)),
            f"{what}, though key {key.hash.hex()[:8]} of group {key.group} can only have been "
            f"{' or '.join(sorted(state.value for state in states))}",
        )

    def _settle_on(self, key: BlockKey, flight: _Flight, states: set[Stored]) -> None:
        """What is possible now; also all that was, if another job was at the key meanwhile."""
        if key in flight.shared:
            states = states | self.possible[key] | flight.seen[key]
        self.possible[key] = set(states)
        self._widen(key, states)

    def _widen(self, key: BlockKey, states: set[Stored]) -> None:
        self.possible[key] |= states
        for flight in self.flights.values():
            if key in flight.seen:
                flight.seen[key] |= self.possible[key]

    def _whole(self) -> list[BlockKey]:
        """Keys that are surely stored, if nothing is under way."""
        return [key for key in _KEYS if self.possible[key] == {Stored.WHOLE}]

    def _busy(self) -> set[BlockKey]:
        return {key for flight in self.flights.values() for key in flight.keys}

    def _less(self, key: BlockKey, state: Stored) -> set[Stored]:
        return self.possible[key] - {state}

    def _see_evictions(self) -> None:
        """From the first eviction on any key may have gone: then absence needs no other reason."""
        self.evicted = self.evicted or self.bench.tier.counters()["evicted"] > 0


def machine_test(
    machine: type[TierMachine], *, examples: int = 40, steps: int = 30
) -> type[unittest.TestCase]:
    """The machine as a test case: give it to a name in a test module that begins with `Test`."""
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case
