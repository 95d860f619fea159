"""A run whose object server dies in the middle, and what the next runs find in the bucket."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from backends.block import BlockKey
from backends.tier.naming import block_name
from orchestrator.plan import Plan, read_plan
from orchestrator.workload.source import stream_for_replica
from orchestrator.workloads import workload_spec
from tests.orchestrator.harness import Launch, run_launch
from tests.servers.account import Bucket
from tests.servers.fixtures import UseAccount
from tests.servers.seaweedfs import SeaweedFs

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

REQUESTS = 300


def report_of(launch: Launch) -> dict[str, Any]:
    """Of a run that ended well, with every byte right."""
    assert launch.popen.returncode == 0, launch.told()
    report = launch.report()
    assert report["status"] == "ok"
    assert report["verification"]["blocks_wrong"] == 0
    return report


def warm_report_of(launch: Launch) -> dict[str, Any]:
    """Of a run that also loaded something: what a cold one loads depends on how fast it stores."""
    report = report_of(launch)
    assert report["verification"]["blocks_checked"] > 0
    return report


def hits(report: dict[str, Any], source: str) -> int:
    return sum(replica["hit_tokens"][source] for replica in report["replicas"])


def first_chunks(plan: Plan) -> tuple[str, ...]:
    """Names of the objects of the first chunks of the first requests, some of each replica."""
    spec, cache = workload_spec(plan.settings.workload, plan.cache), plan.cache
    replicas = plan.topology.data_parallel_size
    requests = [
        request
        for replica in range(replicas)
        for request in islice(stream_for_replica(spec, replicas, replica), 5)
    ]
    hashes = {request.hashes[cache.blocks_per_chunk - 1] for request in requests}
    return tuple(block_name(BlockKey(found, 0)) for found in hashes)


def test_a_run_outlives_its_server_and_the_next_ones_find_what_was_stored(
    tmp_path: Path, seaweedfs: SeaweedFs, seaweedfs_bucket: Bucket, use_account: UseAccount
) -> None:
    use_account(seaweedfs.account)
    bucket = (
        f"tiers.stack.object.url=s3://{seaweedfs_bucket.name}/outage",
        f"tiers.stack.object.endpoint={seaweedfs.account.endpoint}",
        "tiers.stack.object.allow_http=true",
    )
    with Launch(
        tmp_path / "first",
        *("profile=ci", "tiers=shm_fs_s3", f"workload.requests={REQUESTS}", *bucket),
        f"tiers.stack.fs.paths=[{tmp_path / 'disk'}]",
        *("tiers.stack.object.retries=1", "tiers.stack.object.breaker_failures=3"),
    ) as launch:
        launch.wait_serving()
        # What is behind a chunk that is not there is no hit, for whoever comes later.
        wanted = first_chunks(read_plan(launch.run.plan))
        launch.wait(
            "the beginning of a prompt in the bucket",
            lambda: any(name.endswith(wanted) for name in seaweedfs_bucket.sizes("outage/")),
        )
        seaweedfs.kill()
        launch.wait_end()
        report = report_of(launch)
    counted = report["tiers"]["object"]["counters"]
    assert counted["breaker_opened"] > 0
    assert report["tiers"]["object"]["errors"] > 0
    assert f"breaker opened {counted['breaker_opened']:,}" in launch.out

    seaweedfs.restart()
    # The same blocks by another stack, for another number of replicas.
    warm = warm_report_of(
        run_launch(
            tmp_path / "second",
            *("tiers=shm_object", "tier@tiers.stack.object=s3", *bucket),
            *("parallel=dp1_tp2", "workload.requests=40"),
        )
    )
    assert hits(warm, "object") > 0
    assert warm["tiers"]["object"]["loaded_bytes"] > 0


def test_a_second_run_over_objects_alone_is_warm(tmp_path: Path) -> None:
    given = (
        *("tiers=shm_object", "spawn=inline", "workload.requests=40"),
        f"tiers.stack.object.url=file:{tmp_path / 'objects'}",
    )
    first = report_of(run_launch(tmp_path / "first", *given))
    second = warm_report_of(run_launch(tmp_path / "second", *given))
    assert hits(second, "object") > hits(first, "object")
