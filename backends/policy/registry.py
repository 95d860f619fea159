"""Eviction and admission policies by name: ours, and a user's own by entry point.

A distribution announces its eviction policies in the entry point group `kvquay.policies`:

    [project.entry-points."kvquay.policies"]
    clock = "my_package.policy:Clock"

The object named there is called with a capacity in entries and returns an EvictionPolicy: most
often it is the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Final

from backends.errors import ConfigError, KvquayError
from backends.plugins import Plugins
from backends.policy.base import EvictionPolicy

GROUP: Final = "kvquay.policies"
BUILTIN: Final = {
    "arc": "backends.policy.arc:Arc",
    "lru": "backends.policy.lru:Lru",
    "prefix_cost": "backends.policy.prefix_cost:PrefixCost",
    "s3fifo": "backends.policy.s3fifo:S3Fifo",
    "sieve": "backends.policy.sieve:Sieve",
    "tinylfu": "backends.policy.tinylfu:TinyLfu",
}


class PolicyRegistry:
    """The eviction policies of this installation."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        """`entry_points` None: those of group `kvquay.policies` that are installed."""
        self._plugins = Plugins("eviction policy", GROUP, ConfigError, BUILTIN, entry_points)

    def names(self) -> tuple[str, ...]:
        """Every name that `open` takes, sorted."""
        return self._plugins.names()

    def open(self, name: str, capacity: int) -> EvictionPolicy:
        """A new policy for a tier of `capacity` entries.

        Raises ConfigError: no such name, one that two distributions claim, or one that is no
        eviction policy.
        """
        plugin = self._plugins.find(name)
        factory = plugin.load()
        try:
            policy = factory(capacity)
        except KvquayError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{plugin} cannot be opened: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(
                f"{plugin} gave a {type(policy).__name__}, expected a "
                "backends.policy.base.EvictionPolicy; report it to that distribution"
            )
        return policy
