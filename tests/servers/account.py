"""An account with an S3 server, and ways to it that are not the tier's own: boto3's client."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Account:
    """Where the server is, and who asks. `repr` tells no secret."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    ca_bundle: str | None = None

    @classmethod
    def fresh(cls, endpoint: str, ca_bundle: str | None = None) -> Account:
        """With credentials that nobody has had before."""
        access_key = "AK" + secrets.token_hex(9).upper()
        return cls(endpoint, access_key, secrets.token_hex(20), ca_bundle)

    def at(self, endpoint: str) -> Account:
        """The same credentials by another way, such as a proxy."""
        return replace(self, endpoint=endpoint)

    def environment(self) -> dict[str, str]:
        """What a program is given that is to use the account."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
        }

    def client(self, read_timeout_s: float = 30) -> Any:
        """A client that does not try again: a test sees every answer."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            verify=self.ca_bundle,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(
                s3={"addressing_style": "path"},
                # Trailing checksums are beyond some servers.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=read_timeout_s,
                max_pool_connections=32,
            ),
        )

    def make_bucket(self, prefix: str = "test") -> Bucket:
        """A new, empty bucket."""
        client = self.client()
        name = f"{prefix}-{secrets.token_hex(6)}"
        client.create_bucket(Bucket=name)
        return Bucket(self, name, client)

    def takes_puts(self) -> bool:
        """Whether an object can be stored and read; False where the server is not ready yet."""
        try:
            client = self.client()
            with contextlib.suppress(ClientError):
                client.create_bucket(Bucket="ready")
            bucket = Bucket(self, "ready", client)
            bucket.put("probe", b"x")
            return bucket.get("probe") == b"x"
        except (BotoCoreError, ClientError):
            return False


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket, seen past the tier."""

    account: Account
    name: str
    client: Any = field(repr=False)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every object under a prefix: name and bytes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", ())}

    def uploads(self) -> list[str]:
        """Names of multipart uploads that are neither completed nor aborted."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name)
        return [found["Key"] for page in pages for found in page.get("Uploads", ())]

    def get(self, key: str) -> bytes | None:
        """The object, None if there is none."""
        try:
            answer = self.client.get_object(Bucket=self.name, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def put(self, key: str, data: bytes, **conditions: str) -> None:
        """Replace the object, unless `conditions` (IfNoneMatch="*") forbid it."""
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **conditions)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """False where the server refused, because the object is there."""
        try:
            self.put(key, data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
                return False
            raise
        return True
