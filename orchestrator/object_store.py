"""What a configuration says of an object store, beyond what the tier's own settings check.

No secret may stand in it, credentials must be at hand where the leaders will start, and a plan
shows where the objects go and what bounds them. Nothing here talks to a store.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from backends.tier.object.settings import ObjectSettings
from orchestrator.problems import Problem
from orchestrator.schema import ObjectTierConf

NAME = "object"
KEY = f"tiers.stack.{NAME}"
URL_KEYS = (f"{KEY}.url", f"{KEY}.endpoint")
REMOTE = ("s3", "gs", "az")
FROM_THE_ENVIRONMENT = (
    "leave it out: credentials come from the environment, such as AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY"
)

_VENDOR = Path("/sys/class/dmi/id/sys_vendor")


def check_url(key: str, url: str) -> list[Problem]:
    """A URL with a place for a secret in use, which is refused and never shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return [Problem(key, None, "is not a URL", f"write it like {key}={_EXAMPLES[key]}")]
    remote = key == URL_KEYS[1] or parts.scheme in REMOTE
    authority_is_more = parts.scheme in REMOTE and ":" in parts.netloc
    if parts.query or parts.fragment or authority_is_more or (remote and "@" in url):
        limit = "holds a user name, a password, a query or a fragment, which may be a secret"
        return [Problem(key, None, f"{limit} and is not shown", FROM_THE_ENVIRONMENT)]
    return []


_EXAMPLES = dict(zip(URL_KEYS, ("s3://BUCKET/PREFIX", "https://HOST:PORT"), strict=True))


def check_missing(given: Mapping[str, Any]) -> list[Problem]:
    """A store that nobody has named yet, as `tiers=shm_fs_s3` has it."""
    if given["url"]:
        return []
    return [
        Problem(
            URL_KEYS[0],
            None,
            "is missing: there is no bucket to store to",
            f"set {URL_KEYS[0]}=s3://BUCKET/PREFIX, and {URL_KEYS[1]}=https://HOST:PORT for a "
            "server that is not the provider's own",
        )
    ]


def absolute_url(url: str) -> str:
    """A `file:` URL as workers in another directory need it; any other as it is."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    if parts.scheme != "file" or parts.netloc or not parts.path:
        return url
    return "file://" + os.path.abspath(os.path.expanduser(unquote(parts.path)))


@dataclass(frozen=True, slots=True)
class _Provider:
    """Names of environment variables. `pairs`: one of each alternative, all of a tuple together."""

    vendor: str
    alternatives: tuple[tuple[str, ...], ...]
    elsewhere: tuple[str, ...]
    unsigned: str
    needed: tuple[str, ...] = ()


_PROVIDERS = {
    "s3": _Provider(
        "Amazon",
        (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),),
        (
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_METADATA_ENDPOINT",
        ),
        "AWS_SKIP_SIGNATURE",
    ),
    "gs": _Provider(
        "Google",
        (("GOOGLE_APPLICATION_CREDENTIALS",),),
        (
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_BEARER_TOKEN",
        ),
        "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": _Provider(
        "Microsoft",
        (
            ("AZURE_STORAGE_ACCOUNT_KEY",),
            ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
        ),
        (
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_MASTER_KEY",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_TOKEN",
            "AZURE_STORAGE_CLIENT_ID",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_IDENTITY_ENDPOINT",
            "AZURE_USE_AZURE_CLI",
            "AZURE_STORAGE_USE_EMULATOR",
        ),
        "AZURE_SKIP_SIGNATURE",
        ("AZURE_STORAGE_ACCOUNT_NAME",),
    ),
}
_PROFILES = ("credentials", "config")
_GCLOUD = Path(".config/gcloud/application_default_credentials.json")


def check_credentials(
    settings: ObjectSettings, environment: Mapping[str, str]
) -> Iterator[Problem]:
    """Environment variables without which the store will answer nothing; values are never read.

    A machine of the provider's own may have a role instead, which only asking it could tell.
    """
    if settings.ca_bundle is not None and not os.access(settings.ca_bundle, os.R_OK):
        limit = "cannot be read by this user"
        yield Problem(
            f"{KEY}.ca_bundle", settings.ca_bundle, limit, "name a file of PEM certificates"
        )
    provider = _PROVIDERS.get(settings.scheme)
    if provider is None:
        return

    def has(name: str) -> bool:
        return bool(environment.get(name))

    own = settings.endpoint is None
    if settings.scheme == "s3":
        yield from _check_endpoint(settings.endpoint, environment)
    if settings.scheme == "s3" and own and not (settings.region or _any(has, _REGIONS)):
        yield Problem(
            f"{KEY}.region",
            None,
            "is missing, and neither AWS_REGION nor AWS_DEFAULT_REGION is in the environment",
            f"set {KEY}.region to the bucket's, or {URL_KEYS[1]} for a server of your own",
        )
    missing = [name for name in provider.needed if not has(name)]
    if has(provider.unsigned):
        found = True
    else:
        partly = [names for names in provider.alternatives if 0 < sum(map(has, names)) < len(names)]
        found = _any(has, provider.elsewhere) or any(
            all(map(has, names)) for names in provider.alternatives
        )
        if partly and not found:
            missing += [name for name in partly[0] if not has(name)]
            found = True
    home = Path(environment.get("HOME") or "/")
    if settings.scheme == "gs":
        found |= (home / _GCLOUD).exists()
    if settings.scheme == "s3":
        found |= has("AWS_PROFILE") or any((home / ".aws" / name).exists() for name in _PROFILES)
    if missing:
        told = " and ".join(missing)
        limit = f"needs credentials: {told} {'is' if len(missing) == 1 else 'are'} not set"
        yield Problem(URL_KEYS[0], settings.url, f"{limit} in the environment", f"export {told}")
    elif not found and not (own and _may_be_machine_of(provider.vendor)):
        choices = " or ".join(" and ".join(names) for names in provider.alternatives)
        yield Problem(
            URL_KEYS[0],
            settings.url,
            f"needs credentials, and the environment has none: {choices} not set",
            f"export {choices}, or {provider.unsigned}=true where the store asks for none",
        )


def _check_endpoint(endpoint: str | None, environment: Mapping[str, str]) -> Iterator[Problem]:
    """The client would take these before, or in place of, the endpoint that the plan shows."""
    names = ("AWS_ENDPOINT_URL_S3",) if endpoint else _ENDPOINTS
    for name in names:
        other = environment.get(name, "")
        if other and other.rstrip("/") != (endpoint or "").rstrip("/"):
            yield Problem(
                URL_KEYS[1],
                endpoint,
                f"is not what {name} in the environment says, which the client would use",
                f"set {URL_KEYS[1]} to the same, or unset {name}",
            )
            return


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def _any(has: Any, names: tuple[str, ...]) -> bool:
    return any(map(has, names))


def _may_be_machine_of(vendor: str) -> bool:
    """Whether this machine is one of the provider's, as far as its firmware tells."""
    try:
        return vendor in _VENDOR.read_text(errors="replace")
    except OSError:
        return True


