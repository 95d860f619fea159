"""How good the eviction policies are: hit tokens of a trace beside LRU and Belady.

    python benchmarks/policies.py --trace conversation_trace.jsonl [--partial] [--policies a,b]

A simulation without bytes: the same trace always gives the same figures, on every machine. With
`--partial` the last, partly filled id of a prompt counts as a full block, as figures elsewhere are
often made; no engine can have those hits.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Beside this file stands a `copy.py`, which must not be taken for the standard library's.
    sys.path.pop(0)
    sys.path.insert(0, __file__.rpartition("/benchmarks/")[0] or "..")

import argparse

from benchmarks._report import Report, make_parser, publish
from orchestrator.simulate.access import Access
from orchestrator.simulate.study import BELADY, LRU, Row, study
from orchestrator.workload.mooncake import MooncakeReader
from orchestrator.workload.trace_line import MOONCAKE_TOKENS_PER_ID as CHUNK_TOKENS

POLICIES = "arc,s3fifo,sieve,tinylfu,prefix_cost"
CAPACITIES = "1000,3000,10000,30000"
COLUMNS = ("capacity", "policy", "hit tokens", "hits", "first half", "second half", "seconds")


def read(path: str, *, partial: bool) -> list[Access]:
    """Every request of a trace, a chunk being one id of 512 tokens."""
    reader = MooncakeReader(path, tokens_per_hash=CHUNK_TOKENS, partial_ids=partial)
    return [
        Access(
            *(request.arrival_s, request.prompt_tokens, request.hashes),
            len(request.hashes) if partial else (request.prompt_tokens - 1) // CHUNK_TOKENS,
        )
        for request in reader
    ]


def report(rows: list[Row], *, partial: bool) -> Report:
    """The table, and for each policy and capacity the gap to Belady that it closes."""
    ratios = {}
    for row in rows:
        found = row.to_dict()
        if row.policy not in (LRU, BELADY):
            where = f"{row.policy} at {row.capacity}"
            halves = (("", found), (", first half", found["first_half"]))
            for name, part in (*halves, (", second half", found["second_half"])):
                if part["gap_closed"] is not None:
                    ratios[f"gap from LRU to Belady closed by {where}{name}"] = part["gap_closed"]
            if found["times_lru"] is not None:
                ratios[f"hit tokens of {where} over LRU's"] = found["times_lru"]
    return Report(
        title="eviction policies, one cache, capacity in blocks of 512 tokens"
        + (", partly filled ids counted as full" if partial else ""),
        columns=COLUMNS,
        rows=[
            (
                *(row.capacity, row.policy, row.result.total.hit_tokens),
                *(round(row.result.total.share, 4), round(row.result.first_half.share, 4)),
                *(round(row.result.second_half.share, 4), round(row.result.seconds, 2)),
            )
            for row in rows
        ],
        ratios=ratios,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", required=True, metavar="FILE", help="Mooncake format")
    parser.add_argument("--partial", action="store_true", help="count partly filled ids as full")
    parser.add_argument("--policies", default=POLICIES, metavar="A,B")
    parser.add_argument("--capacities", default=CAPACITIES, metavar="N,M")
    parser.add_argument("--admission", default="all")
    options = parser.parse_args(arguments)
    requests = read(options.trace, partial=options.partial)
    capacities = [int(capacity) for capacity in options.capacities.split(",")]
    policies = options.policies.split(",")
    rows = list(study(requests, policies, capacities, options.admission, CHUNK_TOKENS))
    publish(report(rows, partial=options.partial), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
