"""Traces and generators to requests, and which replica takes which.

Plain Python: no torch, no Hydra. `source` is the way in.
"""

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.request import Request, Workload
from orchestrator.workload.source import (
    ReplicaStream,
    WorkloadSpec,
    check,
    count_requests,
    make_router,
    open_workload,
    stream_for_replica,
)

__all__ = [
    "ReplicaStream",
    "Request",
    "Workload",
    "WorkloadError",
    "WorkloadSpec",
    "check",
    "count_requests",
    "make_router",
    "open_workload",
    "stream_for_replica",
]
