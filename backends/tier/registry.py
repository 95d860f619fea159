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

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from backends.errors import KvquayError, TierError
from backends.tier.settings import convert_settings, suggest

if TYPE_CHECKING:
    # A plan checks tiers' settings, and answers before numpy could be imported.
    from backends.tier.base import Tier, TierContext

GROUP: Final = "kvquay.tiers"
_OURS: Final = "kvquay itself"


class Builtin(NamedTuple):
    """Where a tier of ours stands, as `module:name`; settings can be had without the tier."""

    tier: str
    settings: str


BUILTIN: Final[Mapping[str, Builtin]] = {
    "fs": Builtin(
        "backends.tier.filesystem.tier:FilesystemTier",
        "backends.tier.filesystem.settings:FilesystemSettings",
    ),
}


class TierFactory(Protocol):
    """What makes a tier: its class, or a function with an attribute `settings_type`."""

    @property
    def settings_type(self) -> type[Any]:
        """A frozen dataclass."""

    def __call__(self, context: TierContext, settings: Any, /) -> Tier: ...


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A tier that was found. `origin` says, for people, who brought it."""

    name: str
    origin: str
    target: str
    settings_type: type[Any]

    def settings(self, given: Mapping[str, Any], where: str = "") -> Any:
        """What a configuration says of this tier, as its `settings_type`; opens nothing.

        Raises SettingsError, with all problems at once.
        """
        return convert_settings(self.settings_type, given, where)

    def open(self, context: TierContext, settings: Any) -> Tier:
        """The tier, ready. Raises TierError, or what else of ours the tier raises."""
        from backends.tier.base import Tier

        if not isinstance(settings, self.settings_type):
            raise TierError(
                f"tier {self.name!r} was given settings of type {type(settings).__name__}, "
                f"expected {self.settings_type.__name__}; make them with TierEntry.settings"
            )
        factory = _load(str(self), self.target)
        try:
            tier = factory(context, settings)
        except KvquayError:
            raise
        except Exception as error:
            raise TierError(f"{self} cannot be opened: {type(error).__name__}: {error}") from error
        if not isinstance(tier, Tier):
            raise TierError(
                f"{self} gave a {type(tier).__name__}, expected a backends.tier.base.Tier; report "
                "it to that distribution"
            )
        return tier

    def __str__(self) -> str:
        return f"tier {self.name!r} of {self.origin} ({self.target})"


@dataclass(frozen=True, slots=True)
class _Source:
    """`settings` None: the factory at `target` has them."""

    origin: str
    target: str
    settings: str | None = None


class TierRegistry:
    """The tiers of this installation. Nothing is imported before `find` asks for it."""

    def __init__(
        self,
        builtin: Mapping[str, Builtin] = BUILTIN,
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> None:
        """`entry_points` None: those of group `kvquay.tiers` that are installed."""
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=GROUP)
        self._sources: dict[str, list[_Source]] = {
            name: [_Source(_OURS, where.tier, where.settings)] for name, where in builtin.items()
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
        """The tier of this name. A tier of ours is not imported by that, only its settings are.

        Raises TierError: no such name, a name that two distributions claim, a tier that cannot be
        imported, or that is none.
        """
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
        where = f"tier {name!r} of {source.origin} ({source.target})"
        if source.settings is not None:
            kind = _load(where, source.settings)
        else:
            factory = _load(where, source.target)
            kind = getattr(factory, "settings_type", None)
            if not callable(factory) or not isinstance(kind, type):
                raise TierError(
                    f"{where} is not a tier factory: expected something to call, with an attribute "
                    "settings_type that is a dataclass"
                )
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise TierError(
                f"{where} has settings_type {kind.__name__}, expected a frozen dataclass"
            )
        return TierEntry(name, source.origin, source.target, kind)


def _distribution(point: EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"distribution {point.dist.name} {point.dist.version}"


def _load(where: str, target: str) -> Any:
    try:
        return EntryPoint("", target, GROUP).load()
    # Whatever the import of somebody else's module raises is told, not passed on.
    except Exception as error:
        raise TierError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}; mend or uninstall it"
        ) from error
