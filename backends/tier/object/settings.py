"""What a user may choose about the object tier, checked once and frozen.

Credentials are not among it: the client takes them from the environment or its own chain.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from backends.errors import ConfigError
from backends.tier.settings import Size

UNBOUNDED: Final = "unbounded"
SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
_PART_LEAST_BYTES: Final = 5 << 20
_PART_MOST_BYTES: Final = 5 << 30
_NO_SECRETS: Final = (
    "its value is not shown because it may hold a secret; credentials come from the environment"
)


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Settings of one object tier.

    url: where the blocks are: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
        `file:///directory` (or `file:directory`, from the working directory), `memory:///`.
    endpoint: `https://host:port` of a server other than the provider's own; None for that.
    region: of the bucket; None leaves it to the environment.
    addressing: `path` puts the bucket's name into the path, `virtual` into the host's name; then
        an endpoint includes it.
    allow_http: talk without TLS where the endpoint says `http://`.
    ca_bundle: a file of PEM certificates to trust besides the system's.
    signed_payload: hash every byte again for the request's signature. Blocks carry a checksum.
    direct_reads: s3 only: receive blocks straight into their rows, where the server lets us; else
        they pass through the client's memory.
    capacity: bytes for everything under the url, all namespaces and all processes together, or
        `unbounded`: then a lifecycle rule of the bucket bounds it.
    high_watermark, low_watermark: parts of the capacity; above the one eviction begins in the
        background, at the other it ends.
    concurrency, in_flight_bytes: stores in flight, and their bytes; the smaller of the two holds.
        A quarter more is for loads, which so need not wait for a store to end.
    queue_blocks, queue_bytes: stores that may wait or be under way; more are SHED at once. As many
        loads may wait.
    multipart_threshold: larger blocks are uploaded in parts of multipart_part.
    connect_timeout_s, read_timeout_s: for a connection, and for each read to bring something.
    request_timeout_s: for one request as a whole, its body included.
    retries: further attempts after a failure that may pass, the first after about retry_s, each
        next after about twice as long, at most retry_most_s.
    breaker_failures: so many failed requests in a row, and nothing is asked for breaker_s; then
        again, and for twice as long each time it fails still, at most breaker_most_s.
    placement: `shared` lets all replicas use each other's blocks; `per_replica` isolates them.
    stagger_s: what each next replica in a key's order waits before it looks again and writes.
    conditional: create-only puts: as a probe at start finds (`auto`), required (`on`), not used
        (`off`).
    verify: check the payload's checksum at every load. The header is always checked.
    quarantine_limit_bytes: wrong objects kept for inspection; 0 deletes them. Inside no capacity.
    absent_ttl_s: how long "not there" is believed before the store is asked again.
    probe_interval_s: how long keys that nobody knows are gathered before they are asked together.
    rescan_s: time between listings of everything, besides the one at start; 0 leaves them out.
    recency_interval_s: how often recency is shared with other processes; with a capacity only.
    close_timeout_s: how long `close` lets work under way end.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["path", "virtual"] = "path"
    allow_http: bool = False
    ca_bundle: str | None = None
    signed_payload: bool = False
    direct_reads: bool = True
    capacity: Size | Literal["unbounded"] = UNBOUNDED
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    concurrency: int = 32
    in_flight_bytes: Size = 256 << 20
    queue_blocks: int = 1024
    queue_bytes: Size = 4 << 30
    multipart_threshold: Size = 64 << 20
    multipart_part: Size = 16 << 20
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 5.0
    request_timeout_s: float = 30.0
    retries: int = 3
    retry_s: float = 0.1
    retry_most_s: float = 2.0
    breaker_failures: int = 5
    breaker_s: float = 1.0
    breaker_most_s: float = 5.0
    placement: Literal["shared", "per_replica"] = "shared"
    stagger_s: float = 0.2
    conditional: Literal["auto", "on", "off"] = "auto"
    verify: bool = True
    quarantine_limit_bytes: Size = 256 << 20
    absent_ttl_s: float = 2.0
    probe_interval_s: float = 0.002
    rescan_s: float = 300.0
    recency_interval_s: float = 60.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        problems = self._url_problems() + [text for wrong, text in self._checks() if wrong]
        if problems:
            raise ConfigError("object tier: " + "; ".join(problems))
        object.__setattr__(self, "url", _normal(self.url))
        if self.ca_bundle is not None:
            object.__setattr__(self, "ca_bundle", os.path.abspath(self.ca_bundle))

    @property
    def scheme(self) -> str:
        """One of SCHEMES."""
        return urlsplit(self.url).scheme

    @property
    def bucket(self) -> str:
        """Bucket or container; "" where there is none."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Names of objects begin with it, without slashes at its ends; "" for none.

        For `file` it is the directory, absolute.
        """
        path = urlsplit(self.url).path
        return unquote(path) if self.scheme == "file" else path.strip("/")

    @property
    def capacity_bytes(self) -> int | None:
        """None where it is unbounded."""
        return None if isinstance(self.capacity, str) else self.capacity

    @property
    def is_remote(self) -> bool:
        """Whether a network is between this process and the store."""
        return self.scheme in ("s3", "gs", "az")

    def in_flight_blocks(self, block_bytes: int) -> int:
        """Blocks of this size that may be in flight: at least one."""
        return max(1, min(self.concurrency, self.in_flight_bytes // block_bytes))

    def _url_problems(self) -> list[str]:
        try:
            url = urlsplit(self.url)
            endpoint = urlsplit(self.endpoint or "https://-")
        except ValueError:
            return [f"url or endpoint is not a URL; {_NO_SECRETS}"]
        if url.scheme not in SCHEMES:
            return [f"url has scheme {url.scheme!r}, expected one of {', '.join(SCHEMES)}"]
        if _has_more(url) or _has_more(endpoint):
            return [
                f"url or endpoint holds a user name, a password or a query; {_NO_SECRETS}, so "
                "leave them out"
            ]
        problems = []
        if url.scheme in ("s3", "gs", "az"):
            if not url.netloc:
                problems.append(f"url is {self.url!r}, expected {url.scheme}://bucket/prefix")
            if any(part in ("", ".", "..") for part in url.path.strip("/").split("/")[1:]):
                problems.append(
                    f"url has the prefix {url.path!r}, expected no empty or dotted part"
                )
        elif url.netloc:
            problems.append(
                f"url is {self.url!r}, expected no host: {url.scheme}:/// and three slashes"
            )
        elif url.scheme == "file" and not url.path.strip("/"):
            problems.append(f"url is {self.url!r}, expected file:///directory or file:directory")
        if self.endpoint is not None:
            problems += self._endpoint_problems(url.scheme, endpoint)
        return problems

    def _endpoint_problems(self, scheme: str, endpoint: SplitResult) -> list[str]:
        if scheme in ("file", "memory"):
            return [
                f"endpoint is {self.endpoint!r}, but a {scheme} url has no server; leave it out"
            ]
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
            return [f"endpoint is {self.endpoint!r}, expected https://host or https://host:port"]
        if endpoint.scheme == "http" and not self.allow_http:
            return [
                f"endpoint is {self.endpoint!r}, which is not encrypted; use https, or set "
                "allow_http to true where the network is yours"
            ]
        return []

    def _checks(self) -> list[tuple[bool, str]]:
        capacity = self.capacity_bytes
        return [
            (
                isinstance(self.capacity, str) and self.capacity != UNBOUNDED,
                f"capacity is {self.capacity!r}, expected bytes or {UNBOUNDED!r}",
            ),
            (
                capacity is not None and capacity < 1,
                f"capacity is {capacity} bytes, expected more, or {UNBOUNDED!r}",
            ),
            (
                not 0 < self.low_watermark <= self.high_watermark <= 1,
                f"watermarks are low {self.low_watermark} and high {self.high_watermark}, expected "
                "0 < low <= high <= 1",
            ),
            (
                not _PART_LEAST_BYTES <= self.multipart_part <= _PART_MOST_BYTES,
                f"multipart_part is {self.multipart_part} bytes, expected 5MiB to 5GiB, which is "
                "what stores take",
            ),
            (
                not 1 <= self.multipart_threshold <= _PART_MOST_BYTES,
                f"multipart_threshold is {self.multipart_threshold} bytes, expected 1 to 5GiB",
            ),
            *(
                (value < 1, f"{name} is {value}, expected at least 1")
                for name, value in (
                    ("concurrency", self.concurrency),
                    ("in_flight_bytes", self.in_flight_bytes),
                    ("queue_blocks", self.queue_blocks),
                    ("queue_bytes", self.queue_bytes),
                    ("breaker_failures", self.breaker_failures),
                )
            ),
            *(
                (value < 0, f"{name} is {value}, expected 0 or more")
                for name, value in (
                    ("retries", self.retries),
                    ("stagger_s", self.stagger_s),
                    ("quarantine_limit_bytes", self.quarantine_limit_bytes),
                    ("absent_ttl_s", self.absent_ttl_s),
                    ("probe_interval_s", self.probe_interval_s),
                    ("rescan_s", self.rescan_s),
                    ("close_timeout_s", self.close_timeout_s),
                )
            ),
            *(
                (value <= 0, f"{name} is {value}, expected more than 0")
                for name, value in (
                    ("connect_timeout_s", self.connect_timeout_s),
                    ("read_timeout_s", self.read_timeout_s),
                    ("request_timeout_s", self.request_timeout_s),
                    ("recency_interval_s", self.recency_interval_s),
                )
            ),
            *(
                (
                    not 0 < first <= most,
                    f"{name}_s is {first}, expected more than 0 and at most {name}_most_s {most}",
                )
                for name, first, most in (
                    ("retry", self.retry_s, self.retry_most_s),
                    ("breaker", self.breaker_s, self.breaker_most_s),
                )
            ),
        ]


def _has_more(url: SplitResult) -> bool:
    return bool(url.username or url.password or url.query or url.fragment or "@" in url.netloc)


def _normal(url: str) -> str:
    """One spelling for each place: file paths absolute, no slash at the end."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        # Not through quote: the path is a directory's name as the user wrote it.
        return f"file://{os.path.abspath(unquote(parts.path))}"
    if parts.scheme == "memory":
        return "memory:///" + parts.path.strip("/")
    return f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}"
