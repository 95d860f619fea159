"""The conformance suite fails for tiers that break the contract, and where it is meant to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest
from docs_code import write_files

HERE = Path(__file__).resolve().parent
BROKEN = HERE / "broken_tiers.py"


@pytest.mark.multiproc
def test_every_broken_tier_is_caught(tmp_path: Path) -> None:
    write_files("tiers.md", tmp_path)
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", f"--basetemp={tmp_path / 'run'}", str(BROKEN)),
        ],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parents[1]}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    ran: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"failed": set(), "passed": set()})
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        assert "skipped" not in kinds, case.attrib
        ended = "failed" if kinds & {"failure", "error"} else "passed"
        tier = case.attrib["classname"].rpartition(".")[2]
        ran[tier][ended].add(case.attrib["name"].partition("[")[0])
    # Of a test with parameters, one that fails is enough.
    missed = {tier: tests["passed"] - tests["failed"] for tier, tests in ran.items()}
    assert {tier: names for tier, names in missed.items() if names} == {}
    assert set(ran) == set(re.findall(r"^class (Test\w+)\(Broken\)", BROKEN.read_text(), re.M))
    assert len(ran) >= 25
