"""Whether another program's interface is the one that an adapter was written for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

Needed = tuple[str, str, tuple[str, ...]]
"""Module, dotted name in it, and the parameters that are passed or taken; none: anything."""


def mismatches(needed: Iterable[Needed]) -> list[str]:
    """Everything that is missing, or takes other parameters than it did."""
    return [problem for one in needed if (problem := _mismatch(*one))]


def _mismatch(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        return f"{module}.{name} is not there ({error})"
    if not parameters:
        return None
    taken = inspect.signature(thing).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return None
    required = [
        p.name
        for p in taken.values()
        if p.default is p.empty and p.name not in parameters and p.kind is not p.VAR_POSITIONAL
    ]
    if required or any(p not in taken for p in parameters):
        return f"{name} takes ({', '.join(taken)}), expected ({', '.join(parameters)})"
    return None
