"""Tiers by name: those that come with kvquay, and a user's own by entry point.

A distribution announces its tiers in the entry point group `kvquay.tiers`:

    [project.entry-points."kvquay.tiers"]
    redis = "my_package.tier:RedisTier"

The object named there is called with a TierContext and its settings, and returns a Tier: most often
it is the tier's class. It has an attribute `settings_type`, a frozen dataclass whose typed fields
are all that a configuration may say of the tier. A name in a configuration only ever chooses among
what is installed: no import path is taken from one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Final, Protocol

from backends.errors import KvquayError, TierError
from backends.tier.base import Tier, TierContext
from backends.tier.settings import convert_settings, suggest

GROUP: Final = "kvquay.tiers"
BUILTIN: Final[Mapping[str, str]] = {"fs": "backends.tier.filesystem:FilesystemTier"}
_OURS: Final = "kvquay itself"


class TierFactory(Protocol):
    """What makes a tier: its class, or a function with an attribute `settings_type`."""

    @property
    def settings_type(self) -> type[Any]:
        """A frozen dataclass."""

    def __call__(self, context: TierContext, settings: Any, /) -> Tier: ...


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A tier that was found and loaded. `origin` says, for people, who brought it."""

    name: str
    origin: str
    factory: TierFactory

    def settings(self, given: Mapping[str, Any], where: str = "") -> Any:
        """What a configuration says of this tier, as its `settings_type`; opens nothing.

        Raises SettingsError, with all problems at once.
        """
        return convert_settings(self.factory.settings_type, given, where)

    def open(self, context: TierContext, settings: Any) -> Tier:
        """The tier, ready. Raises TierError, or what else of ours the tier raises."""
        if not isinstance(settings, self.factory.settings_type):
            raise TierError(
                f"tier {self.name!r} was given settings of type {type(settings).__name__}, "
                f"expected {self.factory.settings_type.__name__}; make them with TierEntry.settings"
            )
        try:
            tier = self.factory(context, settings)
        except KvquayError:
            raise
        except Exception as error:
            raise TierError(
                f"tier {self.name!r} of {self.origin} cannot be opened: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(tier, Tier):
            raise TierError(
                f"tier {self.name!r} of {self.origin} gave a {type(tier).__name__}, expected a "
                "backends.tier.base.Tier; report it to that distribution"
            )
        return tier


@dataclass(frozen=True, slots=True)
class _Source:
    origin: str
    target: str


class TierRegistry:
    """The tiers of this installation. Nothing is imported before `find` asks for it."""

    def __init__(
        self,
        builtin: Mapping[str, str] = BUILTIN,
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> None:
        """`entry_points` None: those of group `kvquay.tiers` that are installed."""
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=GROUP)
        self._sources: dict[str, list[_Source]] = {
            name: [_Source(_OURS, target)] for name, target in builtin.items()
        }
        for point in entry_points:
            source = _Source(_distribution(point), point.value)
            sources = self._sources.setdefault(point.name, [])
            if source not in sources:
                sources.append(source)

    def names(self) -> tuple[str, ...]:
        """Every name that `find` takes, sorted."""
        return tuple(sorted(self._sources))

    def find(self, name: str) -> TierEntry:
        """The tier of this name, imported. Raises TierError: no such name, a name that two
        distributions claim, or one that cannot be loaded."""
        sources = self._sources.get(name)
        if sources is None:
            raise TierError(
                f"there is no tier {name!r}; {suggest(name, self._sources)} A tier of your own is "
                f"announced by entry point, group {GROUP}"
            )
        if len(sources) > 1:
            claims = " and ".join(f"{source.origin} ({source.target})" for source in sources)
            raise TierError(
                f"the tier name {name!r} is claimed by {claims}; uninstall or rename one of them"
            )
        [source] = sources
        return TierEntry(name, source.origin, _load(name, source))


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"distribution {point.dist.name} {point.dist.version}"


def _load(name: str, source: _Source) -> TierFactory:
    where = f"tier {name!r} of {source.origin} ({source.target})"
    try:
        factory = EntryPoint(name, source.target, GROUP).load()
    # Whatever the import of somebody else's module raises is told, not passed on.
    except Exception as error:
        raise TierError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}; mend or uninstall it"
        ) from error
    kind = getattr(factory, "settings_type", None)
    if not callable(factory) or not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TierError(
            f"{where} is not a tier factory: expected something to call, with an attribute "
            "settings_type that is a dataclass"
        )
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TierError(f"{where} has settings_type {kind.__name__}, expected a frozen dataclass")
    loaded: TierFactory = factory
    return loaded
