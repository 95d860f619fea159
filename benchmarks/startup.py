"""How fast DP2 x TP2 is ready, against bare torchrun of a script that makes a gloo group.

    python benchmarks/startup.py [--rounds N] [--json FILE]

Both start four workers on this machine, in turn, several times; the ratio is that of the medians.
For kvquay, `ready` counts from the start of the `python launch.py` process, configuration and plan
included, to the last of four workers being able to serve, region mapped and tensors made; `ready_s`
is what its report says, which counts from the end of planning. For torchrun it counts from the
start of the process to the last of four workers having imported torch and made the group.
"""

from __future__ import annotations

import sys

# Beside this file stands a `copy.py`, which must not be taken for the standard library's.
sys.path.pop(0)
sys.path.insert(0, __file__.rpartition("/benchmarks/")[0] or "..")

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks._report import Report, make_parser, publish

REPO = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120
BARE = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    file.write(str(time.time()))
dist.destroy_process_group()
"""


def kvquay_ready_s(directory: Path) -> tuple[float, float]:
    """Seconds until the last worker was ready: from the process's start, and as reported."""
    run_dir = directory / "run"
    started_s = time.time()
    subprocess.run(
        [
            *(sys.executable, "launch.py", "profile=ci", "parallel=dp2_tp2"),
            *("workload.requests=4", f"hydra.run.dir={run_dir}"),
        ],
        cwd=REPO,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )
    ready = [
        event["t"]
        for path in run_dir.glob("replicas/*/*.events.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["phase"] == "ready"
    ]
    assert len(ready) == 4, ready
    report = json.loads((run_dir / "report.json").read_text())
    return max(ready) - started_s, report["ready_s"]


def torchrun_ready_s(directory: Path) -> float:
    script = directory / "bare.py"
    script.write_text(BARE)
    torchrun = Path(sys.executable).with_name("torchrun")
    started_s = time.time()
    subprocess.run(
        [
            *(str(torchrun), "--standalone", "--nproc-per-node", "4"),
            *(str(script), str(directory)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )
    ready = [float((directory / str(rank)).read_text()) for rank in range(4)]
    return max(ready) - started_s


def main() -> None:
    parser = make_parser("Start of DP2 x TP2 until every worker is ready, against bare torchrun.")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each")
    args = parser.parse_args()
    whole, reported, bare = [], [], []
    for number in range(args.rounds + 1):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            process_s, ready_s = kvquay_ready_s(Path(one))
            torchrun_s = torchrun_ready_s(Path(other))
        print(
            f"round {number or 'warm-up'}: kvquay {process_s:.2f} s (ready_s {ready_s:.2f}), "
            f"torchrun {torchrun_s:.2f} s",
            file=sys.stderr,
        )
        if number:  # the first one reads torch from the disk
            whole.append(process_s)
            reported.append(ready_s)
            bare.append(torchrun_s)

    series = {
        "kvquay DP2 x TP2, from process start": whole,
        "kvquay DP2 x TP2, ready_s of report.json": reported,
        "torchrun --standalone --nproc-per-node 4": bare,
    }
    median = statistics.median
    publish(
        Report(
            title="seconds until the last of 4 workers is ready",
            columns=("what", "min", "median", "max"),
            rows=[(name, min(v), median(v), max(v)) for name, v in series.items()],
            ratios={
                "process start to ready/torchrun": median(whole) / median(bare),
                "ready_s/torchrun": median(reported) / median(bare),
            },
        ),
        args.json,
    )


if __name__ == "__main__":
    main()
