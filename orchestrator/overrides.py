"""Checks a command line against the schema before Hydra composes it.

Hydra stops at the first unknown key and cannot suggest one. Here all of them are found, with what
was probably meant, before anything is written to the disk. What only Hydra can find is put into
the same words by `explain`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from orchestrator.object_store import FROM_THE_ENVIRONMENT, KEY, URL_KEYS
from orchestrator.problems import Problem, did_you_mean
from orchestrator.schema import Config
from orchestrator.values import NOT_YET, check_value, not_yet

OPTIONAL_GROUPS = ("experiment",)
NICKNAMES = {
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tp": "tensor_parallel_size",
    "dcp": "decode_context_parallel_size",
}
_CREDENTIAL = re.compile(r"secret|passw|credential|token|key|user|account|profile", re.IGNORECASE)
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str, int, float, bool), "text"),
}


def schema_fields(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the configuration and its type; groups included."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        found[key] = hint
        if dataclasses.is_dataclass(hint):
            found |= schema_fields(hint, key + ".")
    return found


def check_overrides(argv: Sequence[str], conf: Path) -> list[Problem]:
    """Everything on a command line that is wrong by itself: keys, options, types, values.

    Values of a sweep are checked for their type alone: a job that cannot work must not keep the
    others from running. Raises SystemExit where an option is unknown; argparse has told it then.
    """
    args = get_args_parser().parse_args(list(argv))
    options = _options(_directories(args, conf))
    # More options may stand where Hydra alone can look.
    all_known = not any("hydra.searchpath" in text for text in args.overrides)
    fields = schema_fields()
    problems: list[Problem] = []
    parser = OverridesParser.create()
    for text in args.overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            limit = f"cannot be read: {_one_line(error)}"
            problems.append(Problem(text, None, limit, "write KEY=VALUE, quote it if need be"))
            continue
        key = override.key_or_group
        if not key:
            problems.append(Problem(text, None, "has no key", "write KEY=VALUE"))
        elif key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            problems += _check_hydra(key, override)
        elif key in options:
            problems += _check_options(key, override, options[key], all_known)
        else:
            problems += _check_key(key, override, fields, list(options))
    return problems


def explain(error: BaseException) -> Problem:
    """What Hydra or OmegaConf stopped at, in our words.

    An OSError is that of a directory which Hydra makes for the run.
    """
    for cause in _chain(error):
        if isinstance(cause, OSError) and not isinstance(cause, HydraException):
            return Problem(
                "hydra.run.dir",
                cause.filename,
                f"cannot be made or written: {cause.strerror or cause}",
                "choose another place with hydra.run.dir=PATH (a sweep: hydra.sweep.dir=PATH)",
            )
    for cause in _chain(error):
        if isinstance(cause, OmegaConfBaseException):
            return _explain_value(cause)
    text = _one_line(error).split(" Config search path:")[0]
    return Problem(
        "the command line", None, f"cannot be composed: {text}", "see python launch.py --help"
    )


def _explain_value(error: OmegaConfBaseException) -> Problem:
    key = str(error.full_key or "the configuration")
    limit = str(error.msg or error).split("\n", 1)[0]
    fix = f"correct {key}; python launch.py --help shows every key and its default"
    if isinstance(error, (InterpolationKeyError, InterpolationResolutionError)):
        fix = "refer to a key that exists, such as ${region.size}, or write the value itself"
    elif isinstance(error, MissingMandatoryValue):
        fix = f"set it: {key}=VALUE"
    return Problem(key, None, f"has no usable value: {limit}", fix)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from or while handling."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _directories(args: argparse.Namespace, conf: Path) -> list[Path]:
    """Where options of groups may stand: `conf`, and what the command line adds to it."""
    if args.config_path:
        conf = conf.parent / args.config_path
    return [conf, *([Path(args.config_dir)] if args.config_dir else [])]


def _options(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Every config group and its options."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path in directory.glob("*/**/*.yaml"):
            group, _, option = path.relative_to(directory).with_suffix("").as_posix().partition("/")
            if group != "hydra":
                found.setdefault(group, set()).add(option)
    return {group: sorted(options) for group, options in sorted(found.items())}


def _values(override: Override) -> list[Any]:
    """The value, or those of a sweep as far as they are listed one by one."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        return []
    return [getattr(value, "text", value) for value in override.sweep_iterator()]


def _typed(override: Override, value: Any) -> str:
    """A value as it was typed, as far as that is known."""
    if override.is_sweep_override() or isinstance(value, str):
        return str(value)
    return (override.input_line or "").partition("=")[2]


def _check_hydra(key: str, override: Override) -> list[Problem]:
    """Only what would break the promises of a run; the rest is Hydra's to check."""
    value = None if override.is_delete() else override.value()
    if key in ("hydra.run.dir", "hydra.sweep.dir") and str(value or "???") == "???":
        return [Problem(key, value, "must name a directory", f"set {key}=PATH, or leave it out")]
    if key == "hydra.job.chdir" and value is not False:
        limit = "must stay false: paths are taken from where the command was typed"
        return [Problem(key, value, limit, "leave it out")]
    return []


def _check_options(
    group: str, override: Override, options: list[str], all_known: bool
) -> list[Problem]:
    listed = f"(options: {', '.join(options)})"
    if override.is_delete():
        limit = "is a group and cannot be deleted"
        return [Problem(group, None, limit, f"choose another option {listed}")]
    problems = []
    for value in _values(override):
        if value is None or value == "":
            if group not in OPTIONAL_GROUPS:
                problems.append(Problem(group, value, "must be one option", f"choose one {listed}"))
            continue
        for option in value if isinstance(value, list) else [value]:
            if str(option) in options or not all_known:
                continue
            if str(option) in NOT_YET.get(group, ()):
                problems.append(not_yet(group, str(option)))
                continue
            hint = did_you_mean(str(option), options)
            fix = f"{hint} {listed}" if hint.startswith("did you") else f"choose one {listed}"
            limit = f"is not an option of the group {group!r}"
            problems.append(Problem(group, option, limit, fix))
    return problems


