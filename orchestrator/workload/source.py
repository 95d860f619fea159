"""From a workload's plain values to its requests: all of them, or those of one replica."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.workload.check import check
from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.mooncake import MooncakeReader, count_lines
from orchestrator.workload.multi_turn import MultiTurnGenerator
from orchestrator.workload.request import Request, Workload
from orchestrator.workload.router import Router
from orchestrator.workload.spec import WorkloadSpec
from orchestrator.workload.trace_line import MOONCAKE_TOKENS_PER_ID

__all__ = [
    "ReplicaStream",
    "WorkloadSpec",
    "check",
    "count_requests",
    "make_router",
    "open_workload",
    "stream_for_replica",
]

MULTI_TURN_INDEX_TOKENS = 64
"""Messages are short, so prefixes must be told apart more finely than in a trace."""


def open_workload(spec: WorkloadSpec) -> Workload:
    """The stream of all replicas' requests. Raises WorkloadError with all that `check` finds."""
    if problems := check(spec):
        raise WorkloadError("; ".join(f"workload {name} {message}" for name, message in problems))
    if spec.kind == "trace":
        assert spec.path is not None
        return MooncakeReader(
            spec.path,
            tokens_per_hash=spec.tokens_per_hash,
            salt=spec.salt,
            requests=spec.requests,
            offset=spec.offset,
            on_bad_line=spec.on_bad_line,
        )
    return _generator(spec)


def _generator(spec: WorkloadSpec) -> MultiTurnGenerator:
    return MultiTurnGenerator(
        spec.shape(),
        seed=spec.seed,
        tokens_per_hash=spec.tokens_per_hash,
        salt=spec.salt,
        requests=spec.requests,
    )


def make_router(spec: WorkloadSpec, replicas: int) -> Router:
    """The router that every leader runs over the stream of `open_workload(spec)`."""
    tokens = MOONCAKE_TOKENS_PER_ID if spec.kind == "trace" else MULTI_TURN_INDEX_TOKENS
    return Router(
        spec.policy,
        replicas,
        tokens_per_s=spec.tokens_per_s,
        max_imbalance=spec.max_imbalance,
        stride=max(1, tokens // max(1, spec.tokens_per_hash)),
    )


class ReplicaStream(Iterator[Request]):
    """The requests that one replica takes, with the bad lines passed over on the way."""

    def __init__(self, workload: Workload, router: Router, index: int) -> None:
        self._workload = workload
        self._requests: Iterator[Request]
        if router.needs_hashes:
            self._requests = (r for r in workload if router.route(r) == index)
        else:
            self._requests = workload.select(lambda r: router.route(r) == index)

    def __next__(self) -> Request:
        return next(self._requests)

    @property
    def skipped(self) -> int:
        """Bad lines so far, of the whole file and not of this replica only."""
        return self._workload.skipped

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """The first few of them."""
        return self._workload.skip_reasons


def stream_for_replica(spec: WorkloadSpec, replicas: int, index: int) -> ReplicaStream:
    """The requests that replica `index` of `replicas` takes, in order of arrival.

    `Request.index` is the place in the whole stream. Over all replicas every request comes once.
    Raises WorkloadError, also later from the iteration where a line of a trace is bad.
    """
    if not 0 <= index < replicas:
        raise WorkloadError(f"replica index is {index}, expected 0 <= index < {replicas}")
    return ReplicaStream(open_workload(spec), make_router(spec, replicas), index)


def count_requests(spec: WorkloadSpec) -> int:
    """How many requests the whole stream has, found without hashing: for progress bars.

    Exact but for a trace with bad lines, which are counted as well. Raises WorkloadError.
    """
    workload = open_workload(spec)
    if isinstance(workload, MultiTurnGenerator):
        return workload.count()
    assert spec.path is not None
    most = None if spec.requests is None else spec.offset + spec.requests
    return max(0, count_lines(spec.path, most) - spec.offset)
