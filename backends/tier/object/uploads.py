"""Uploads in parts that nobody finished, as an S3 server lists them.

The tier's client has no such request, so this one is made and signed here. Signature Version 4 is
described in "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit
from xml.etree import ElementTree

from backends.errors import TierError
from backends.tier.object import environment
from backends.tier.object.environment import SigningKey
from backends.tier.object.settings import ObjectSettings

_ANSWER_BYTES_MAX: Final = 8 << 20
_PAGES_MAX: Final = 100
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished upload: the object's name in the bucket, and when it began, in s since 1970."""

    name: str
    upload_id: str
    began_s: float


def list_uploads(settings: ObjectSettings) -> list[Upload]:
    """Of an s3 url. Raises TierError where they cannot be listed."""
    key = environment.signing_key()
    if key is None:
        raise TierError(
            f"{settings.url}: unfinished uploads are listed with a key out of the environment, and "
            "there is none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run: aws s3api "
            f"list-multipart-uploads --bucket {settings.bucket}"
        )
    uploads: list[Upload] = []
    marker: dict[str, str] = {}
    for _ in range(_PAGES_MAX):
        prefix = f"{settings.prefix}/" if settings.prefix else ""
        found, marker = _parse(_get(settings, key, {"uploads": "", "prefix": prefix, **marker}))
        uploads += found
        if not marker:
            break
    return uploads


def sign(
    key: SigningKey, region: str, host: str, path: str, query: dict[str, str], now_s: float
) -> dict[str, str]:
    """Headers that sign a GET without a body. `path` is encoded already, `query` is not."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    headers = {"host": host, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": moment}
    if key.token:
        headers["x-amz-security-token"] = key.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join(("GET", path, encode(query), lines, names, _EMPTY_SHA256))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, digest))
    secret = f"AWS4{key.secret_key}".encode()
    for part in (moment[:8], region, "s3", "aws4_request"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return headers


def encode(query: dict[str, str]) -> str:
    """A query as it is sent and signed: sorted, and all but unreserved characters escaped."""
    return "&".join(f"{quote(k, safe='')}={quote(query[k], safe='')}" for k in sorted(query))


def _get(settings: ObjectSettings, key: SigningKey, query: dict[str, str]) -> bytes:
    region = settings.region or environment.region()
    given = settings.endpoint or environment.endpoint()
    virtual = settings.addressing == "virtual"
    host = f"{settings.bucket}." if virtual and not given else ""
    url = urlsplit(given or f"https://{host}s3.{region}.amazonaws.com")
    if url.scheme == "http" and not settings.allow_http:
        raise TierError(
            f"{settings.url}: the endpoint is http, which is refused; set allow_http to true"
        )
    path = "/" if virtual else f"/{quote(settings.bucket)}/"
    headers = sign(key, region, url.netloc, path, query, time.time())
    connection = _connection(settings, url)
    try:
        connection.request("GET", f"{path}?{encode(query)}", headers=headers)
        answer = connection.getresponse()
        body = answer.read(_ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise TierError(
            f"{settings.url}: unfinished uploads cannot be listed: {type(error).__name__}; check "
            "the endpoint and whether the server runs"
        ) from None
    finally:
        connection.close()
    if answer.status != 200 or len(body) > _ANSWER_BYTES_MAX:
        raise TierError(
            f"{settings.url}: unfinished uploads cannot be listed: the server answers "
            f"{answer.status}; the key needs s3:ListBucketMultipartUploads"
        )
    return body


def _connection(settings: ObjectSettings, url: SplitResult) -> http.client.HTTPConnection:
    if url.hostname is None:
        raise TierError(f"{settings.url}: the endpoint names no host")
    timeout_s = settings.connect_timeout_s + settings.read_timeout_s
    if url.scheme == "http":
        return http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
    trust = ssl.create_default_context()
    if settings.ca_bundle is not None:
        trust.load_verify_locations(settings.ca_bundle)
    return http.client.HTTPSConnection(url.hostname, url.port, timeout=timeout_s, context=trust)


def _parse(body: bytes) -> tuple[list[Upload], dict[str, str]]:
    """Uploads of one answer, and where the next one begins; that is empty at the end."""
    # An answer has no document type; one that has could make the parser blow up.
    if b"<!" in body.replace(b"<![CDATA[", b""):
        raise TierError("the list of unfinished uploads holds declarations, expected plain XML")
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise TierError(
            "the list of unfinished uploads is not XML; is this an S3 server?"
        ) from None
    uploads = []
    for element in root.iter():
        if _tag(element) == "Upload":
            fields = {_tag(child): child.text or "" for child in element}
            uploads.append(
                Upload(
                    fields.get("Key", ""),
                    fields.get("UploadId", ""),
                    _seconds(fields.get("Initiated", "")),
                )
            )
    top = {_tag(child): child.text or "" for child in root}
    if top.get("IsTruncated") != "true" or not top.get("NextKeyMarker"):
        return uploads, {}
    return uploads, {
        "key-marker": top["NextKeyMarker"],
        "upload-id-marker": top.get("NextUploadIdMarker", ""),
    }


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rsplit("}", 1)[-1]


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
