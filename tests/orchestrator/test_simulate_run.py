"""A real run in lockstep comes to what the simulator says: the trace, through all tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.simulate.compare import Run, compare, read_run, remarks
from orchestrator.simulate.run import predict
from orchestrator.simulate.timing import NO_TIME
from tests.kit import REPO
from tests.orchestrator.harness import run_launch

pytestmark = pytest.mark.multiproc
TRACE = REPO.parent / "shared" / "traces" / "conversation_trace.jsonl"
# A part of the trace in which conversations go on, and capacities that what they come back for has
# been evicted from the region, or from the disk as well. Large chunks and small heads: few files.
OVERRIDES = (
    *("experiment=reproducible", "parallel=dp2_tp2", "tiers=shm_fs_object", "workload=trace"),
    *(f"workload.path={TRACE}", "workload.offset=1320", "workload.requests=160"),
    *("model.num_layers=1", "model.head_size=4", "region.blocks_per_chunk=128"),
    *("engine.max_tokens_per_step=65536", "engine.device_cache_size=512KiB"),
    *("region.size=8MiB", "tiers.stack.fs.capacity=24MiB"),
    "tiers.stack.object.capacity=unbounded",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if not TRACE.is_file():
        pytest.skip(f"the published trace is not at {TRACE}")
    home: Path = tmp_path_factory.mktemp("lockstep")
    launch = run_launch(
        home,
        *OVERRIDES,
        f"tiers.stack.fs.paths=[{home / 'disk'}]",
        f"tiers.stack.object.url=file:{home / 'objects'}",
    )
    assert launch.popen.returncode == 0, launch.told()
    return read_run(launch.run.path)


def test_every_path_was_taken_and_every_byte_was_right(run: Run) -> None:
    report = run.report
    assert report["status"] == "ok"
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    for source in ("device", "shm", "fs", "object"):
        assert sum(each["hit_tokens"][source] for each in report["replicas"]) > 0, source
    for name in ("shm", "fs"):
        assert report["tiers"][name]["evictions"] > 0, name


def test_hit_tokens_bytes_and_evictions_are_those_of_the_simulator(run: Run) -> None:
    figures = compare(predict(run.plan, NO_TIME), run, timed=())
    assert [figure for figure in figures if figure.error != 0.0] == []
    assert {figure.name for figure in figures} >= {"hit tokens object", "fs loaded", "fs evictions"}
    assert remarks(run) == []
