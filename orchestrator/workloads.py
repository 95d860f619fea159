"""From the configuration's workload group to the plain values that a stream is opened with."""

from __future__ import annotations

from dataclasses import asdict

from backends.config import CacheConfig
from orchestrator.schema import WorkloadConf
from orchestrator.workload.spec import WorkloadSpec


def workload_spec(conf: WorkloadConf, cache: CacheConfig) -> WorkloadSpec:
    """The workload with hashes of the engine's unit."""
    return WorkloadSpec(tokens_per_hash=cache.tokens_per_hash, **asdict(conf))
