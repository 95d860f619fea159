"""The page about writing a tier: its example is run as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from docs_code import code_blocks, write_files

from backends.testing import FaultyTier, RowBuffer, make_context

REPO = Path(__file__).resolve().parents[2]
PAGE = "tiers.md"


@pytest.mark.multiproc
def test_the_documented_tier_passes_the_suite(tmp_path: Path) -> None:
    names = [path.name for path in write_files(PAGE, tmp_path)]
    assert names == ["directory_tier.py", "test_directory_tier.py"]
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    skipped = {
        skip.get("message") for case in suite.iter("testcase") for skip in case.iter("skipped")
    }
    assert int(suite.attrib["tests"]) > 50
    assert skipped == {"for tiers with can_stall", "for tiers with quota"}


def test_the_documented_tier_is_clean(tmp_path: Path) -> None:
    paths = [str(path) for path in write_files(PAGE, tmp_path)]
    config = str(REPO / "pyproject.toml")
    for folder, command in (
        (tmp_path, ["ruff", "check", "--config", config, *paths]),
        (tmp_path, ["ruff", "format", "--check", "--config", config, *paths]),
        (REPO, ["mypy", *paths[:1]]),  # with the cache and the rules of the repository
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_documented_wrappers_can_be_made() -> None:
    [block] = [block for block in code_blocks(PAGE) if "FaultyTier(" in block]
    made: dict[str, object] = {"context": make_context(RowBuffer(1, 8192))}
    exec(block, made)
    tier = made["bad"]
    assert isinstance(tier, FaultyTier)
    tier.close()
