"""What BlockingTier makes of calls that block, fail and hang."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from backends.block import BlockKey
from backends.errors import TierError
from backends.testing import (
    MemoryMedium,
    MemorySettings,
    MemoryTier,
    RowBuffer,
    TierBench,
    make_context,
    make_keys,
)
from backends.tier.base import Bytes, Capabilities, Lookup, Outcome, TierContext
from backends.tier.blocking import BlockingTier

DONE, FAILED, LATE, SHED = Outcome.DONE, Outcome.FAILED, Outcome.LATE, Outcome.SHED


class ScriptedTier(BlockingTier):
    """A dict, whose calls first do what a test says."""

    name = "scripted"
    capabilities = Capabilities(persistent=False, shared=True, quota=False, corruption=True)

    def __init__(self, context: TierContext, script: Callable[[str, BlockKey], None], **settings):
        self.blocks: dict[BlockKey, bytes] = {}
        self.calls: list[tuple[str, BlockKey]] = []
        self.closed_storage = 0
        self._script = script
        super().__init__(context, **settings)

    def has_block(self, key: BlockKey) -> bool:
        self._do("has", key)
        return key in self.blocks

    def write_block(self, key: BlockKey, block: Bytes) -> None:
        self._do("write", key)
        self.blocks[key] = block.tobytes()

    def read_block(self, key: BlockKey, into: Bytes) -> int | None:
        self._do("read", key)
        if key not in self.blocks:
            return None
        into.data[:] = self.blocks[key]
        return into.size

    def set_aside(self, key: BlockKey) -> None:
        self._do("set_aside", key)
        del self.blocks[key]

    def close_storage(self) -> None:
        self.closed_storage += 1

    def _do(self, what: str, key: BlockKey) -> None:
        self.calls.append((what, key))
        self._script(what, key)


Open = Callable[..., TierBench]


@pytest.fixture
def open_bench() -> Iterator[Open]:
    benches = []

    def open_bench(script: Callable[[str, BlockKey], None] | None = None, **settings) -> TierBench:
        rows = RowBuffer(24, 8192)
        tier = ScriptedTier(make_context(rows), script or (lambda what, key: None), **settings)
        benches.append(TierBench(tier, rows))
        return benches[-1]

    yield open_bench
    for bench in benches:
        bench.close()


class Gate:
    """A script that waits at one kind of call until it is opened."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, what: str, key: BlockKey) -> None:
        if what == self.what:
            self.reached.set()
            assert self.opened.wait(30)


def failing(what: str, bad: BlockKey, error: Exception) -> Callable[[str, BlockKey], None]:
    def script(called: str, key: BlockKey) -> None:
        if (called, key) == (what, bad):
            raise error

    return script


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_sheds_one_key(open_bench: Open, number: int) -> None:
    keys = make_keys("full", 3)
    bench = open_bench(failing("write", keys[1], OSError(number, "full")))
    result = bench.wait(job := bench.submit_store(keys))[job]
    assert result.outcomes == (DONE, SHED, DONE)
    assert "full" in result.reasons[1]
    assert bench.lookup(keys) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), ValueError("broken disk")])
def test_any_other_trouble_fails_one_key(open_bench: Open, error: Exception) -> None:
    keys = make_keys("trouble", 3)
    bench = open_bench(failing("read", keys[1], error))
    bench.store(keys)
    result = bench.wait(job := bench.submit_load(keys))[job]
    assert result.outcomes == (DONE, FAILED, DONE)
    assert "broken disk" in result.reasons[1]
    assert bench.tier.counters()["failed"] == 1


def test_a_lookup_that_cannot_be_answered_is_a_miss(open_bench: Open) -> None:
    [key] = make_keys("unanswered", 1)
    bench = open_bench(failing("has", key, OSError(errno.EIO, "broken disk")))
    assert bench.lookup([key]) == [Lookup.MISS]


def test_what_is_more_than_the_queue_takes_is_shed(open_bench: Open) -> None:
    gate = Gate("write")
    bench = open_bench(gate, queue_blocks=4)
    [first], keys = make_keys("held", 1), make_keys("queued", 8)
    held = bench.submit_store([first])
    assert gate.reached.wait(30)
    job = bench.submit_store(keys)
    assert list(bench.tier.lookup(keys[:4])) == [Lookup.PENDING] * 4
    gate.opened.set()
    results = bench.wait(held, job)
    assert results[job].outcomes == (DONE,) * 4 + (SHED,) * 4
    assert bench.tier.counters()["shed"] == 4


def test_loads_go_before_stores(open_bench: Open) -> None:
    gate = Gate("write")
    bench = open_bench(gate)
    [first], stores, loads = make_keys("first", 1), make_keys("stores", 3), make_keys("loads", 3)
    jobs = [bench.submit_store([first])]
    assert gate.reached.wait(30)
    jobs += [bench.submit_store(stores), bench.submit_load(loads)]
    gate.opened.set()
    bench.wait(*jobs)
    moves = [key for what, key in bench.tier.calls if what in ("read", "write")]
    assert moves == [first, *loads, *stores]


