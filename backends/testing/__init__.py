"""How a tier is tested, ours or a user's; and tiers to test with what stands on top of them.

- TierConformance: the tests that every tier passes unchanged. TierHarness says how to open one.
- TierMachine, machine_test: the same tier in any order of calls, against a model. Needs Hypothesis.
- MemoryTier, SlowTier, FaultyTier: a right tier, a distant one, and one on a bad day.
- RowBuffer, TierBench: rows with known bytes, and a bench that drives and watches a tier.

See docs/tiers.md. pytest and Hypothesis are imported only by those that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from backends.testing.bench import ContractBroken, TierBench
from backends.testing.faulty import Fault, FaultKind, FaultyTier
from backends.testing.harness import Opener, TierHarness
from backends.testing.memory import MemoryHarness, MemoryMedium, MemorySettings, MemoryTier
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context, make_keys, stored_block
from backends.testing.slow import SlowTier

if TYPE_CHECKING:
    from backends.testing.conformance import TierConformance
    from backends.testing.machine import TierMachine, machine_test

_LATE: Final = {
    "TierConformance": "backends.testing.conformance",
    "TierMachine": "backends.testing.machine",
    "machine_test": "backends.testing.machine",
}

__all__ = [
    "FINGERPRINT",
    "ContractBroken",
    "Fault",
    "FaultKind",
    "FaultyTier",
    "MemoryHarness",
    "MemoryMedium",
    "MemorySettings",
    "MemoryTier",
    "Opener",
    "RowBuffer",
    "SlowTier",
    "TierBench",
    "TierConformance",
    "TierHarness",
    "TierMachine",
    "machine_test",
    "make_context",
    "make_keys",
    "stored_block",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TierConformance":
        import pytest

        # Before they are imported, so that a failed assertion shows what it compared.
        pytest.register_assert_rewrite("backends.testing.suite")
    return getattr(importlib.import_module(_LATE[name]), name)
