"""`action=clean` and a new start: what dead engines left in /dev/shm goes, what lives stays."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.region.region import Region
from backends.region.spec import RegionSpec
from tests.kit import REPO

# A launch beside it would remove what these leave behind.
pytestmark = [pytest.mark.multiproc, pytest.mark.alone]

MAKE_AND_DIE = """
import os, signal, sys
from backends.region.region import Region
from backends.region.spec import RegionSpec
spec = RegionSpec(sys.argv[1], "clean-test", "shm", 4, 64, 1, "0" * 64, persist_name=True)
region = Region.create(spec)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def stale() -> Iterator[Path]:
    """A region file whose owner was killed."""
    engine_id = f"clean-test-{secrets.token_hex(4)}"
    path = Path(f"/dev/shm/kvquay_{engine_id}")
    subprocess.run([sys.executable, "-c", MAKE_AND_DIE, engine_id], cwd=REPO, check=False)
    assert path.exists()
    yield path
    path.unlink(missing_ok=True)


def launch(run_dir: Path, *overrides: str) -> str:
    command = [sys.executable, "launch.py", *overrides, f"hydra.run.dir={run_dir}"]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_clean_shows_first_removes_when_told_and_leaves_the_living_alone(
    stale: Path, tmp_path: Path
) -> None:
    engine_id = f"clean-test-{secrets.token_hex(4)}"
    spec = RegionSpec(engine_id, "clean-test", "shm", 4, 64, 1, "0" * 64, persist_name=True)
    with Region.create(spec):
        living = Path(f"/dev/shm/{spec.name}")
        shown = launch(tmp_path / "dry", "action=clean")
        assert str(stale) in shown
        assert "clean.apply=true" in shown
        assert stale.exists()
        launch(tmp_path / "apply", "action=clean", "clean.apply=true")
        assert not stale.exists()
        assert living.exists()
    assert not living.exists()


def test_a_run_with_named_regions_begins_by_removing_stale_ones(
    stale: Path, tmp_path: Path
) -> None:
    shown = launch(tmp_path / "run", "profile=ci", "region=shm", "workload.requests=4")
    assert "removed" in shown
    assert not stale.exists()
