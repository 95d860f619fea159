"""Thousands of rounds with random SIGKILLs leave nothing behind and change no byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).with_name("stress_region.py")
ROOT = STRESS.parents[2]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(240)
def test_random_kills_leak_no_file_and_no_memory_and_no_byte_is_wrong() -> None:
    """The number of rounds decides how long it takes; a slow machine ends after 60 s."""
    done = subprocess.run(
        [sys.executable, str(STRESS), "--rounds", "3000", "--seconds", "60"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == []
    assert done.returncode == 0
    for count in ("attached", "killed", "refused", "verified"):
        assert result[count] > result["rounds"] // 50
    assert result["rounds"] > 100
