"""The filesystem tier in any order of calls, against a model: one disk, two, buffered, and full."""

from __future__ import annotations

from filesystem_kit import BufferedHarness, FilesystemHarness, TwoPathsHarness

from backends.testing import TierMachine, machine_test


class OnePath(TierMachine):
    harness_type = FilesystemHarness


class Buffered(TierMachine):
    harness_type = BufferedHarness


class TwoPaths(TierMachine):
    harness_type = TwoPathsHarness


class Full(TierMachine):
    harness_type = FilesystemHarness
    capacity_blocks = 5


class TwoFullPaths(TierMachine):
    harness_type = TwoPathsHarness
    capacity_blocks = 6


TestOnePath = machine_test(OnePath, examples=10, steps=25)
TestBuffered = machine_test(Buffered, examples=6, steps=25)
TestTwoPaths = machine_test(TwoPaths, examples=10, steps=25)
TestFull = machine_test(Full, examples=10, steps=25)
TestTwoFullPaths = machine_test(TwoFullPaths, examples=8, steps=25)
