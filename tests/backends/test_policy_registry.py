"""Eviction policies by name: ours, and a user's own by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from backends.errors import ConfigError
from backends.policy.lru import Lru
from backends.policy.registry import BUILTIN, GROUP, PolicyRegistry


class Own(Lru):
    """A user's."""


def no_policy(capacity: int) -> list[int]:
    return [capacity]


def broken(capacity: int) -> Lru:
    raise RuntimeError("no luck")


def registry(**targets: str) -> PolicyRegistry:
    return PolicyRegistry(EntryPoint(name, target, GROUP) for name, target in targets.items())


def test_ours_are_all_there() -> None:
    assert set(registry().names()) == set(BUILTIN)
    assert {"lru", "arc", "s3fifo", "sieve", "tinylfu", "prefix_cost"} == set(BUILTIN)


def test_a_policy_of_a_users_own_is_found_by_its_entry_point() -> None:
    found = registry(own=f"{__name__}:Own").open("own", 7)
    assert isinstance(found, Own)
    assert found.capacity == 7


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"no eviction policy 'lrv'; did you mean 'lru'\?"):
        registry().open("lrv", 1)


def test_a_name_of_ours_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="claimed by kvquay itself"):
        registry(lru=f"{__name__}:Own").open("lru", 1)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_module:Own", "cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:broken", "cannot be opened: RuntimeError: no luck"),
        (f"{__name__}:no_policy", "gave a list, expected a backends.policy.base.EvictionPolicy"),
    ],
)
def test_what_is_no_policy_is_told_with_its_origin(target: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        registry(own=target).open("own", 1)
