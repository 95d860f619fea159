"""The object tier in a configuration: secrets kept out, credentials at hand, what is planned."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from backends.tier.naming import namespace_name
from backends.tier.object.settings import ObjectSettings
from orchestrator import object_store
from orchestrator.object_store import absolute_url, check_credentials, check_url, lifecycle
from orchestrator.overrides import check_overrides
from orchestrator.plan import read_plan
from orchestrator.problems import ConfigProblems, Problem, redact
from orchestrator.validate import validate
from tests.kit import CONF, compose_config, plan_for

SECRET = "s3cr3tMARKER"
URL = "tiers.stack.object.url"
ENDPOINT = "tiers.stack.object.endpoint"
PAIR = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET}
BUCKET = ("tiers=shm_fs_s3", f"{URL}=s3://bucket/p", f"{ENDPOINT}=https://127.0.0.1:9")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no machine of a provider's, whatever this one is."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    vendor = tmp_path / "vendor"
    vendor.write_text("Somebody else\n")
    monkeypatch.setattr(object_store, "_VENDOR", vendor)


def problems(run_dir: Path, *overrides: str, **environment: str) -> list[Problem]:
    try:
        validate(compose_config(*overrides), run_dir, environment)
    except ConfigProblems as error:
        return list(error.problems)
    return []


def credentials(url: str, endpoint: str | None = None, **environment: str) -> list[str]:
    settings = ObjectSettings(url, endpoint, region="here")
    return [str(problem) for problem in check_credentials(settings, environment)]


@pytest.mark.parametrize(
    "typed",
    [
        f"{URL}=s3://AK:{SECRET}@bucket/p",
        f"{URL}=s3://AK:{SECRET}/more+x@bucket",
        f"{URL}=s3://{SECRET}@bucket/p",
        f"{URL}='s3://bucket/p?X-Amz-Signature={SECRET}'",
        f"{URL}=s3://bucket/p?sig={SECRET}",
        f"{URL}='gs://bucket/p#{SECRET}'",
        f"{URL}=[s3://AK:{SECRET}@bucket]",
        f"{ENDPOINT}=https://AK:{SECRET}@host:9000",
        f"{ENDPOINT}='https://host?token={SECRET}'",
        f"+tiers.stack.object.secret_access_key={SECRET}",
        f"tiers.stack.object.access_key={SECRET}",
    ],
)
@pytest.mark.parametrize("sweep", [(), ("-m",)])
def test_a_secret_on_the_command_line_is_refused_and_not_shown(
    typed: str, sweep: tuple[str, ...]
) -> None:
    """Before Hydra has written anything, in a sweep too."""
    found = check_overrides([*sweep, "tiers=shm_fs_s3", typed], CONF)
    assert found
    assert SECRET not in str(ConfigProblems(found)) + repr(found)


def test_a_secret_in_a_sweep_of_urls_is_refused() -> None:
    (found,) = check_overrides(["-m", f"{URL}=s3://a/b,s3://AK:{SECRET}@a/b"], CONF)
    assert found.key == URL
    assert "environment" in found.fix


def test_a_secret_that_an_interpolation_brings_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", f"s3://AK:{SECRET}@bucket/p")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://AK:{SECRET}@host")
    found = problems(tmp_path, "tiers=shm_fs_s3", f"{URL}=${{oc.env:STORE}}", **PAIR)
    assert {problem.key for problem in found} == {URL, ENDPOINT}
    assert SECRET not in repr(found)


def test_places_without_secrets_are_taken() -> None:
    for url in ("s3://bucket/p", "file:kvcache", "file:///data/a@b/c", "gs://b", "az://c/p"):
        assert check_url(URL, url) == []
    for endpoint in ("https://host:9000", "http://127.0.0.1:8333", "https://[::1]:9000"):
        assert check_url(ENDPOINT, endpoint) == []


def test_redacted_text_keeps_what_is_no_secret() -> None:
    assert redact("s3://k:a/b@host/p?x=1 and https://h/docs") == (
        "s3://***@host/p?*** and https://h/docs"
    )
    assert redact("file:///a@b/c") == "file:///a@b/c"


def test_the_missing_url_of_a_bucket_is_told_with_the_other_mistakes(tmp_path: Path) -> None:
    found = problems(tmp_path, "tiers=shm_fs_s3", "engine.tokens_per_hash=5")
    assert [problem.key for problem in found] == [URL, "engine.tokens_per_hash"]
    assert "is missing" in found[0].limit
    assert f"{URL}=s3://BUCKET/PREFIX" in found[0].fix


def test_what_the_tier_itself_refuses_is_told_by_its_key(tmp_path: Path) -> None:
    plain = ("tiers=shm_fs_s3", f"{URL}=s3://bucket/p", f"{ENDPOINT}=http://host:9")
    (found,) = problems(tmp_path, *plain, **PAIR)
    assert "not encrypted" in str(found)
    assert "allow_http" in str(found)
    assert problems(tmp_path, *plain, "tiers.stack.object.allow_http=true", **PAIR) == []
    (found,) = problems(tmp_path, *BUCKET, "tiers.stack.object.retry_s=nan", **PAIR)
    assert found.key == "tiers.stack.object.retry_s"


def test_missing_credentials_are_told_by_name_and_never_by_value(tmp_path: Path) -> None:
    assert problems(tmp_path, *BUCKET, **PAIR) == []
    (found,) = problems(tmp_path, *BUCKET)
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(found)
    (found,) = problems(tmp_path, *BUCKET, AWS_ACCESS_KEY_ID=SECRET)
    assert "AWS_SECRET_ACCESS_KEY is not set" in str(found)
    assert "AWS_ACCESS_KEY_ID" not in str(found)
    assert SECRET not in repr(found)
    # Another machine's environment is not this one's.
    assert problems(tmp_path, *BUCKET, "spawn.check_machine=false") == []


def test_credentials_may_come_from_elsewhere(tmp_path: Path) -> None:
    own = "https://host:9"
    assert credentials("s3://b/p", own, AWS_SKIP_SIGNATURE="true") == []
    assert credentials("s3://b/p", own, AWS_WEB_IDENTITY_TOKEN_FILE="/t") == []
    assert credentials("s3://b/p", own, AWS_PROFILE="mine") == []
    assert "none" in credentials("gs://b/p")[0]
    assert credentials("gs://b/p", GOOGLE_APPLICATION_CREDENTIALS="/key.json") == []
    (told,) = credentials("az://c/p", AZURE_STORAGE_ACCOUNT_KEY=SECRET)
    assert "AZURE_STORAGE_ACCOUNT_NAME is not set" in told
    name = {"AZURE_STORAGE_ACCOUNT_NAME": "me"}
    assert credentials("az://c/p", AZURE_STORAGE_ACCOUNT_KEY=SECRET, **name) == []
    (told,) = credentials("az://c/p", AZURE_CLIENT_ID="1", AZURE_TENANT_ID="2", **name)
    assert "AZURE_CLIENT_SECRET is not set" in told
    assert credentials("file:///x") == credentials("memory:///") == []
    # A machine of the provider's own may have a role.
    assert credentials("s3://b/p") != []
    object_store._VENDOR.write_text("Amazon EC2\n")
    assert credentials("s3://b/p") == []
    assert credentials("s3://b/p", own) != []
    object_store._VENDOR.unlink()
    assert credentials("s3://b/p") == []


def test_an_endpoint_of_the_environment_is_the_planned_one_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere:9")
    given = ("tiers=shm_fs_s3", f"{URL}=s3://bucket/p")
    config = compose_config(*given)
    assert config.tiers.stack.object.endpoint == "https://elsewhere:9"
    assert problems(tmp_path, *given, **PAIR, AWS_ENDPOINT_URL="https://elsewhere:9") == []
    (found,) = problems(tmp_path, *BUCKET, **PAIR, AWS_ENDPOINT_URL_S3="https://third:9")
    assert (found.key, "AWS_ENDPOINT_URL_S3" in found.limit) == (ENDPOINT, True)
    null = f"{ENDPOINT}=null"
    aws = ("tiers.stack.object.region=here", null)
    (found,) = problems(tmp_path, *given, *aws, **PAIR, AWS_ENDPOINT="https://third:9")
    assert found.key == ENDPOINT
    (found,) = problems(tmp_path, *given, null, **PAIR)
    assert (found.key, "AWS_REGION" in found.limit) == ("tiers.stack.object.region", True)


def test_a_bundle_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, *BUCKET, "tiers.stack.object.ca_bundle=/no/such.pem", **PAIR)
    assert found.key == "tiers.stack.object.ca_bundle"


def test_a_directory_of_objects_is_checked_like_one_of_files(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "tiers=shm_object", f"{URL}=file:/proc/version/x")
    assert (found.key, "not a directory" in found.limit) == (URL, True)
    large = "tiers.stack.object.capacity=1000TiB"
    (found,) = problems(tmp_path, "tiers=shm_object", f"{URL}=file:{tmp_path}/o", large)
    assert found.key == "tiers.stack.object.capacity"
    both = f"tiers.stack.fs.paths=[{tmp_path}/both]"
    (found,) = problems(tmp_path, "tiers=shm_fs_object", both, f"{URL}=file:{tmp_path}/both/in")
    assert "of its own" in found.fix


def test_a_directory_is_taken_from_where_the_command_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_url("file:kvcache") == f"file://{tmp_path}/kvcache"
    assert absolute_url("file:~/kv") == f"file://{tmp_path}/home/kv"
    assert absolute_url("s3://bucket/p") == "s3://bucket/p"


def test_the_plan_says_where_objects_go_and_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PAIR.items():
        monkeypatch.setenv(name, value)
    plan = plan_for(tmp_path, *BUCKET)
    found = plan.object_store
    assert found is not None
    fingerprint = bytes.fromhex(plan.fingerprint)
    assert found.namespaces == (f"s3://bucket/p/{namespace_name(fingerprint, None)}/",)
    assert found.object_bytes == plan.region.row_bytes
    assert found.upload_requests == 1
    assert found.million_tokens_objects == -(-1_000_000 // plan.region.tokens_per_row)
    assert (found.capacity_bytes, found.capacity_objects) == (None, None)
    rule = json.loads(shlex.split(found.lifecycle or "")[6])["Rules"][0]
    assert rule["Filter"] == {"Prefix": "p/"}
    assert read_plan(tmp_path / "plan.json") == plan
    assert SECRET not in (tmp_path / "plan.json").read_text()

    isolated = plan_for(tmp_path, *BUCKET, "tiers.stack.object.placement=per_replica").object_store
    assert isolated is not None
    assert isolated.namespaces == tuple(
        f"s3://bucket/p/{namespace_name(fingerprint, index)}/" for index in range(2)
    )
    bounded = plan_for(tmp_path, *BUCKET, "tiers.stack.object.capacity=1GiB").object_store
    assert bounded is not None
    assert bounded.capacity_bytes_per_replica == bounded.capacity_bytes_per_node // 2 == 1 << 29  # type: ignore[operator]
    assert bounded.lifecycle is None
    assert plan_for(tmp_path, "tiers=shm_fs").object_store is None


def test_a_row_above_the_threshold_is_planned_in_parts(tmp_path: Path) -> None:
    sizes = ("region.size=1GiB", "engine.device_cache_size=512MiB", "model=llama3_1_8b")
    plan = plan_for(tmp_path, *sizes, "tiers=shm_object", "spawn.check_machine=false")
    assert plan.region.row_bytes > 64 << 20
    assert plan.object_store is not None
    assert plan.object_store.upload_requests == 2 + -(-plan.region.row_bytes // (16 << 20))


@pytest.mark.parametrize("url", ["s3://b", "s3://b/p q", "gs://b/p", "az://c/p"])
def test_a_lifecycle_rule_covers_the_prefix_and_nothing_else(url: str) -> None:
    settings = ObjectSettings(url)
    command = lifecycle(settings)
    assert settings.bucket in command
    if settings.prefix:
        assert f"{settings.prefix}/" in command
