"""The object tier passes the suite that every tier passes: in a directory, and in memory."""

from __future__ import annotations

from object_kit import MemoryHarness, ObjectHarness

from backends.testing import TierConformance
from backends.testing.machine import TierMachine, machine_test


class TestDirectory(TierConformance):
    harness_type = ObjectHarness


class TestMemory(TierConformance):
    harness_type = MemoryHarness


class DirectoryMachine(TierMachine):
    harness_type = ObjectHarness


class FullMemoryMachine(TierMachine):
    harness_type = MemoryHarness
    capacity_blocks = 4


TestDirectoryMachine = machine_test(DirectoryMachine, examples=10)
TestFullMemoryMachine = machine_test(FullMemoryMachine, examples=10)
