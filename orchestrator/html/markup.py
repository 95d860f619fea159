"""HTML elements as text that is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

_SPACES: Final = "\n\t\u00a0"
_VOID: Final = frozenset(("meta", "link", "br", "hr"))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Html | str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element. Children that are no Html are escaped, iterables are laid out, None is nothing.

    An attribute's underscores stand for hyphens, one at the end for nothing (`class_`); False and
    None leave it out, True is an attribute without a value.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        parts.append(f" {key.rstrip('_').replace('_', '-')}")
        if value is not True:
            parts.append(f'="{html.escape(str(value))}"')
    parts.append(">")
    if name in _VOID:
        return Html("".join(parts))
    return Html("".join((*parts, text(*children), f"</{name}>")))


def text(*children: Child) -> Html:
    """Children one after the other."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(_visible(child)))
        elif isinstance(child, (int, float)):
            parts.append(str(child))
        else:
            parts.append(text(*child))
    return Html("".join(parts))


def _visible(words: str) -> str:
    """What cannot be written as UTF-8, or is a control, is shown and not passed on."""
    return "".join(c if c in _SPACES or c.isprintable() else ascii(c)[1:-1] for c in words)
