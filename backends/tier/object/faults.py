"""What may go wrong with a store, in few kinds, and in words that hold no secret.

A client's own message may hold a signature, a token in a URL, or a server's whole answer. Nothing
of it is passed on but a status, an error code and what kind of trouble it was.
"""

from __future__ import annotations

import re
from typing import Final

from obstore import exceptions as raw

_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})|\b(\d{3}) [A-Z][a-z]+")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_DENIED_CODES: Final = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled"),
    *("AuthorizationFailure", "AuthenticationFailed", "InvalidToken"),
)
_EXPIRED_CODES: Final = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
# The store does not know them any more, or not yet: others may have taken their place since.
_REPLACED_CODES: Final = ("InvalidAccessKeyId", "InvalidToken")
_NO_ROOM: Final = (28, 122)
_READ_ONLY: Final = (1, 13, 30)
# Client errors that pass: time-out, conflict with another writer, too early, too many.
_PASSING: Final = (408, 409, 425, 429)
_LIMITS: Final = (429, 503)
_NO_RANGE: Final = 416


class StoreFault(Exception):
    """Base. The text says what happened, without names, addresses or secrets."""


class Absent(StoreFault):
    """There is no such object."""


class Exists(StoreFault):
    """There is an object of that name, and it was not to be replaced."""


class Sick(StoreFault):
    """It may work in a while: no connection, a time-out, a server's error, too many requests.

    `kind` is one of `error`, `timeout` and `throttled`.
    """

    def __init__(self, text: str, kind: str = "error") -> None:
        super().__init__(text)
        self.kind = kind


class Expired(Sick):
    """The credentials were good once and have to be renewed."""


class Denied(StoreFault):
    """Credentials are missing, wrong, or not allowed to do this.

    `replaced`: the store does not know them, as when others have taken their place.
    """

    def __init__(self, text: str, *, replaced: bool = False) -> None:
        super().__init__(text)
        self.replaced = replaced


class NoBucket(StoreFault):
    """There is no such bucket or container."""


class NoRoom(StoreFault):
    """A disk is full, or a quota is used up."""


class Refused(StoreFault):
    """The store will not do this, however often it is asked."""


class NoRange(Refused):
    """It has no such part, or is not sent in parts."""


def classify(error: BaseException) -> StoreFault:
    """What an error of the client means."""
    if isinstance(error, StoreFault):
        return error
    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return NoBucket("there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return Absent("it is not there")
    if isinstance(error, (raw.AlreadyExistsError, raw.PreconditionError)):
        return Exists("it exists already")
    code = code_in(text)
    if code in _EXPIRED_CODES:
        return Expired(f"the credentials have expired ({code})")
    refused = isinstance(error, (raw.PermissionDeniedError, raw.UnauthenticatedError))
    if refused or code in _DENIED_CODES:
        words = f"access denied{f' ({code})' if code else ''}"
        return Denied(words, replaced=code in _REPLACED_CODES)
    if isinstance(error, raw.GenericError):
        return _generic(text, code)
    return Refused(f"the client refuses it: {type(error).__name__}")


def passes(status: int) -> bool:
    """Whether what an HTTP status says may be otherwise in a while."""
    return status >= 500 or status in _PASSING


def code_in(answer: str) -> str:
    """The error code in a server's answer, or ""."""
    return _found(_CODE, answer)


def of_status(status: int, code: str = "") -> StoreFault:
    """What an HTTP status means that is neither success nor a matter of rights."""
    words = f"the server answers {status}{f' {code}' if code else ''}"
    if passes(status):
        return Sick(words, "throttled" if status in _LIMITS else "error")
    return NoRange(words) if status == _NO_RANGE else Refused(words)


def _generic(text: str, code: str) -> StoreFault:
    number = int(_found(_OS_ERROR, text) or 0)
    if "InvalidRange" in text or "Invalid range" in text:
        return NoRange("it has no such range")
    if "LocalFileSystem" in text:
        if number in _NO_ROOM:
            return NoRoom(f"there is no room (os error {number})")
        if number in _READ_ONLY:
            return Denied(f"the directory cannot be written (os error {number})")
        return Sick(f"the disk fails{f' (os error {number})' if number else ''}")
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return Denied("no credentials were found")
    status = int(_found(_STATUS, text.split("\n", 1)[0]) or 0)
    if status in (401, 403):
        return Denied(f"access denied (status {status})")
    if status:
        return of_status(status, code)
    if "NotPartial" in text:
        return NoRange("the server sends the whole where a part was asked for")
    if "UnknownIssuer" in text or "certificate" in text:
        return Refused("the server's certificate is not trusted; give its issuer as ca_bundle")
    if "InvalidContentType" in text or "InvalidMessage" in text:
        return Refused("the server does not speak TLS; correct the endpoint")
    if "kind: Timeout" in text or "timed out" in text:
        return Sick("the server does not answer in time", "timeout")
    if ("not allowed" in text and "scheme" in text) or "BadScheme" in text:
        return Refused("the address is http, which is refused unless allow_http is true")
    if "kind: Connect" in text:
        return Sick("there is no connection to the server")
    if "redirect" in text:
        return Refused("the server redirects to elsewhere: region or endpoint is wrong")
    return Sick("the connection was lost, or the answer made no sense")


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""
