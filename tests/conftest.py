"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

# How long an example takes says more about what else the machine is doing than about the code.
settings.register_profile("kvquay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvquay")

# A CI system that starts its script in the background hands down an ignored SIGINT, and every
# program that a test starts and interrupts would keep it so. At a terminal it is not ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
