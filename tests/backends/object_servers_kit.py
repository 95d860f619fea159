"""The object tier on real servers: one bucket a server, one prefix in it for each test."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from object_kit import ObjectHarness, make_settings, path_of

from backends.block import BlockKey
from backends.testing import RowBuffer, TierBench, make_context
from backends.tier.object import ObjectSettings
from backends.tier.object.tier import ObjectTier
from tests.servers.account import Bucket


class ServerHarness(ObjectHarness):
    """`bucket` is set on the class, by a fixture that has the server."""

    bucket: ClassVar[Bucket]

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.prefix = f"test-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket.name}/{self.prefix}"

    def settings(self, capacity_bytes: int | None) -> ObjectSettings:
        return dataclasses.replace(
            super().settings(capacity_bytes),
            endpoint=self.bucket.account.endpoint,
            allow_http=True,
        )

    def raw_list(self) -> Mapping[str, int]:
        return blocks_of(self.bucket, self.prefix)

    def raw_read(self, fingerprint: bytes, key: BlockKey) -> bytes | None:
        return self.bucket.get(f"{self.prefix}/{path_of(fingerprint, key)}")

    def raw_write(self, fingerprint: bytes, key: BlockKey, data: bytes) -> None:
        self.bucket.put(f"{self.prefix}/{path_of(fingerprint, key)}", data)


class SeaweedFsHarness(ServerHarness):
    pass


class RgwHarness(ServerHarness):
    pass


class GatewayHarness(ServerHarness):
    """A store without conditional writes cannot keep one capacity for several processes."""

    capabilities = dataclasses.replace(ObjectTier.capabilities, quota=False)


def blocks_of(bucket: Bucket, prefix: str) -> dict[str, int]:
    """Every block under a prefix, by name; not what is in quarantine."""
    return {
        name: size
        for name, size in bucket.sizes(f"{prefix}/").items()
        if name.endswith(".kvb") and "/quarantine/" not in name
    }


class ServerBench(TierBench):
    """A bench on the object tier in a bucket; a context manager."""

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        *,
        rows: int = 32,
        row_bytes: int = 16384,
        replica: int = 0,
        replicas: int = 1,
        **changes: Any,
    ) -> None:
        buffer = RowBuffer(rows, row_bytes)
        context = make_context(buffer, data_parallel_index=replica, data_parallel_size=replicas)
        self.object = ObjectTier(context, server_settings(bucket, prefix, **changes))
        super().__init__(self.object, buffer)

    def __enter__(self) -> ServerBench:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.tier.close()

    def count(self, name: str) -> int:
        return self.object.counters()[name]


def server_settings(bucket: Bucket, prefix: str, **changes: Any) -> ObjectSettings:
    more = {"endpoint": bucket.account.endpoint, "allow_http": True, **changes}
    return make_settings(f"s3://{bucket.name}/{prefix}", **more)
