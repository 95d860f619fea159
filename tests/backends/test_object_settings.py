"""What a configuration may say of the object tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backends.errors import ConfigError
from backends.tier.object import ObjectSettings
from backends.tier.object.lifecycle import lifecycle_rule
from backends.tier.registry import TierRegistry
from backends.tier.settings import SettingsError, convert_settings

URL = "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "prefix"),
    [
        ("s3://bucket/some/prefix/", "s3", "bucket", "some/prefix"),
        ("s3://bucket", "s3", "bucket", ""),
        ("gs://bucket/p", "gs", "bucket", "p"),
        ("az://container/p", "az", "container", "p"),
        ("file:///var/kv/", "file", "", "/var/kv"),
        ("file:///var/a%20b", "file", "", "/var/a b"),
        ("memory:///", "memory", "", ""),
    ],
)
def test_a_url_says_where(url: str, scheme: str, bucket: str, prefix: str) -> None:
    settings = ObjectSettings(url)
    assert (settings.scheme, settings.bucket, settings.prefix) == (scheme, bucket, prefix)


def test_a_relative_directory_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ObjectSettings("file:kv/store")
    assert settings.prefix == os.path.join(os.getcwd(), "kv/store")
    assert ObjectSettings(settings.url) == settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "ftp://host/x"}, "one of s3, gs, az, file, memory"),
        ({"url": "s3:///x"}, "s3://bucket/prefix"),
        ({"url": "s3://bucket/a/../b"}, "dotted part"),
        ({"url": "file://host/x"}, "three slashes"),
        ({"url": "file:///"}, "file:///directory"),
        ({"url": "file:///x", "endpoint": "https://h"}, "leave it out"),
        ({"endpoint": "http://127.0.0.1:9000"}, "set allow_http to true"),
        ({"endpoint": "127.0.0.1:9000"}, "expected https://host"),
        ({"capacity": "endless"}, "capacity"),
        ({"capacity": 0}, "capacity"),
        ({"low_watermark": 0.99, "high_watermark": 0.5}, "watermarks"),
        ({"multipart_part": "1MiB"}, "5MiB to 5GiB"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"read_timeout_s": 0.0}, "read_timeout_s is 0"),
        ({"retry_s": 3.0, "retry_most_s": 1.0}, "retry_s is 3.0"),
        ({"breaker_s": 0.0}, "breaker_s is 0.0"),
        ({"placement": "everywhere"}, "shared"),
        ({"conditional": "maybe"}, "auto, on, off"),
        ({"access_key": "AKIA"}, "there is no such setting"),
    ],
)
def test_what_cannot_be_right_is_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        convert_settings(ObjectSettings, {"url": URL, **given})
    assert words in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"retries is -1.*stagger_s is -1") as caught:
        ObjectSettings(URL, concurrency=0, retries=-1, stagger_s=-1.0)
    assert "concurrency is 0" in str(caught.value)


def test_sizes_read_as_people_write_them() -> None:
    given = {"url": URL, "capacity": "2TB", "in_flight_bytes": "64MiB", "multipart_part": "8MiB"}
    settings = convert_settings(ObjectSettings, given)
    assert settings.capacity_bytes == 2 * 10**12
    assert settings.in_flight_bytes == 64 << 20
    assert convert_settings(ObjectSettings, {"url": URL}).capacity_bytes is None
    assert convert_settings(ObjectSettings, {"url": URL, "capacity": "unbounded"}) == (
        ObjectSettings(URL)
    )


@pytest.mark.parametrize(
    "given",
    [
        {"url": "s3://AKIASECRET:wordsecret@bucket/x"},
        {"url": "az://container/x?sig=tokensecret"},
        {"endpoint": "https://user:wordsecret@host"},
        {"secret_access_key": "keysecret"},
        {"endpoint": "https://[secret"},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        convert_settings(ObjectSettings, {"url": URL, **given})
    assert "SECRET" not in str(caught.value).upper().replace("SECRET_ACCESS_KEY", "").replace(
        "A SECRET", ""
    )


def test_blocks_in_flight_are_bounded_by_count_and_by_bytes() -> None:
    settings = ObjectSettings(URL, concurrency=8, in_flight_bytes=10 << 20)
    assert settings.in_flight_blocks(1 << 20) == 8
    assert settings.in_flight_blocks(4 << 20) == 2
    assert settings.in_flight_blocks(1 << 30) == 1


def test_the_tier_is_found_by_its_name() -> None:
    entry = TierRegistry(entry_points=()).find("object")
    assert entry.settings({"url": URL}) == ObjectSettings(URL)


def test_an_unbounded_bucket_is_told_its_rule() -> None:
    [first, command] = lifecycle_rule(ObjectSettings(URL))
    assert "lifecycle rule" in first
    assert '"Prefix": "some/prefix/"' in command
    assert "AbortIncompleteMultipartUpload" in command
    assert lifecycle_rule(ObjectSettings(URL, capacity=1 << 40)) == []
    [line] = lifecycle_rule(ObjectSettings("file:///x"))
    assert "set capacity" in line
