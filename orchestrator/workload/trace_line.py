"""One line of a Mooncake trace: read, checked, or refused with the reason.

The format is that of the traces published with Mooncake (FAST'25,
github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object a line with `timestamp`
(ms), `input_length` and `output_length` (tokens) and `hash_ids` (one id for each 512 tokens of
the prompt; an equal id is an equal block after an equal prefix).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

MOONCAKE_TOKENS_PER_ID = 512
MAX_LINE_BYTES = 4 << 20
"""Far above any real line: 1M tokens of prompt take about 20 kB."""
SHORTEST_LINE_BYTES = 60
"""No valid line, written as tightly as JSON allows, is shorter."""
MAX_TIMESTAMP_MS = 2**53
MAX_TOKENS = 2**31 - 1
MAX_ID = 2**63 - 1


class BadLineError(ValueError):
    """Why a line cannot be used: what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A checked line."""

    timestamp_ms: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def parse_line(raw: bytes) -> TraceRecord:
    """The record in one line, with or without its line end. Raises BadLineError."""
    if len(raw) > MAX_LINE_BYTES:
        raise BadLineError(
            f"found more than {MAX_LINE_BYTES} bytes without a line end, expected less"
        )
    if not raw.strip():
        raise BadLineError("found an empty line, expected a JSON object")
    fields = _parse_object(raw)
    timestamp_ms = _number(fields, "timestamp", MAX_TIMESTAMP_MS)
    input_length = _integer(fields, "input_length", 1, MAX_TOKENS)
    output_length = _integer(fields, "output_length", 0, MAX_TOKENS)
    return TraceRecord(timestamp_ms, input_length, output_length, _ids(fields, input_length))


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_unique_keys
        )
    except UnicodeDecodeError as error:
        hint = " (this looks gzip-compressed: unpack it first)" if raw[:2] == b"\x1f\x8b" else ""
        raise BadLineError(
            f"found byte {raw[error.start]:#04x} at {error.start}, expected UTF-8 text{hint}"
        ) from None
    except BadLineError:
        raise
    except RecursionError:
        raise BadLineError("found JSON nested too deeply, expected a flat object") from None
    except ValueError as error:
        raise BadLineError(f"found bad JSON ({error}), expected one object a line") from None
    if not isinstance(value, dict):
        raise BadLineError(f"found {_shown(value)}, expected a JSON object")
    return value


def _refuse(constant: str) -> Any:
    raise BadLineError(f"found {constant}, expected a finite number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)
        raise BadLineError(f"found field {_shown(twice)} twice, expected it once")
    return fields


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        found = ", ".join(_shown(key) for key in list(fields)[:8]) or "no field"
        raise BadLineError(f"field {name!r} is missing (found: {found})")
    return fields[name]


def _number(fields: dict[str, Any], name: str, largest: int) -> int | float:
    value = _field(fields, name)
    # `type(...) is`: a JSON true is an int to isinstance.
    if type(value) is not int and type(value) is not float:
        raise BadLineError(f"{name} is {_shown(value)}, expected a number")
    if not (math.isfinite(value) if type(value) is float else True) or not 0 <= value <= largest:
        raise BadLineError(f"{name} is {_shown(value)}, expected a number from 0 to {largest}")
    return value


def _integer(fields: dict[str, Any], name: str, smallest: int, largest: int) -> int:
    value = _field(fields, name)
    if type(value) is not int or not smallest <= value <= largest:
        raise BadLineError(
            f"{name} is {_shown(value)}, expected an integer {smallest} to {largest}"
        )
    return value


def _ids(fields: dict[str, Any], input_length: int) -> list[int]:
    ids = _field(fields, "hash_ids")
    if type(ids) is not list:
        raise BadLineError(f"hash_ids is {_shown(ids)}, expected a list of integers")
    expected = -(-input_length // MOONCAKE_TOKENS_PER_ID)
    if len(ids) != expected:
        raise BadLineError(
            f"hash_ids has {len(ids)} ids, expected {expected} = ceil(input_length {input_length}"
            f" / {MOONCAKE_TOKENS_PER_ID})"
        )
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_ID:
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i <= MAX_ID)
        raise BadLineError(f"hash_ids holds {_shown(wrong)}, expected integers 0 to {MAX_ID}")
    return ids


def _shown(value: Any) -> str:
    text = repr(value)
    name = "" if value is None else f" ({type(value).__name__})"
    return f"{text if len(text) <= 60 else text[:57] + '...'}{name}"
