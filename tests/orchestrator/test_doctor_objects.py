"""What a doctor finds out about an object store: real servers, each with something wrong."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.tier.filesystem.writer import Writer, this_writer
from backends.tier.object import doctor as tier_doctor
from backends.tier.object.doctor import CannotList, leftovers
from backends.tier.object.settings import ObjectSettings
from orchestrator.doctor import uploads
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.objects import measure_store
from orchestrator.doctor.result import ObjectFigures
from orchestrator.doctor.sample import Sample
from orchestrator.doctor.uploads import check_leftovers
from tests.orchestrator.doctor_kit import SECONDS, of, small_plan, stop, verdicts
from tests.servers.account import Account, Bucket
from tests.servers.fixtures import UseAccount
from tests.servers.process import free_ports

NOT_MEASURED = ("store_bytes_per_s", "load_bytes_per_s", "latency_s", "conditional_put")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(small_plan(tmp_path_factory.mktemp("plan")))


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(4)


def measure(
    sample: Sample, account: Account | None, url: str, **settings: Any
) -> tuple[ObjectFigures, Notes]:
    """With the environment that `account` has, and none where it is None."""
    if url.startswith("s3:"):
        settings = {"region": "us-east-1", "allow_http": True, **settings}
    notes = Notes(url)
    found = measure_store(
        ObjectSettings(url, concurrency=3, **settings),
        "over there",
        {} if account is None else account.environment(),
        sample,
        notes,
        stop(),
        SECONDS,
        SECONDS,
    )
    return found, notes


def at(bucket: Bucket, prefix: str) -> dict[str, str]:
    return {"url": f"s3://{bucket.name}/{prefix}", "endpoint": bucket.account.endpoint}


def test_a_server_is_measured_and_nothing_is_left_on_it(
    sample: Sample, seaweedfs_bucket: Bucket, use_account: UseAccount, prefix: str
) -> None:
    account = seaweedfs_bucket.account
    use_account(account)
    found, notes = measure(sample, account, **at(seaweedfs_bucket, prefix))
    assert set(verdicts(notes).values()) == {"ok"}, notes.checks
    assert found.conditional_put is True
    assert found.depth == 3
    assert found.clock_skew_s is not None
    assert abs(found.clock_skew_s) < 5
    assert found.alone is not None
    for figures in (found, found.alone):
        assert figures.store_bytes_per_s
        assert figures.load_bytes_per_s
    assert found.latency_s is not None
    assert found.latency_s.p50 > 0
    assert found.load_curve is not None
    assert seaweedfs_bucket.sizes(prefix) == {}


def test_a_store_that_overwrites_is_told_and_measured(
    sample: Sample, gateway_bucket: Bucket, use_account: UseAccount, prefix: str
) -> None:
    account = gateway_bucket.account
    use_account(account)
    found, notes = measure(sample, account, **at(gateway_bucket, prefix))
    check = of(notes, "object.conditional_put")
    assert (check.verdict, found.conditional_put) == ("warn", False)
    assert "nothing has to be done" in check.fix
    assert found.store_bytes_per_s
    assert gateway_bucket.sizes(prefix) == {}
    _, notes = measure(sample, account, **at(gateway_bucket, prefix), conditional="on")
    assert of(notes, "object.access").verdict == "fail"
    assert "set conditional to auto" in of(notes, "object.access").fix


def test_a_wrong_bucket_is_named(
    sample: Sample, seaweedfs_bucket: Bucket, use_account: UseAccount
) -> None:
    account = seaweedfs_bucket.account
    use_account(account)
    found, notes = measure(sample, account, "s3://not-there-at-all/p", endpoint=account.endpoint)
    check = of(notes, "object.bucket")
    assert check.verdict == "fail"
    assert "there is no bucket 'not-there-at-all'" in check.found
    assert account.endpoint in check.found
    assert "make it, or correct url" in check.fix
    assert all(getattr(found, name) is None for name in NOT_MEASURED)


def test_wrong_credentials_are_told_and_not_shown(
    sample: Sample, seaweedfs_bucket: Bucket, use_account: UseAccount, prefix: str
) -> None:
    wrong = replace(seaweedfs_bucket.account, secret_key="wrong" + secrets.token_hex(16))
    use_account(wrong)
    _, notes = measure(sample, wrong, **at(seaweedfs_bucket, prefix))
    check = of(notes, "object.credentials")
    assert check.verdict == "fail"
    assert "access denied (SignatureDoesNotMatch)" in check.found
    assert "AWS_SECRET_ACCESS_KEY" in check.fix
    assert wrong.secret_key not in str(notes.checks)


def test_a_key_that_may_only_read_is_told_which_right_it_needs(
    sample: Sample, seaweedfs: Any, seaweedfs_bucket: Bucket, use_account: UseAccount, prefix: str
) -> None:
    use_account(seaweedfs.reader)
    _, notes = measure(sample, seaweedfs.reader, **at(seaweedfs_bucket, prefix))
    check = of(notes, "object.credentials")
    assert check.verdict == "fail"
    assert "may not write" in check.found
    assert "s3:PutObject" in check.fix


def test_missing_credentials_are_told_before_anything_is_asked(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    _, notes = measure(sample, None, "s3://bucket/p", endpoint=endpoint)
    assert set(verdicts(notes)) == {"object.credentials"}
    check = of(notes, "object.credentials")
    assert "the environment has none" in check.found
    assert "export AWS_ACCESS_KEY_ID" in check.fix


@pytest.fixture
def account(use_account: UseAccount) -> Account:
    """Of no server."""
    nobody = Account.fresh("http://127.0.0.1:1")
    use_account(nobody)
    return nobody


def test_an_endpoint_that_is_down_is_told(sample: Sample, account: Account) -> None:
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    found, notes = measure(sample, account, "s3://bucket/p", endpoint=endpoint)
    check = of(notes, "object.endpoint")
    assert check.verdict == "fail"
    assert f"nobody listens at 127.0.0.1:{port}" in check.found
    assert "tiers.stack.object.endpoint" in check.fix
    assert all(getattr(found, name) is None for name in NOT_MEASURED)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which connections are taken and nothing is ever answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_an_endpoint_that_hangs_is_told_and_not_waited_for(
    sample: Sample, account: Account, silent: int
) -> None:
    _, notes = measure(
        sample,
        account,
        "s3://bucket/p",
        endpoint=f"http://127.0.0.1:{silent}",
        read_timeout_s=0.2,
        request_timeout_s=0.3,
    )
    check = of(notes, "object.endpoint")
    assert check.verdict == "fail"
    assert "takes connections, and answers no request" in check.found


@pytest.mark.parametrize(("ahead_s", "verdict"), [(-100, "warn"), (-1000, "fail"), (0, "ok")])
def test_clocks_that_differ_are_told(
    sample: Sample,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: int,
    verdict: str,
) -> None:
    class Clock:
        time = staticmethod(tier_doctor.time.time)
        time_ns = staticmethod(lambda: now_ns() + ahead_s * 10**9)

    now_ns = tier_doctor.time.time_ns
    monkeypatch.setattr(tier_doctor, "time", Clock)
    found, notes = measure(sample, None, f"file:{tmp_path}/objects")
    check = of(notes, "object.clock")
    assert check.verdict == verdict
    assert found.clock_skew_s == pytest.approx(-ahead_s, abs=2)
    if verdict != "ok":
        assert f"{-ahead_s} s ahead of" in check.found
        assert "set this machine's clock" in check.fix


def test_a_directory_of_objects_is_left_as_it_was(sample: Sample, tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    found, notes = measure(sample, None, f"file:{new}")
    assert set(verdicts(notes).values()) == {"ok"}, notes.checks
    assert found.load_bytes_per_s
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    measure(sample, None, f"file:{tmp_path}/old")
    assert list((tmp_path / "old").rglob("*")) == []


def test_a_directory_that_cannot_be_one_is_told(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    _, notes = measure(sample, None, f"file:{tmp_path}/file")
    assert of(notes, "object.access").verdict == "fail"


def test_what_killed_doctors_left_goes_and_what_living_ones_use_stays(
    sample: Sample, seaweedfs_bucket: Bucket, use_account: UseAccount, prefix: str, tmp_path: Path
) -> None:
    use_account(seaweedfs_bucket.account)
    own = this_writer()
    dead, elsewhere = Writer(own.host, 2**22 + 1, 1, 7), Writer(own.host ^ 1, 5, 1, 7)
    names = [f"{writer.name}/{n}" for writer in (own, dead, elsewhere) for n in range(2)]
    others = [*names, "no-writer/1", "0/1"]
    for name in others:
        seaweedfs_bucket.put(f"{prefix}/doctor/{name}", b"block")
        path = tmp_path / "doctor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"block")
    stays = {name for name in others if not name.startswith(dead.name)}

    _, notes = measure(sample, seaweedfs_bucket.account, **at(seaweedfs_bucket, prefix))
    assert of(notes, "object.swept").found == "removed 2 objects of doctors that were killed"
    found = seaweedfs_bucket.sizes(prefix)
    assert {name.removeprefix(f"{prefix}/doctor/") for name in found} == stays

    measure(sample, None, f"file:{tmp_path}")
    left = [path for path in (tmp_path / "doctor").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "doctor")) for path in left} == stays
    assert not (tmp_path / "doctor" / dead.name).exists()


def test_old_unfinished_uploads_are_told_with_the_rule_that_removes_them(
    seaweedfs_bucket: Bucket,
    use_account: UseAccount,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_account(seaweedfs_bucket.account)
    settings = ObjectSettings(**at(seaweedfs_bucket, prefix), region="us-east-1", allow_http=True)
    client, name = seaweedfs_bucket.client, f"{prefix}/half"
    upload = client.create_multipart_upload(Bucket=seaweedfs_bucket.name, Key=name)
    try:
        notes = Notes(settings.url)
        check_leftovers(settings, notes)
        assert of(notes, "object.leftovers").verdict == "ok"
        monkeypatch.setattr(uploads, "OLD_S", -5.0)
        notes = Notes(settings.url)
        check_leftovers(settings, notes)
        check = of(notes, "object.leftovers")
        assert check.verdict == "warn"
        assert check.found.startswith("1 unfinished upload")
        assert "AbortIncompleteMultipartUpload" in check.fix
    finally:
        client.abort_multipart_upload(
            Bucket=seaweedfs_bucket.name, Key=name, UploadId=upload["UploadId"]
        )


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_stores_that_list_no_unfinished_uploads_say_so(scheme: str) -> None:
    settings = ObjectSettings(f"{scheme}://bucket/p")
    with pytest.raises(CannotList, match="cannot be listed on this store; set a lifecycle rule"):
        leftovers(settings)
    notes = Notes(settings.url)
    check_leftovers(settings, notes)
    check = of(notes, "object.leftovers")
    assert (check.verdict, check.found) == (
        "warn",
        "unfinished uploads cannot be listed on this store",
    )
    assert check.fix.startswith("set a lifecycle rule on bucket: ")
