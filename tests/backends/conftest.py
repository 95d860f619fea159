"""Fixtures of the backends' tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm_dir() -> Iterator[str]:
    """A directory of its own inside /dev/shm, so that tests see no other program's files."""
    path = tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of 4 MiB of its own, which a test may fill."""
    point = tmp_path / "tmpfs"
    point.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield str(point)
    subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def as_root() -> None:
    """Skip where this test cannot take on another user."""
    if os.geteuid() != 0:
        pytest.skip("taking on another user needs root")
