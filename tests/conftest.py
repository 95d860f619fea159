"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

# How long an example takes says more about what else the machine is doing than about the code.
settings.register_profile("kvquay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvquay")