def _check_key(
    key: str, override: Override, fields: dict[str, Any], groups: list[str]
) -> list[Problem]:
    if key in fields:
        return _check_known(key, fields[key], override)
    above = key.rpartition(".")[0]
    while above:
        hint = fields.get(above)
        if hint is not None and not dataclasses.is_dataclass(hint):
            if "list" in str(hint):
                return []  # an entry of a list is Hydra's to check
            if typing.get_origin(hint) is dict:
                limit = f"cannot be set alone: {above} is one mapping"
                return [Problem(key, None, limit, f"set {above}={{KEY:VALUE}}")]
            limit = f"is not a key of the configuration: {above} holds one value"
            return [Problem(key, None, limit, f"set {above}=VALUE")]
        above = above.rpartition(".")[0]
    return [Problem(key, None, "is not a key of the configuration", _meant(key, fields, groups))]


def _meant(key: str, fields: dict[str, Any], groups: list[str]) -> str:
    """What an unknown key was probably to be."""
    parent, _, name = key.rpartition(".")
    if parent == KEY and _CREDENTIAL.search(name):
        return FROM_THE_ENVIRONMENT
    name = NICKNAMES.get(name, name)
    siblings = [k.rpartition(".")[2] for k in fields if k.rpartition(".")[0] == parent]
    if parent in fields:
        hint = did_you_mean(name, siblings)
        return hint.replace("did you mean '", f"did you mean '{parent}.")
    leaves = [k for k, hint in fields.items() if not dataclasses.is_dataclass(hint)]
    hint = did_you_mean(key, leaves if parent else [*leaves, *groups])
    return "python launch.py --help lists every key" if hint.startswith("known") else hint


def _check_known(key: str, hint: Any, override: Override) -> list[Problem]:
    if override.is_delete():
        return [Problem(key, None, "cannot be deleted", f"set {key} to another value instead")]
    if override.is_add() and not override.is_force_add():
        fix = f"leave out the +: {(override.input_line or key).removeprefix('+')}"
        return [Problem(key, None, "is in the configuration already and cannot be added", fix)]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        limit = "cannot be swept with glob, which picks options of a group"
        return [Problem(key, None, limit, f"list the values: {key}=A,B")]
    if dataclasses.is_dataclass(hint):
        return []
    sweeping = override.is_sweep_override()
    problems = []
    for value in _values(override):
        text = _typed(override, value)
        found = _check_type(key, hint, value, text)
        # What may be a secret is refused in a sweep too: Hydra would write it down.
        checked = not sweeping or key in URL_KEYS
        if not found and checked and not _is_interpolation(value):
            found = check_value(key, text if hint is str else value)
        problems += found
    return problems


def _check_type(key: str, hint: Any, value: Any, text: str) -> list[Problem]:
    """A value against the type of its key; `text` is how it was typed."""
    optional = type(None) in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if value is None:
        fix = f"set it: {key}=VALUE"
        return [] if optional else [Problem(key, "null", "must have a value", fix)]
    if _is_interpolation(value):
        return []
    if expected := _mismatch(hint, value):
        expected += " or null" if optional else ""
        return [Problem(key, text, f"must be {expected}", f"set {key} to {expected}")]
    if typing.get_origin(hint) is not list:
        return []
    (of,) = typing.get_args(hint)
    if not dataclasses.is_dataclass(of):
        return []
    return [
        p for index, entry in enumerate(value) for p in _check_entry(f"{key}[{index}]", of, entry)
    ]


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _check_entry(key: str, cls: Any, entry: Any) -> list[Problem]:
    """One mapping of a list of mappings, such as `model.groups[0]`."""
    if not isinstance(entry, dict):
        return [Problem(key, entry, "must be a mapping", f"write it like {{{_first(cls)}: VALUE}}")]
    hints = typing.get_type_hints(cls)
    problems = []
    for name, value in entry.items():
        if name in hints:
            problems += _check_type(f"{key}.{name}", hints[name], value, str(value))
        else:
            hint = did_you_mean(str(name), hints)
            problems.append(Problem(f"{key}.{name}", None, "is not a key of such a mapping", hint))
    return problems


def _first(cls: Any) -> str:
    return dataclasses.fields(cls)[0].name


def _mismatch(hint: Any, value: Any) -> str:
    """What a value of this type must be, "" if it is that."""
    if typing.get_origin(hint) is list:
        (of,) = typing.get_args(hint)
        expected = _SCALARS[of][1] if of in _SCALARS else "a mapping"
        if not isinstance(value, list) or any(_mismatch(of, entry) for entry in value):
            return f"a list in brackets, [A,B], each entry {expected}"
        return ""
    if typing.get_origin(hint) is dict:
        of_key, of = typing.get_args(hint)
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        if any(_mismatch(of_key, k) or _mismatch(of, v) for k, v in pairs):
            expected = f"each KEY {_SCALARS[of_key][1]}, each VALUE {_SCALARS[of][1]}"
            return f"a mapping in braces, {{KEY:VALUE}}, {expected}"
        return ""
    if hint not in _SCALARS:
        return ""
    kinds, expected = _SCALARS[hint]
    is_flag = isinstance(value, bool) and hint not in (bool, str)
    return "" if isinstance(value, kinds) and not is_flag else expected
