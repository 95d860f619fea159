"""What the tier stack's metadata costs the leader: microseconds a block, beside vLLM's manager.

    python benchmarks/stack.py [--json FILE]

A batch is one request's run of 64 blocks, a region has 20,480 rows. `store` fills an empty region,
`store, evicting` goes on when it is full, `lookup` and `load` find everything. Each verb's time is
for preparing and completing. Keys are made anew for every phase, as another request's would be, so
that their hashes are not known beforehand. Every figure is the median batch of the best of several
rounds, ours and vLLM's by turns. Nothing is copied, and there is no tier below; a line of its own
says what writing the rows' headers adds, which is what tiers need.

Where vLLM is installed, its CPUOffloadingManager runs beside ours.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository must be there.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np

from backends.policy.registry import PolicyRegistry
from backends.stack.headers import RowHeaders
from backends.stack.stack import TierStack
from benchmarks._report import Cell, Report, make_parser, publish

ROWS = 20_480
BATCH = 64
KEY_BYTES = 36
PHASES = ("lookup", "store", "store, evicting", "load")
Batches = list[list[bytes]]


class Manager(Protocol):
    """One request's worth of each verb, with whatever it needs around it outside the clock."""

    def begin(self) -> Any: ...
    def end(self, request: Any) -> None: ...
    def lookup(self, keys: Sequence[bytes], request: Any) -> None: ...
    def store(self, keys: Sequence[bytes], request: Any) -> None: ...
    def load(self, keys: Sequence[bytes], request: Any) -> None: ...


class Ours:
    """A TierStack without tiers."""

    def __init__(self, policy: str, headers: RowHeaders | None = None) -> None:
        self._stack = TierStack(ROWS, PolicyRegistry().open(policy, ROWS), headers=headers)

    def begin(self) -> Any:
        return None

    def end(self, request: Any) -> None:
        pass

    def lookup(self, keys: Sequence[bytes], request: Any) -> None:
        if self._stack.lookup(keys).hits != len(keys):
            raise AssertionError("a stored block is not found")

    def store(self, keys: Sequence[bytes], request: Any) -> None:
        stored = self._stack.prepare_store(keys)
        self._stack.complete_store(stored.keys)

    def load(self, keys: Sequence[bytes], request: Any) -> None:
        self._stack.prepare_load(keys)
        self._stack.complete_load(keys)


class Vllm:
    """vLLM's CPUOffloadingManager. Raises ImportError where that is not installed."""

    def __init__(self, policy: str) -> None:
        base: Any = import_module("vllm.v1.kv_offload.base")
        manager: Any = import_module("vllm.v1.kv_offload.cpu.manager")
        self._manager = manager.CPUOffloadingManager(ROWS, cache_policy=policy)
        self._context = base.ReqContext
        self._hit = base.LookupResult.HIT
        self._count = 0

    def begin(self) -> Any:
        self._count += 1
        request = self._context(str(self._count))
        self._manager.on_new_request(request)
        return request

    def end(self, request: Any) -> None:
        self._manager.on_request_finished(request)

    def lookup(self, keys: Sequence[bytes], request: Any) -> None:
        look, hit = self._manager.lookup, self._hit
        for key in keys:
            if look(key, request) is not hit:
                raise AssertionError("a stored block is not found")

    def store(self, keys: Sequence[bytes], request: Any) -> None:
        stored = self._manager.prepare_store(keys, request)
        self._manager.complete_store(stored.keys_to_store, request)

    def load(self, keys: Sequence[bytes], request: Any) -> None:
        self._manager.prepare_load(keys, request)
        self._manager.complete_load(keys, request)


def measure(make: Callable[[], Manager], batches: Batches) -> dict[str, float]:
    """One round: microseconds a block by phase."""
    manager = make()
    half = len(batches) // 2
    found = {"store": _phase(manager, manager.store, batches[:half])}
    for name, verb in (("lookup", manager.lookup), ("load", manager.load)):
        found[name] = _phase(manager, verb, _anew(batches[:half]))
    found["store, evicting"] = _phase(manager, manager.store, batches[half:])
    return found


def _phase(manager: Manager, verb: Callable[[list[bytes], Any], None], batches: Batches) -> float:
    """The median batch: a machine that does other things too stops some of them for a while."""
    spent_s = []
    for keys in batches:
        request = manager.begin()
        began_s = time.perf_counter()
        verb(keys, request)
        spent_s.append(time.perf_counter() - began_s)
        manager.end(request)
    return statistics.median(spent_s) / BATCH * 1e6


def _anew(batches: Batches) -> Batches:
    return [[bytes(bytearray(key)) for key in keys] for keys in batches]


def contenders() -> tuple[dict[str, Callable[[], Manager]], str]:
    """Who is measured, and what is to be said of vLLM."""
    headers = np.zeros((ROWS, 4096), dtype=np.uint8)
    made: dict[str, Callable[[], Manager]] = {
        f"kvquay {name}": lambda name=name: Ours(name)  # type: ignore[misc]
        for name in PolicyRegistry().names()
    }
    made["kvquay lru, row headers"] = lambda: Ours("lru", RowHeaders(headers, bytes(32), [[4096]]))
    try:
        Vllm("lru")
    except ImportError as error:
        return made, f"vLLM is not installed here, so only ours ran ({error})"
    made |= {f"vllm {name}": lambda name=name: Vllm(name) for name in ("lru", "arc")}  # type: ignore[misc]
    try:
        return made, f"vllm {version('vllm')}"
    except PackageNotFoundError:
        return made, "vllm, of unknown version"


def main() -> None:
    parser = make_parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    made, note = contenders()
    best: dict[str, dict[str, float]] = {name: {} for name in made}
    gc.disable()
    for _ in range(args.rounds):
        batches = [[os.urandom(KEY_BYTES) for _ in range(BATCH)] for _ in range(2 * ROWS // BATCH)]
        for name, make in made.items():
            for phase, us in measure(make, batches).items():
                best[name][phase] = min(best[name].get(phase, us), us)
        gc.collect()
    rows: list[list[Cell]] = [[name, *(best[name][phase] for phase in PHASES)] for name in made]
    ratios: dict[str, float] = {}
    theirs = [name for name in made if name.startswith("vllm")]
    for phase in PHASES if theirs else ():
        better = min(best[name][phase] for name in theirs)
        ratios[f"{phase}, best of vllm / kvquay lru"] = better / best["kvquay lru"][phase]
    publish(
        Report(
            f"Stack metadata, us a block: {ROWS:,} rows, batches of {BATCH}",
            ("manager", *PHASES),
            rows,
            ratios,
            (note,),
        ),
        args.json,
    )


if __name__ == "__main__":
    main()
