"""The jobs of a sweep side by side: what each did, and which failed."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

from orchestrator.job import Job, Outcome
from orchestrator.render import print_sweep


class Sweep:
    """Collects outcomes as they come; shows one table at the end, failed jobs first."""

    def __init__(self) -> None:
        self._jobs: list[dict[str, Any]] = []

    def add(self, number: int, job: Job, outcome: Outcome) -> None:
        report = outcome.report or {}
        replicas = report.get("replicas", [])
        tokens = sum(replica["prompt_tokens"] for replica in replicas)
        hits = sum(sum(replica["hit_tokens"].values()) for replica in replicas)
        shm = report.get("tiers", {}).get("shm", {})
        self._jobs.append(
            {
                "number": number,
                "overrides": job.overrides,
                "status": report.get("status", "ok" if outcome.exit_status == 0 else "failed"),
                "reason": outcome.reason,
                "hit_share": hits / tokens if tokens else None,
                "store_bytes_per_s": shm.get("store_bytes_per_s"),
                "load_bytes_per_s": shm.get("load_bytes_per_s"),
                "ready_s": report.get("ready_s"),
                "run_dir": os.path.relpath(job.run_dir),
            }
        )

    def show(self, console: Console) -> None:
        if self._jobs:
            print_sweep(console, self._jobs)
