"""An object store under the regions of real replicas: warm starts, secrets that stay outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit import REPO
from tests.orchestrator.harness import Launch
from tests.servers.account import Bucket
from tests.servers.fixtures import UseAccount
from tests.servers.proxy import Fault, Kind, Proxy
from tests.servers.seaweedfs import SeaweedFs

pytestmark = pytest.mark.multiproc


def launch(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launch.py", "profile=ci", f"hydra.run.dir={run_dir}", *overrides],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(run_dir: Path, *overrides: str) -> dict[str, Any]:
    done = launch(run_dir, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    return report


def hits(report: dict[str, Any], source: str) -> int:
    return sum(replica["hit_tokens"][source] for replica in report["replicas"])


def holding(run_dir: Path, word: str) -> list[str]:
    """Files below a directory whose name or content has a word in it."""
    return [
        str(path)
        for path in run_dir.rglob("*")
        if word in path.name or (path.is_file() and word.encode() in path.read_bytes())
    ]


def test_a_directory_of_objects_makes_the_next_run_warm_whatever_its_replicas(
    tmp_path: Path,
) -> None:
    given = (
        *("tiers=shm_fs_object", "spawn=inline", "workload.requests=40"),
        f"tiers.stack.object.url=file:{tmp_path / 'objects'}",
        f"tiers.stack.fs.paths=[{tmp_path / 'disk'}]",
    )
    first = run(tmp_path / "first", *given, "parallel=dp1_tp1")
    tier = first["tiers"]["object"]
    assert tier["stores"] > 0
    assert 0 < tier["usage_bytes"] <= tier["capacity_bytes"]
    assert tier["counters"]["requests"] >= tier["counters"]["stored"] > 0

    elsewhere = f"tiers.stack.fs.paths=[{tmp_path / 'another_disk'}]"
    second = run(tmp_path / "second", *given, elsewhere, "parallel=dp2_tp1")
    for replica in second["replicas"]:
        assert replica["hit_tokens"]["object"] > 0
    assert second["tiers"]["object"]["loaded_bytes"] > 0


def test_a_bucket_makes_the_next_run_warm_and_no_file_holds_the_secret(
    tmp_path: Path, seaweedfs_bucket: Bucket, use_account: UseAccount
) -> None:
    account = seaweedfs_bucket.account
    use_account(account)
    given = (
        "workload.requests=40",
        *("tiers=shm_fs_s3", f"tiers.stack.object.url=s3://{seaweedfs_bucket.name}/run"),
        *(f"tiers.stack.object.endpoint={account.endpoint}", "tiers.stack.object.allow_http=true"),
    )
    first = run(tmp_path / "runs" / "first", *given, f"tiers.stack.fs.paths=[{tmp_path / 'disk'}]")
    assert first["tiers"]["object"]["stores"] > 0
    assert first["tiers"]["object"]["capacity_bytes"] is None
    stored = [name for name in seaweedfs_bucket.sizes("run/") if name.endswith(".kvb")]
    plan = json.loads((tmp_path / "runs" / "first" / "plan.json").read_text())
    [namespace] = plan["object_store"]["namespaces"]
    inside = namespace.removeprefix(f"s3://{seaweedfs_bucket.name}/")
    assert stored
    assert all(name.startswith(inside) for name in stored)

    elsewhere = f"tiers.stack.fs.paths=[{tmp_path / 'another_disk'}]"
    run_dir = tmp_path / "runs" / "second"
    done = launch(run_dir, *given, elsewhere, "parallel=dp1_tp2")
    assert done.returncode == 0, done.stdout + done.stderr
    second = json.loads((run_dir / "report.json").read_text())
    assert second["verification"]["blocks_wrong"] == 0
    assert hits(second, "object") > 0
    assert holding(tmp_path / "runs", seaweedfs_bucket.name)
    for secret in (account.secret_key, account.access_key):
        assert holding(tmp_path, secret) == []
        assert secret not in done.stdout + done.stderr


def test_a_secret_in_a_file_of_the_users_own_is_left_in_no_run_directory(tmp_path: Path) -> None:
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "# @package _global_\ntiers: {stack: {object: {url: 's3://AK:s3cr3tMARKER@bucket/p'}}}\n"
    )
    run_dir = tmp_path / "run"
    done = launch(
        run_dir,
        *("tiers=shm_fs_s3", "experiment=mine", "--config-dir", str(tmp_path / "own")),
    )
    assert done.returncode == 2
    assert "tiers.stack.object.url holds a user name" in done.stderr
    assert "s3cr3tMARKER" not in done.stdout + done.stderr
    assert holding(run_dir, "s3cr3tMARKER") == []


@pytest.mark.slow
def test_a_run_goes_on_whatever_becomes_of_the_store_and_says_what_happened(
    tmp_path: Path,
    seaweedfs: SeaweedFs,
    seaweedfs_bucket: Bucket,
    proxy: Proxy,
    use_account: UseAccount,
) -> None:
    """503s, lost connections, a server that is stopped, and one that is killed and comes back."""
    use_account(seaweedfs_bucket.account)
    impatient = (
        *("connect_timeout_s=1", "read_timeout_s=1.5", "request_timeout_s=5"),
        *("retries=1", "breaker_failures=3", "breaker_s=0.2", "breaker_most_s=0.5"),
    )
    with Launch(
        tmp_path / "home",
        *("profile=ci", "tiers=shm_fs_s3", "workload.requests=1500"),
        # Few files, so that objects are loaded, too.
        *(f"tiers.stack.fs.paths=[{tmp_path / 'disk'}]", "tiers.stack.fs.capacity=4MiB"),
        f"tiers.stack.object.url=s3://{seaweedfs_bucket.name}/faults",
        *(f"tiers.stack.object.endpoint={proxy.endpoint}", "tiers.stack.object.allow_http=true"),
        *(f"tiers.stack.object.{setting}" for setting in impatient),
    ) as launch:
        launch.wait_serving()
        # Some are stored whatever follows, and however soon the run is over.
        launch.wait("stores", lambda: proxy.count("PUT", contains=".kvb", status=200) > 3)
        with proxy.failing(Fault(Kind.STATUS, status=503)):
            launch.wait("503s", lambda: proxy.count("PUT", status=503) > 3)
        proxy.fail(Fault(Kind.RESET), times=3)
        launch.wait("resets", lambda: sum(e.fault is Kind.RESET for e in proxy.exchanges) == 3)
        seaweedfs.pause()
        time.sleep(3)
        seaweedfs.resume()
        seaweedfs.kill()
        time.sleep(0.5)
        seaweedfs.restart()
        assert launch.wait_end() == 0, launch.told()
        report = launch.report()
    assert report["status"] == "ok"
    assert report["verification"]["blocks_checked"] > 0
    assert report["verification"]["blocks_wrong"] == 0
    counted = report["tiers"]["object"]["counters"]
    assert counted["stored"] > 0
    assert counted["throttled"] > 3
    assert counted["timeouts"] > 0
    assert counted["breaker_opened"] > 0
    assert counted["retries"] > 0
    assert f"breaker opened {counted['breaker_opened']:,}" in launch.out