def way(asked: ObjectTierConf) -> str:
    """How a store is reached, in words: endpoint, style, TLS."""
    scheme = urlsplit(asked.url).scheme
    if scheme not in REMOTE:
        return "in this process alone" if scheme == "memory" else "a directory"
    where = asked.endpoint or "the provider's own endpoint"
    tls = "TLS off" if urlsplit(asked.endpoint or "").scheme == "http" else "TLS on"
    words = [where, f"region {asked.region or 'of the environment'}", f"{asked.addressing} style"]
    words += [tls, *([f"CA bundle {asked.ca_bundle}"] if asked.ca_bundle else [])]
    return ", ".join(words)


LIFECYCLE_DAYS = 7
"""After so many days an object is dropped that nobody has written again; what a plan proposes."""


def lifecycle(settings: ObjectSettings) -> str:
    """The command that has the bucket drop old objects, to be typed by whoever owns the bucket.

    It replaces rules that the bucket has already.
    """
    prefix = f"{settings.prefix}/" if settings.prefix else ""
    if settings.scheme == "s3":
        rule = {
            "ID": "kvquay",
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "Expiration": {"Days": LIFECYCLE_DAYS},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
        command = ["aws", "s3api", "put-bucket-lifecycle-configuration"]
        command += ["--bucket", settings.bucket]
        command += ["--lifecycle-configuration", json.dumps({"Rules": [rule]})]
        command += ["--endpoint-url", settings.endpoint] if settings.endpoint else []
        return shlex.join(command)
    if settings.scheme == "gs":
        condition: dict[str, Any] = {"age": LIFECYCLE_DAYS}
        condition |= {"matchesPrefix": [prefix]} if prefix else {}
        rules = {"rule": [{"action": {"type": "Delete"}, "condition": condition}]}
        bucket = shlex.quote(f"gs://{settings.bucket}")
        return (
            f"gcloud storage buckets update {bucket} "
            f"--lifecycle-file=<(echo {shlex.quote(json.dumps(rules))})"
        )
    if settings.scheme == "az":
        action = {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": LIFECYCLE_DAYS}}}
        filters = {"blobTypes": ["blockBlob"], "prefixMatch": [f"{settings.bucket}/{prefix}"]}
        policy = {
            "rules": [
                {
                    "enabled": True,
                    "name": "kvquay",
                    "type": "Lifecycle",
                    "definition": {"actions": action, "filters": filters},
                }
            ]
        }
        return (
            "az storage account management-policy create --account-name ACCOUNT "
            f"--resource-group GROUP --policy {shlex.quote(json.dumps(policy))}"
        )
    if settings.scheme == "file":
        return f"none: a directory has no such rules; set {KEY}.capacity"
    return "none: what is in memory is gone with the process"
