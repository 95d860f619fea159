"""The filesystem tier passes the suite that every tier passes."""

from __future__ import annotations

from filesystem_kit import BufferedHarness, FilesystemHarness, TwoPathsHarness

from backends.testing import TierConformance


class TestFilesystem(TierConformance):
    harness_type = FilesystemHarness


class TestFilesystemBuffered(TierConformance):
    harness_type = BufferedHarness
    kills = 2


class TestFilesystemOnTwoPaths(TierConformance):
    harness_type = TwoPathsHarness
    kills = 2
