"""Checks a command line against the schema before Hydra composes it.

Hydra stops at the first unknown key and cannot suggest one. Here all of them are found, with what
was probably meant, before anything is written to the disk.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from orchestrator.problems import Problem, did_you_mean
from orchestrator.schema import Config

# What is known to come, so that it is refused as not there yet instead of as a misspelling.
NOT_YET: dict[str, tuple[str, ...]] = {
    "tiers": ("shm_fs", "shm_object", "shm_fs_object", "shm_fs_s3"),
    "tier": ("fs", "object"),
    "engine": ("vllm",),
    "spawn": ("ray", "slurm"),
    "action": ("doctor", "simulate", "export"),
    "tiers.order": ("fs", "object"),
    "spawn.kind": ("ray", "slurm"),
    "engine.kind": ("vllm",),
    "spawn.scope": ("node",),
}
NOT_YET_KEYS = ("tiers.stack.fs", "tiers.stack.object", "engine.model", "sweep", "region.scope")
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}


def not_yet(key: str, value: str) -> Problem:
    return Problem(
        key,
        value,
        "is not there yet in this version of kvquay",
        "see the README for what works now; leave it out",
    )


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
    """Every unknown key, group or option and every value of a wrong type on a command line."""
    try:
        texts = get_args_parser().parse_args(list(argv)).overrides
    except SystemExit:  # argparse has said it; Hydra will again, with the right status
        return []
    groups = sorted(p.name for p in conf.iterdir() if p.is_dir() and p.name != "hydra")
    fields = schema_fields()
    problems: list[Problem] = []
    parser = OverridesParser.create()
    for text in texts:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split())
            problems.append(
                Problem(
                    text, None, f"cannot be read: {reason}", "write KEY=VALUE, quote it if need be"
                )
            )
            continue
        key = override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            continue
        if key in groups and not override.is_delete():
            problems += _check_options(key, override, conf)
        else:
            problems += _check_key(key, override, fields, groups)
    return problems


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator())
    return [override.value()]


def _check_options(group: str, override: Override, conf: Path) -> list[Problem]:
    options = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    problems = []
    for value in _values(override):
        if value is None or isinstance(value, (list, dict)) or str(value) in options:
            continue
        if str(value) in NOT_YET.get(group, ()):
            problems.append(not_yet(group, str(value)))
            continue
        problems.append(
            Problem(
                group,
                value,
                f"is not an option of the group {group!r}",
                f"{did_you_mean(str(value), options)} (options: {', '.join(options)})",
            )
        )
    return problems


def _check_key(
    key: str, override: Override, fields: dict[str, Any], groups: list[str]
) -> list[Problem]:
    if key in fields:
        return _check_values(key, fields[key], override)
    parent = key.rpartition(".")[0]
    while parent:  # below a list or a mapping anything may stand
        hint = fields.get(parent)
        if hint is not None and not dataclasses.is_dataclass(hint):
            return []
        parent = parent.rpartition(".")[0]
    if any(key == known or key.startswith(known + ".") for known in NOT_YET_KEYS):
        return [not_yet(key, str(override.value()))]
    parent = key.rpartition(".")[0]
    siblings = [k for k in fields if k.rpartition(".")[0] == parent] if parent in fields else []
    known = siblings or [k for k, hint in fields.items() if not dataclasses.is_dataclass(hint)]
    hint_text = did_you_mean(key, [*known, *groups] if not parent else known)
    if hint_text.startswith("known") and not siblings:
        hint_text = "python launch.py --help lists every key"
    return [Problem(key, None, "is not a key of the configuration", hint_text)]


def _check_values(key: str, hint: Any, override: Override) -> list[Problem]:
    if override.is_delete():
        return [Problem(key, None, "cannot be deleted", f"set {key} to another value instead")]
    if dataclasses.is_dataclass(hint):
        return []
    optional = type(None) in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    problems = []
    for value in _values(override):
        text = str(getattr(value, "text", value))
        if (value is None and optional) or text.startswith("${"):
            continue
        if value is None:
            problems.append(Problem(key, None, "has no value", f"set it: {key}=VALUE"))
            continue
        if hint not in _SCALARS:
            continue
        kinds, expected = _SCALARS[hint]
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            problems.append(Problem(key, text, f"must be {expected}", f"set {key} to {expected}"))
    return problems
