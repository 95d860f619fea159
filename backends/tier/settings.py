"""From what a configuration says of a tier to the tier's own frozen settings, before it is opened.

Only types are known here, those of the settings dataclass's fields. What a value means is checked
by the dataclass itself, in its `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgspec

from backends.errors import KvquayError, TierError
from backends.units import parse_size

_SIZE_MARK: Final = "a size: bytes, or text such as 512MiB"

Size = Annotated[int, _SIZE_MARK]
"""The type of a setting in bytes that a configuration may give as text, `8GiB`."""

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One thing wrong with a tier's settings.

    `key` is dotted and relative to the tier ("" for the whole). `value` is what stands there; None
    where nothing does, or where it is nobody's business: an unknown key may be a secret.
    """

    key: str
    value: object
    expected: str
    fix: str


class SettingsError(TierError):
    """A tier's settings are wrong; carries every problem that was found."""

    def __init__(self, where: str, problems: Iterable[SettingsProblem]) -> None:
        self.problems = tuple(problems)
        lines = [
            f"{'.'.join(filter(None, (where, p.key)))}"
            f"{'' if p.value is None else f' is {p.value!r}'}: {p.expected}; {p.fix}"
            for p in self.problems
        ]
        super().__init__("\n".join(lines))


def convert_settings(
    settings_type: type[_Settings], given: Mapping[str, Any], where: str = ""
) -> _Settings:
    """`given`, plain data as YAML has it, as a `settings_type`. Raises SettingsError with all that
    is wrong; `where` is put before each key in its message."""
    problems: list[SettingsProblem] = []
    settings = _convert(settings_type, given, "", problems)
    if problems:
        raise SettingsError(where, problems)
    return typing.cast(_Settings, settings)


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known word, else the list of what is known."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(choices)}" if choices else "nothing is known here"


def _convert(
    kind: Any, given: Mapping[str, Any], prefix: str, problems: list[SettingsProblem]
) -> object:
    before = len(problems)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind, include_extras=True)
    for key in given:
        if key not in fields:
            name = f"{prefix}{key}"
            problems.append(
                SettingsProblem(name, None, "there is no such setting", suggest(str(key), fields))
            )
    values: dict[str, object] = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _value(hints[name], given[name], f"{prefix}{name}", problems)
        elif field.default is field.default_factory is dataclasses.MISSING:
            needs = f"it has to be given: {_words(hints[name])}"
            problems.append(SettingsProblem(f"{prefix}{name}", None, needs, f"set {name}"))
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except (KvquayError, ValueError, TypeError) as error:
        key = prefix.removesuffix(".")
        problems.append(SettingsProblem(key, None, str(error), "change it"))
        return None


def _value(hint: Any, given: object, key: str, problems: list[SettingsProblem]) -> object:
    for kind in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(kind) and isinstance(given, Mapping):
            return _convert(kind, given, f"{key}.", problems)
    if isinstance(given, str) and _is_size(hint) and given not in _choices(hint):
        try:
            return parse_size(given)
        except ValueError:
            fix = "write a number and a unit, such as 512MiB, 8GiB or 2TB"
            problems.append(SettingsProblem(key, given, f"expected {_words(hint)}", fix))
            return None
    try:
        return msgspec.convert(given, hint)
    except msgspec.ValidationError as error:
        choices = _choices(hint)
        fix = suggest(given, choices) if choices and isinstance(given, str) else f"change {key}"
        expected = f"expected {_words(hint)}"
        if not choices:
            expected += f" ({error})"
        problems.append(SettingsProblem(key, given, expected, fix))
        return None


def _is_size(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _SIZE_MARK in get_args(hint)[1:]
    return any(_is_size(part) for part in get_args(hint))


def _choices(hint: Any) -> list[str]:
    """The words that a Literal, or one inside a union, allows."""
    if get_origin(hint) is typing.Literal:
        return [str(choice) for choice in get_args(hint)]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _words(hint: Any) -> str:
    choices = _choices(hint)
    if _is_size(hint):
        return " or ".join((_SIZE_MARK, *choices))
    if choices:
        return f"one of {', '.join(choices)}"
    return hint.__name__ if isinstance(hint, type) else str(hint)
