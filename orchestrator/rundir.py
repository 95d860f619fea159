"""What stands where in a run directory. Every path of a run is named here and nowhere else."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path


def new_run_id(now_s: float | None = None) -> str:
    """`20261130-042337-1f9c0a`: sorts by time, and two runs of one second still differ."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return f"{stamp}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class ReplicaDir:
    """Files of one replica: `<run_dir>/replicas/dp<data_parallel_index>/`."""

    path: Path

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def make_fresh(self) -> None:
        """`make`, and without what an earlier run in the same run directory left."""
        self.make()
        for pattern in (
            *("agent.log", "failure.json", "result.json"),
            *("rank*.events.jsonl", "rank*.std*.log", "rank*.error.json"),
        ):
            for path in self.path.glob(pattern):
                if path.is_file() or path.is_symlink():
                    path.unlink()

    @property
    def agent_log(self) -> Path:
        return self.path / "agent.log"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def events(self, rank: int) -> Path:
        return self.path / f"rank{rank}.events.jsonl"

    def stdout(self, rank: int) -> Path:
        return self.path / f"rank{rank}.stdout.log"

    def stderr(self, rank: int) -> Path:
        return self.path / f"rank{rank}.stderr.log"

    def error(self, rank: int) -> Path:
        return self.path / f"rank{rank}.error.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Files of one run."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    def forget_report(self) -> None:
        """Without what an earlier run in the same run directory found."""
        self.report.unlink(missing_ok=True)
        self.page.unlink(missing_ok=True)

    @property
    def zygote_log(self) -> Path:
        return self.path / "zygote.log"

    def temporary(self, run_id: str) -> Path:
        """The TMPDIR of every process of a run; it goes with the last of them."""
        return self.path / f".tmp-{run_id}"

    def half_written(self) -> list[Path]:
        """Files of writers that were killed before they could rename them."""
        return [
            *(path for kind in ("json", "html") for path in self.path.glob(f".*.{kind}.*.tmp")),
            *self.path.glob("replicas/dp*/.*.json.*.tmp"),
        ]

    def replica(self, data_parallel_index: int) -> ReplicaDir:
        return ReplicaDir(self.path / "replicas" / f"dp{data_parallel_index}")
