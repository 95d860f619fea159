"""Which replica takes a request.

A router is a pure function of the requests that it has been shown: it sees no cache, no clock
and no process. Every replica's leader runs its own over the same stream, and all come to the
same decisions without a word between them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.request import Request

POLICIES = ("round_robin", "least_loaded", "prefix_affinity")
INDEX_ENTRIES = 1 << 17
"""Bound of the prefix index: about 30 MB with few replicas."""


class Router:
    """Gives each request of a stream to one of `replicas` replicas.

    round_robin: in turn.

    least_loaded: to the replica with the least work left. A request's work is its prompt and
    output tokens; every replica works off `tokens_per_s` in the stream's own time. Where several
    have the same, to the one that was sent the least work of all, and then to the lowest index:
    in quiet traffic all are idle, and the index alone would give everything to replica 0.

    prefix_affinity: to a replica that was sent the longest prefix of the request's hashes
    before, of several the least loaded. Not so where that one has more than `max_imbalance`
    times the mean work of all left: then as least_loaded. So is a request of which no prefix is
    known.

    Prefixes are remembered at every `stride`-th hash, in an index of at most `index_entries`
    hashes that forgets the least recently used first, a prefix never before its extension. An
    entry is a hash and one bit a replica. Two prefixes that part between two strides look the
    same to the router; that costs a hit, never a byte.

    Raises WorkloadError for parameters that cannot be right.
    """

    def __init__(
        self,
        policy: str,
        replicas: int,
        *,
        tokens_per_s: float = 20_000.0,
        max_imbalance: float = 1.5,
        stride: int = 1,
        index_entries: int = INDEX_ENTRIES,
    ) -> None:
        if policy not in POLICIES:
            raise WorkloadError(f"policy is {policy!r}, expected one of {', '.join(POLICIES)}")
        if replicas < 1 or stride < 1 or index_entries < 1:
            raise WorkloadError(
                f"replicas is {replicas}, stride is {stride}, index_entries is {index_entries}, "
                "expected each to be at least 1"
            )
        if not (0 < tokens_per_s < math.inf and 1 <= max_imbalance < math.inf):
            raise WorkloadError(
                f"tokens_per_s is {tokens_per_s}, max_imbalance is {max_imbalance}, expected more "
                "than 0 and at least 1"
            )
        self._policy = policy
        self._loads = [0.0] * replicas
        self._sent_tokens = [0] * replicas
        self._tokens_per_s = tokens_per_s
        self._max_imbalance = max_imbalance
        self._stride = stride
        self._index_entries = index_entries
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._now_s = 0.0
        self._routed = 0

    @property
    def loads(self) -> tuple[float, ...]:
        """Tokens that each replica has still to work off, as of the latest request."""
        return tuple(self._loads)

    @property
    def needs_hashes(self) -> bool:
        """Whether the decision looks at `Request.hashes`."""
        return self._policy == "prefix_affinity"

    @property
    def index_size(self) -> int:
        """Hashes that are remembered."""
        return len(self._holders)

    def route(self, request: Request) -> int:
        """The replica that takes the request; to be called once for each, in stream order."""
        self._work_off(request.arrival_s)
        if self._policy == "round_robin":
            chosen = self._routed % len(self._loads)
        elif self._policy == "least_loaded":
            chosen = self._least_loaded(range(len(self._loads)))
        else:
            chosen = self._with_affinity(request.hashes[self._stride - 1 :: self._stride])
        work_tokens = request.prompt_tokens + request.output_tokens
        self._loads[chosen] += work_tokens
        self._sent_tokens[chosen] += work_tokens
        self._routed += 1
        return chosen

    def _work_off(self, now_s: float) -> None:
        done = max(0.0, now_s - self._now_s) * self._tokens_per_s
        self._now_s = max(self._now_s, now_s)
        self._loads = [max(0.0, load - done) for load in self._loads]

    def _least_loaded(self, among: Sequence[int]) -> int:
        return min(among, key=lambda i: (self._loads[i], self._sent_tokens[i], i))

    def _with_affinity(self, prefix: Sequence[bytes]) -> int:
        holders = 0
        for key in prefix:
            deeper = self._holders.get(key, 0)
            if not deeper:
                break
            holders = deeper
        everyone = range(len(self._loads))
        chosen = -1
        if holders:
            chosen = self._least_loaded([i for i in everyone if holders >> i & 1])
        if chosen < 0 or self._overloaded(chosen):
            chosen = self._least_loaded(everyone)
        self._remember(prefix, chosen)
        return chosen

    def _overloaded(self, replica: int) -> bool:
        mean = sum(self._loads) / len(self._loads)
        return self._loads[replica] > self._max_imbalance * mean

    def _remember(self, prefix: Sequence[bytes], replica: int) -> None:
        # From the last to the first, so that the first ends up as the most recent.
        for key in reversed(prefix):
            self._holders[key] = self._holders.pop(key, 0) | 1 << replica
        while len(self._holders) > self._index_entries:
            self._holders.popitem(last=False)
