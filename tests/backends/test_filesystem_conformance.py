"""The filesystem tier passes the suite that every tier passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from filesystem_kit import FilesystemHarness

from backends.testing import TierConformance


class TestFilesystem(TierConformance):
    harness_type = FilesystemHarness


class BufferedHarness(FilesystemHarness):
    changes: ClassVar[Mapping[str, Any]] = {"direct": "off"}


class TestFilesystemBuffered(TierConformance):
    harness_type = BufferedHarness
    kills = 2


class TwoPathsHarness(FilesystemHarness):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.paths = [directory / "disk", directory / "disk1"]


class TestFilesystemOnTwoPaths(TierConformance):
    harness_type = TwoPathsHarness
    kills = 2
