"""What `region.scope: node` costs the leader: microseconds a block, for 2, 4 and 8 replicas.

    python benchmarks/node.py [--json FILE]

Batches of 64 blocks, regions of 4,096 rows, all leaders in this process; nothing is copied. `store`
and `lookup` are of blocks that no neighbour has, `found` is a lookup of blocks that a neighbour
has, `held` a store of those, `load` what the leader does to have them read. `check` is a worker's
part, before and after the copy of a row. `alone` is the same stack with `region.scope: replica`.
"""

from __future__ import annotations

import os
import sys

# A script's own directory comes first on the path; the root of the repository must be there.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import gc
import secrets
import statistics
import time
from collections.abc import Callable, Sequence

from backends.block import BlockKey
from backends.policy.registry import PolicyRegistry
from backends.region.node.file import NodeFile
from backends.region.node.reader import NodeReader
from backends.region.node.spec import NodeIndexSpec
from backends.region.region import Region
from backends.region.spec import RegionSpec
from backends.stack.headers import RowHeaders
from backends.stack.node import NodeRows
from backends.stack.stack import TierStack
from benchmarks._report import Cell, Report, make_parser, publish

ROWS = 4096
BATCH = 64
BATCHES = 16
KEY_BYTES = 32
FINGERPRINT = bytes(32)
PHASES = ("store", "lookup", "found", "held", "load", "check")


class Node:
    """The replicas of one node; the first one stores, the last one looks."""

    def __init__(self, replicas: int) -> None:
        self._close = contextlib.ExitStack()
        run_id = f"bench{secrets.token_hex(4)}"
        index = NodeIndexSpec(run_id, 0, replicas, ROWS, FINGERPRINT.hex())
        specs = [
            RegionSpec(f"{run_id}_dp{n}", run_id, "memfd", ROWS, 64, 1, "00" * 8)
            for n in range(replicas)
        ]
        self.stacks: list[TierStack] = []
        for number, spec in enumerate(specs):
            region = Region.create(spec)
            self._close.callback(region.close)
            node = None
            if replicas > 1:
                file = NodeFile.join(index, writable=True)
                node = NodeRows(file, number, region.handle())
            headers = RowHeaders(region.row_headers(), FINGERPRINT, [[64]])
            policy = PolicyRegistry().open("lru", ROWS)
            self.stacks.append(TierStack(ROWS, policy, headers=headers, node=node))
            self._close.callback(self.stacks[-1].close)
        self.reader: NodeReader | None = None
        if replicas > 1:
            seen = NodeFile.join(index, writable=False)
            self.reader = NodeReader(seen, specs, replicas - 1, 0, FINGERPRINT)
            self._close.callback(self.reader.close)

    def close(self) -> None:
        self._close.close()

    def measure(self) -> dict[str, float]:
        """Microseconds a block by phase."""
        batches = [[os.urandom(KEY_BYTES) for _ in range(BATCH)] for _ in range(BATCHES)]
        owner, other = self.stacks[0], self.stacks[-1]
        for stack in self.stacks:
            stack.lookup(batches[0])  # let everybody see who lives
        found = {"store": _median(lambda keys: _store(owner, keys, BATCH), batches)}
        unknown = [[os.urandom(KEY_BYTES) for _ in range(BATCH)] for _ in range(BATCHES)]
        found["lookup"] = _median(lambda keys: _look(other, keys, 0), unknown)
        if self.reader is None:
            return found
        found["found"] = _median(lambda keys: _look(other, keys, BATCH), batches)
        found["held"] = _median(lambda keys: _store(other, keys, 0), batches)
        found["load"] = _median(lambda keys: _load(other, keys), batches)
        rows = [other.prepare_load(keys).rows[0] for keys in batches]
        at = {keys[0]: of_batch for keys, of_batch in zip(batches, rows, strict=True)}
        reader = self.reader
        found["check"] = _median(lambda keys: _check(reader, keys, at[keys[0]]), batches)
        return found


def _store(stack: TierStack, keys: Sequence[bytes], expected: int) -> None:
    storing = stack.prepare_store(keys)
    stack.complete_store(storing.keys)
    _expect(len(storing.keys), expected)


def _look(stack: TierStack, keys: Sequence[bytes], expected: int) -> None:
    _expect(stack.lookup(keys).hits, expected)


def _load(stack: TierStack, keys: Sequence[bytes]) -> None:
    stack.touch(keys)
    stack.prepare_load(keys)
    stack.complete_load(keys)


def _check(reader: NodeReader, keys: Sequence[bytes], rows: Sequence[int]) -> None:
    leases = [reader.lease(row, BlockKey(key, 0)) for row, key in zip(rows, keys, strict=True)]
    _expect(reader.kept([lease for lease in leases if lease is not None]), BATCH)


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"{found} blocks, expected {expected}")


def _median(verb: Callable[[list[bytes]], None], batches: list[list[bytes]]) -> float:
    spent_s = []
    for keys in batches:
        began_s = time.perf_counter()
        verb(keys)
        spent_s.append(time.perf_counter() - began_s)
    return statistics.median(spent_s) / BATCH * 1e6


def main() -> None:
    parser = make_parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[list[Cell]] = []
    gc.disable()
    for replicas in (1, 2, 4, 8):
        best: dict[str, float] = {}
        for _ in range(args.rounds):
            with contextlib.closing(Node(replicas)) as node:
                for phase, us in node.measure().items():
                    best[phase] = min(best.get(phase, us), us)
            gc.collect()
        name = "alone" if replicas == 1 else f"{replicas} replicas"
        rows.append([name, *(best.get(phase) for phase in PHASES)])
    title = f"Node scope, us a block: {ROWS:,} rows, batches of {BATCH}"
    publish(Report(title, ("", *PHASES), rows, {}), args.json)


if __name__ == "__main__":
    main()
