"""The S3 server of the object part: SeaweedFS, so that every client finds its bucket.

LMCache's client puts the bucket into the host's name, and that name has to resolve where there is
no name server. So the server's domain is `0.0.1` and the bucket `127`: then `127.0.0.1` is the
bucket's host, while `localhost` stays the host of requests that have the bucket in their path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.servers.account import REGION, Account, Bucket
from tests.servers.seaweedfs import SeaweedFs

BUCKET = "127"
_DOMAIN = "0.0.1"


class BucketHostSeaweedFs(SeaweedFs):
    """Takes requests with the bucket in the path at `localhost`, or as host `127.0.0.1`."""

    def _run(self, *options: str) -> None:
        super()._run(f"-s3.domainName={_DOMAIN}", *options)

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.port = self._ports["s3"][0]
        self.account, self.reader = (
            each.at(f"http://localhost:{self.port}") for each in (self.account, self.reader)
        )


@dataclass(frozen=True, slots=True)
class S3Place:
    """A running server and its one bucket."""

    server: BucketHostSeaweedFs = field(repr=False)
    bucket: Bucket = field(repr=False)

    @classmethod
    def start(cls) -> S3Place:
        server = BucketHostSeaweedFs()
        try:
            server.launch()
            client = server.account.client()
            client.create_bucket(Bucket=BUCKET)
            return cls(server, Bucket(server.account, BUCKET, client))
        except BaseException:
            server.close()
            raise

    def close(self) -> None:
        self.bucket.client.close()
        self.server.close()

    @property
    def account(self) -> Account:
        return self.server.account

    def options(self) -> dict[str, str]:
        """What a way has to know; credentials are in `account.environment()`."""
        return {
            "endpoint": self.account.endpoint,
            "virtual_host": f"127.0.0.1:{self.server.port}",
            "bucket": BUCKET,
            "region": REGION,
        }

    def names(self) -> list[str]:
        return sorted(self.bucket.sizes())

    def empty(self) -> None:
        names = self.names()
        for begin in range(0, len(names), 500):
            keys = [{"Key": name} for name in names[begin : begin + 500]]
            self.bucket.client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