def test_a_store_that_nobody_has_begun_is_late_though_every_thread_hangs(open_bench: Open) -> None:
    gate = Gate("write")
    bench = open_bench(gate, threads=2)
    held = [bench.submit_store([key]) for key in make_keys("held", 2)]
    waiting = bench.submit_store(make_keys("waiting", 3), time.monotonic() + 0.02)
    assert bench.outcomes(waiting) == [LATE] * 3
    assert not bench.poll()
    gate.opened.set()
    bench.wait(*held)


def test_a_miss_is_looked_up_again_after_a_while(open_bench: Open) -> None:
    bench = open_bench(recheck_s=0.05)
    [key] = make_keys("appears", 1)
    assert bench.lookup([key]) == [Lookup.MISS]
    bench.tier.blocks[key] = b"somebody else has stored it"
    bench.until(lambda: bench.lookup([key]) == [Lookup.HIT], "never looked up again")


def test_a_key_is_asked_about_once_while_the_answer_is_young(open_bench: Open) -> None:
    bench = open_bench(recheck_s=3600.0)
    [key] = make_keys("asked", 1)
    for _ in range(20):
        assert bench.lookup([key]) == [Lookup.MISS]
    assert bench.tier.calls == [("has", key)]


def test_one_key_is_never_in_two_threads(open_bench: Open) -> None:
    inside, worst = {}, []

    def script(what: str, key: BlockKey) -> None:
        if what == "write":
            inside[key] = inside.get(key, 0) + 1
            worst.append(inside[key])
            time.sleep(0.002)
            inside[key] -= 1

    bench = open_bench(script, threads=4)
    [key] = make_keys("one", 1)
    jobs = [bench.submit_store([key, key]) for _ in range(6)]
    bench.wait(*jobs)
    assert worst == [1]
    assert bench.tier.counters()["stored"] == 1


def test_a_batch_is_spread_over_the_threads(open_bench: Open) -> None:
    together = threading.Barrier(3)

    def script(what: str, key: BlockKey) -> None:
        if what == "write":
            together.wait(30)

    bench = open_bench(script, threads=3)
    assert bench.store(make_keys("spread", 3)) == [DONE] * 3


@pytest.mark.parametrize("by_close", [False, True])
def test_jobs_behind_a_key_that_hangs_end_without_it(open_bench: Open, by_close: bool) -> None:
    gate = Gate("write")
    bench = open_bench(gate, threads=2, close_timeout_s=0.05)
    [key], others = make_keys("hangs", 1), make_keys("others", 3)
    held = bench.submit_store([key])
    assert gate.reached.wait(30)
    deadline_s = None if by_close else time.monotonic() + 0.1
    behind = [bench.submit_store([key], deadline_s), bench.submit_load([key], deadline_s)]
    # The other thread is free for other keys.
    assert bench.load(others) == [Outcome.MISSING] * 3
    if by_close:
        bench.tier.close()
    results = bench.wait(*behind)
    assert {results[job].outcomes for job in behind} == {(SHED if by_close else LATE,)}
    gate.opened.set()
    assert bench.outcomes(held) == [DONE]


def test_close_gives_up_on_a_thread_that_hangs(open_bench: Open) -> None:
    gate = Gate("write")
    bench = open_bench(gate, close_timeout_s=0.05)
    held = bench.submit_store(make_keys("held", 1))
    assert gate.reached.wait(30)
    waiting = bench.submit_store(make_keys("waiting", 2))
    bench.tier.close()
    assert bench.outcomes(waiting) == [SHED, SHED]
    assert held not in bench.results
    assert bench.tier.closed_storage == 0
    gate.opened.set()
    assert bench.outcomes(held) == [DONE]


def test_the_storage_is_closed_once(open_bench: Open) -> None:
    bench = open_bench()
    bench.tier.close()
    bench.tier.close()
    assert bench.tier.closed_storage == 1


@pytest.mark.parametrize("settings", [{"threads": 0}, {"queue_blocks": 0}])
def test_a_tier_without_threads_or_queue_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(TierError, match="expected both at least 1"):
        ScriptedTier(make_context(RowBuffer(1, 8192)), lambda what, key: None, **settings)


def test_a_memory_tier_forgets_what_was_used_least_recently() -> None:
    rows = RowBuffer(8, 8192)
    tier = MemoryTier(make_context(rows), MemorySettings(capacity=3 * 8192), MemoryMedium())
    bench = TierBench(tier, rows)
    first, second, third, fourth = make_keys("recent", 4)
    for key in (first, second, third):
        bench.store([key])
    bench.load([first])
    bench.tier.touch([second])
    bench.store([fourth])
    assert [bench.is_hit(key) for key in (first, second, third, fourth)] == [
        True,
        True,
        False,
        True,
    ]
    assert tier.counters()["evicted"] == 1
    bench.close()
