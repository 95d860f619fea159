"""From settings to a client of the store. Credentials do not pass through here; none is kept."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from backends.errors import TierError
from backends.tier.object.environment import profile_credentials
from backends.tier.object.settings import ObjectSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


def connect(settings: ObjectSettings) -> ObjectStore:
    """A client whose names are relative to the url's prefix. Makes no request.

    Raises TierError where the settings cannot be turned into one.
    """
    try:
        return _connect(settings)
    except TierError:
        raise
    # Its text may quote what the environment holds.
    except Exception as error:
        raise TierError(
            f"no client can be made for {settings.url}: {type(error).__name__}; check url, "
            "endpoint, region, ca_bundle and the credentials in the environment"
        ) from None


def _connect(settings: ObjectSettings) -> ObjectStore:
    prefix = settings.prefix or None
    if settings.scheme == "memory":
        return MemoryStore()
    if settings.scheme == "file":
        # Blocks are nobody else's business; the client makes files as the umask says.
        os.makedirs(settings.prefix, mode=0o700, exist_ok=True)
        return LocalStore(settings.prefix)
    options, retry = _client_options(settings), _no_retries(settings)
    more: dict[str, Any] = {"client_options": options, "retry_config": retry}
    if settings.scheme == "gs":
        return GCSStore(
            settings.bucket, prefix=prefix, **_given(base_url=settings.endpoint), **more
        )
    if settings.scheme == "az":
        endpoint = _given(endpoint=settings.endpoint)
        return AzureStore(settings.bucket, prefix=prefix, **endpoint, **more)
    return S3Store(
        settings.bucket,
        prefix=prefix,
        virtual_hosted_style_request=settings.addressing == "virtual",
        unsigned_payload=not settings.signed_payload,
        **_given(
            endpoint=settings.endpoint,
            region=settings.region,
            credential_provider=profile_credentials(),
        ),
        **more,
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _client_options(settings: ObjectSettings) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "read_timeout": timedelta(seconds=settings.read_timeout_s),
        "timeout": timedelta(seconds=settings.request_timeout_s),
        "pool_max_idle_per_host": str(settings.concurrency),
        "user_agent": "kvquay",
    }
    if settings.ca_bundle is not None:
        try:
            options["root_certificate"] = Path(settings.ca_bundle).read_bytes()
        except OSError as error:
            raise TierError(
                f"ca_bundle {settings.ca_bundle} cannot be read: {error.strerror}; give a file of "
                "PEM certificates"
            ) from None
    return options


def _no_retries(settings: ObjectSettings) -> RetryConfig:
    """Retries are the tier's own: they end with a job's deadline, and are counted."""
    return {"max_retries": 0, "retry_timeout": timedelta(seconds=settings.request_timeout_s)}
