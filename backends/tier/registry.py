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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from backends.errors import KvquayError, TierError
from backends.plugins import OURS, Plugin, Plugins
from backends.tier.settings import convert_settings

if TYPE_CHECKING:
    # A plan checks tiers' settings, and answers before numpy could be imported.
    from backends.tier.base import Tier, TierContext

GROUP: Final = "kvquay.tiers"


class Builtin(NamedTuple):
    """Where a tier of ours stands, as `module:name`; settings can be had without the tier."""

    tier: str
    settings: str


BUILTIN: Final[Mapping[str, Builtin]] = {
    "fs": Builtin(
        "backends.tier.filesystem.tier:FilesystemTier",
        "backends.tier.filesystem.settings:FilesystemSettings",
    ),
    "object": Builtin(
        "backends.tier.object.tier:ObjectTier",
        "backends.tier.object.settings:ObjectSettings",
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
    """A tier that was found."""

    plugin: Plugin
    settings_type: type[Any]

    @property
    def name(self) -> str:
        return self.plugin.name

    @property
    def origin(self) -> str:
        """Who brought it, for people."""
        return self.plugin.origin

    @property
    def target(self) -> str:
        return self.plugin.target

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
        factory = self.plugin.load()
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
        return str(self.plugin)


class TierRegistry:
    """The tiers of this installation. Nothing is imported before `find` asks for it."""

    def __init__(
        self,
        builtin: Mapping[str, Builtin] = BUILTIN,
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> None:
        """`entry_points` None: those of group `kvquay.tiers` that are installed."""
        self._builtin = builtin
        targets = {name: where.tier for name, where in builtin.items()}
        self._plugins = Plugins("tier", GROUP, TierError, targets, entry_points)

    def names(self) -> tuple[str, ...]:
        """Every name that `find` takes, sorted."""
        return self._plugins.names()

    def find(self, name: str) -> TierEntry:
        """The tier of this name. A tier of ours is not imported by that, only its settings are.

        Raises TierError: no such name, a name that two distributions claim, a tier that cannot be
        imported, or that is none.
        """
        plugin = self._plugins.find(name)
        if plugin.origin == OURS:
            kind = plugin.load(self._builtin[name].settings)
        else:
            factory = plugin.load()
            kind = getattr(factory, "settings_type", None)
            if not callable(factory) or not isinstance(kind, type):
                raise TierError(
                    f"{plugin} is not a tier factory: expected something to call, with an "
                    "attribute settings_type that is a dataclass"
                )
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise TierError(
                f"{plugin} has settings_type {kind.__name__}, expected a frozen dataclass"
            )
        return TierEntry(plugin, kind)
