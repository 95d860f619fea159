"""What a sweep costs beyond its jobs' own work, and what keeping one process with torch saves.

    python benchmarks/sweep.py [--jobs 4]

A job's own work is `duration_s` of its report: from its launch until its last process has gone.
All the rest of the sweep's time, Python's start and the page included, is overhead.
"""

from __future__ import annotations

import sys

# Beside this file stands a `copy.py`, which must not be taken for the standard library's.
sys.path.pop(0)

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

REPO = Path(__file__).resolve().parents[1]


def run(jobs: int, home: Path) -> dict[str, Any]:
    """Seconds of one sweep over `jobs` small jobs."""
    seeds = ",".join(str(seed) for seed in range(jobs))
    began_s = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "launch.py", "-m", f"hydra.sweep.dir={home}"),
            *("profile=ci", "parallel=dp1_tp1", "view=quiet", f"workload.seed={seeds}"),
        ],
        cwd=REPO,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall_s = time.perf_counter() - began_s
    reports = [json.loads((home / str(n) / "report.json").read_text()) for n in range(jobs)]
    own_s = [report["duration_s"] for report in reports]
    return {
        "jobs": jobs,
        "wall_s": round(wall_s, 2),
        "own_s": [round(s, 2) for s in own_s],
        "overhead_s_per_job": round((wall_s - sum(own_s)) / jobs, 3),
        "ready_s_first": round(reports[0]["ready_s"], 2),
        "ready_s_others": round(mean(report["ready_s"] for report in reports[1:]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="at least 2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        print(json.dumps(run(args.jobs, Path(home) / "sweep"), indent=2))


if __name__ == "__main__":
    main()
