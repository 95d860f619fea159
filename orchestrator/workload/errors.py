"""The one error type of workloads."""

from __future__ import annotations

from backends.errors import KvquayError


class WorkloadError(KvquayError):
    """A trace or a workload's parameters cannot be turned into requests."""
