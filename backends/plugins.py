"""Names to what is installed under them: ours, and a user's own by entry point.

One `Plugins` serves one kind of thing, tiers or eviction policies. A name only ever chooses among
what is installed; no import path is taken from a configuration, and nothing is imported before it
is asked for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Final

from backends.errors import KvquayError
from backends.tier.settings import suggest

OURS: Final = "kvquay itself"


@dataclass(frozen=True, slots=True)
class Plugin:
    """Something installed that goes by a name. `origin` says, for people, who brought it; `target`
    is `module:attribute`."""

    kind: str
    name: str
    origin: str
    target: str
    error: type[KvquayError]

    def load(self, target: str | None = None) -> Any:
        """Import it, or another `target` that stands beside it. Raises the kind's error."""
        try:
            return EntryPoint("", target or self.target, "").load()
        # Whatever the import of somebody else's module raises is told, not passed on.
        except Exception as error:
            raise self.error(
                f"{self} cannot be loaded: {type(error).__name__}: {error}; mend or uninstall it"
            ) from error

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin} ({self.target})"


class Plugins:
    """Everything of one kind in this installation."""

    def __init__(
        self,
        kind: str,
        group: str,
        error: type[KvquayError],
        builtin: Mapping[str, str],
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> None:
        """`kind` is the word for it in messages, `error` what `find` and `load` raise, `builtin`
        the targets of ours. `entry_points` None: those of `group` that are installed."""
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=group)
        self._kind, self._group, self._error = kind, group, error
        self._found: dict[str, list[Plugin]] = {
            name: [Plugin(kind, name, OURS, target, error)] for name, target in builtin.items()
        }
        for point in entry_points:
            plugin = Plugin(kind, point.name, _distribution(point), point.value, error)
            claims = self._found.setdefault(point.name, [])
            if plugin not in claims:
                claims.append(plugin)

    def names(self) -> tuple[str, ...]:
        """Every name that `find` takes, sorted."""
        return tuple(sorted(self._found))

    def find(self, name: str) -> Plugin:
        """The one of this name, not imported. Raises the kind's error: there is none, or two
        distributions claim the name."""
        claims = self._found.get(name)
        if claims is None:
            raise self._error(
                f"there is no {self._kind} {name!r}; {suggest(name, self._found)} A {self._kind} "
                f"of your own is announced by entry point, group {self._group}"
            )
        if len(claims) > 1:
            both = " and ".join(f"{plugin.origin} ({plugin.target})" for plugin in claims)
            raise self._error(
                f"the {self._kind} name {name!r} is claimed by {both}; uninstall or rename one of "
                "them"
            )
        return claims[0]


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"distribution {point.dist.name} {point.dist.version}"
