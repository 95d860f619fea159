"""The one place of this tier that looks into the environment, for credentials alone.

The client finds them by itself: environment variables, web identity, a container's or a machine's
own service. Where there are only profiles in the AWS files, botocore reads those.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from backends.errors import TierError

_OWN_CHAIN: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_PROFILE_TTL: Final = timedelta(minutes=10)
_DEFAULT_REGION: Final = "us-east-1"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """What signs a request for S3. Its repr shows nothing of it."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str = field(repr=False)


def signing_key() -> SigningKey | None:
    """The key in the environment, or else in a profile; None where there is neither."""
    environment = os.environ
    access_key = environment.get("AWS_ACCESS_KEY_ID", "")
    secret_key = environment.get("AWS_SECRET_ACCESS_KEY", "")
    if access_key and secret_key:
        return SigningKey(access_key, secret_key, environment.get("AWS_SESSION_TOKEN", ""))
    provider = profile_credentials()
    if provider is None:
        return None
    found = provider()
    return SigningKey(found["access_key_id"], found["secret_access_key"], found["token"] or "")


def region() -> str:
    """The region that the environment names, or else the provider's first one."""
    environment = os.environ
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION


def endpoint() -> str | None:
    """An S3 server that the environment names."""
    environment = os.environ
    return (
        environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
    )


def profile_credentials() -> Any:
    """What gives credentials out of AWS profiles; None where the client needs no such help.

    Raises TierError where it would, and botocore is missing.
    """
    environment = os.environ
    if any(environment.get(name) for name in _OWN_CHAIN):
        return None
    home = Path(os.path.expanduser("~")) / ".aws"
    files = [
        Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
        Path(environment.get("AWS_CONFIG_FILE") or home / "config"),
    ]
    if not environment.get("AWS_PROFILE") and not any(file.exists() for file in files):
        return None
    if importlib.util.find_spec("botocore") is None:
        raise TierError(
            "credentials stand in an AWS profile, which botocore would read, and it is not "
            "installed; install botocore, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return _from_profile


def _from_profile() -> dict[str, Any]:
    # A new session each time, so that a file that was written anew is read anew.
    session = importlib.import_module("botocore.session").get_session()
    credentials = session.get_credentials()
    if credentials is None:
        raise ValueError("no credentials")
    frozen = credentials.get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _PROFILE_TTL,
    }
