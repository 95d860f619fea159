"""Every policy that comes with kvquay, and the documented one, does what the contract says."""

from __future__ import annotations

import pytest
from docs_code import code_blocks

from backends.policy.base import EvictionPolicy
from backends.policy.registry import PolicyRegistry
from backends.testing.policies import PolicyConformance

OURS = PolicyRegistry(entry_points=[])


@pytest.fixture(params=OURS.names())
def name(request: pytest.FixtureRequest) -> None:
    request.instance.name = request.param


@pytest.mark.usefixtures("name")
class TestOurs(PolicyConformance):
    name: str

    def open(self, capacity: int) -> EvictionPolicy:
        return OURS.open(self.name, capacity)


class TestDocumented(PolicyConformance):
    """The example in docs/policies.md, as it stands there."""

    def open(self, capacity: int) -> EvictionPolicy:
        names: dict[str, type[EvictionPolicy]] = {}
        exec(code_blocks("policies.md")[0], names)
        return names["Fifo"](capacity)
