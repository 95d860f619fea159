"""TierConformance: the tests that a tier passes, whoever wrote it.

    from backends.testing import TierConformance, TierHarness

    class MyHarness(TierHarness):
        ...

    class TestMyTier(TierConformance):
        harness_type = MyHarness

No test is to be changed or left out for a tier; those that need a capability which the tier does
not declare are skipped, and pytest says so.
"""

from __future__ import annotations

from backends.testing.suite.basics import BasicTests
from backends.testing.suite.damage import DamageTests
from backends.testing.suite.deadlines import DeadlineTests
from backends.testing.suite.lifecycle import LifecycleTests
from backends.testing.suite.processes import ProcessTests
from backends.testing.suite.quota import QuotaTests


class TierConformance(
    BasicTests, DamageTests, DeadlineTests, LifecycleTests, ProcessTests, QuotaTests
):
    """Derive from it, name the class `Test...`, and set `harness_type`."""
