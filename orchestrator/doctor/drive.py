"""Do one thing again and again, several at a time, and see how long each takes."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from backends.units import format_size
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.result import Latency

_ALONE_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """`count` calls were made: numbers 0 to count - 1."""

    count: int
    bytes_per_s: float
    latency_s: Latency


def drive(
    call: Callable[[int], None],
    *,
    depth: int,
    most: int,
    seconds: float,
    nbytes: int,
    stop: Stop,
    prepare: Callable[[], None] = lambda: None,
) -> Measured | None:
    """`call(0)`, `call(1)`, ..., `depth` at a time, each moving `nbytes`, until `most` calls were
    made or `seconds` are over; at least one. None where there was no time for any.

    Each thread calls `prepare` before the clock runs. Raises the first error of a call.
    """
    depth = min(depth, most)
    numbers, seconds_of = itertools.count(), list[float]()
    errors: list[BaseException] = []
    began_s = 0.0

    def start() -> None:
        nonlocal began_s
        began_s = time.perf_counter()

    ready = threading.Barrier(depth, start)

    def work() -> None:
        try:
            prepare()
        except BaseException as error:
            errors.append(error)
        ready.wait()
        until_s = began_s + seconds
        while not errors and not stop.asked():
            number = next(numbers)
            before_s = time.perf_counter()
            if number >= most or (number >= 1 and before_s >= until_s):
                return
            try:
                call(number)
            except BaseException as error:
                errors.append(error)
                return
            seconds_of.append(time.perf_counter() - before_s)

    # Not a pool: its threads would be waited for when this process ends, and one may hang.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if not seconds_of:
        return None
    took_s = time.perf_counter() - began_s
    return Measured(len(seconds_of), nbytes * len(seconds_of) / took_s, latency(seconds_of))


@dataclass(frozen=True, slots=True)
class Both:
    """Stores, and loads of what was stored, `depth` at a time; None where there was no time."""

    depth: int
    store: Measured | None
    load: Measured | None

    def words(self, block_bytes: int) -> str:
        """For people: what went through, of what, how many at a time, how long each took."""
        what = f"blocks of {format_size(block_bytes)}, {self.depth} at a time"
        told = [
            f"{name} {rate(each.bytes_per_s)} ({each.latency_s.p50 * 1e3:.1f} ms, "
            f"p99 {each.latency_s.p99 * 1e3:.1f} ms)"
            for name, each in (("store", self.store), ("load", self.load))
            if each is not None
        ]
        return f"{', '.join(told)}: {what}" if told else f"no time to measure {what}"


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def alternate(
    store: Callable[[int], None],
    load: Callable[[int], None],
    *,
    depth: int,
    most: int,
    seconds: float,
    nbytes: int,
    notes: Notes,
    stop: Stop,
    prepare: Callable[[], None] = lambda: None,
    between: Callable[[int], None] | None = None,
) -> tuple[Both, Both]:
    """Store blocks 0 to at most `most`, some alone and the others `depth` at a time; then load each
    of them once, likewise. Each of the four takes about `seconds` at most, alone a third of that.

    `between` is called with how many blocks there are before they are loaded.
    """
    measure = partial(drive, nbytes=nbytes, stop=stop, prepare=prepare)
    notes.doing("storing one block at a time")
    alone_most = max(1, most // _ALONE_SHARE)
    first = measure(store, depth=1, most=alone_most, seconds=seconds / 3)
    begin = first.count if first else 0
    left = max(1, most - begin)
    notes.doing(f"storing {depth} at a time")
    rest = measure(partial(_shifted, store, begin), depth=depth, most=left, seconds=seconds)
    count = rest.count if rest else 0
    if between is not None:
        notes.doing("flushing what was stored")
        between(begin + count)
    notes.doing("loading one block at a time")
    loaded = measure(load, depth=1, most=begin, seconds=seconds / 3) if begin else None
    notes.doing(f"loading {depth} at a time")
    again = partial(_shifted, load, begin)
    loaded_rest = measure(again, depth=depth, most=count, seconds=seconds) if count else None
    return Both(1, first, loaded), Both(depth, rest, loaded_rest)


def _shifted(call: Callable[[int], None], by: int, number: int) -> None:
    call(by + number)


def rates(both: Both) -> dict[str, Any]:
    """The fields that all figures of stores and loads have."""
    store, load = both.store, both.load
    return {
        "store_bytes_per_s": store.bytes_per_s if store else None,
        "load_bytes_per_s": load.bytes_per_s if load else None,
        "store_latency_s": store.latency_s if store else None,
        "load_latency_s": load.latency_s if load else None,
    }


def latency(seconds: Sequence[float]) -> Latency:
    """Percentiles by the nearest rank."""
    ordered = sorted(seconds)

    def rank(percent: int) -> float:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    return Latency(p50=rank(50), p99=rank(99), mean=sum(ordered) / len(ordered))
