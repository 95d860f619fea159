"""Benchmarks run to their end, say what they could not compare, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILESYSTEM = Path(__file__).parents[2] / "benchmarks" / "filesystem.py"
SMALL = ("--rounds", "1", "--round-mib", "8", "--sizes", "256KiB", "--restart-blocks", "1000")


def begin(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(FILESYSTEM), "--directory", str(directory), *options],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ratios_of(report: Path) -> set[str]:
    return set(json.loads(report.read_text(encoding="utf-8"))["ratios"])


OURS = {"load/load unchecked 256KiB", "restart of 1000 blocks, seconds"}
AGAINST_FIO = {"first store/fio 256KiB", "store/fio 256KiB", "load/fio 256KiB"}


@pytest.mark.multiproc
def test_the_filesystem_benchmark_compares_with_fio_or_says_that_it_is_missing(
    tmp_path: Path,
) -> None:
    disk, report = tmp_path / "disk", tmp_path / "report.json"
    disk.mkdir()
    out, errors = begin(disk, *SMALL, "--json", str(report)).communicate(timeout=60)
    has_fio = shutil.which("fio") is not None
    assert ratios_of(report) >= OURS | (AGAINST_FIO if has_fio else set()), errors
    assert out.splitlines()[-1].startswith("ratio restart of 1000 blocks, seconds: ")
    assert ("fio is not installed" in errors) is not has_fio
    assert not list(disk.iterdir())


@pytest.mark.multiproc
def test_without_fio_the_filesystem_benchmark_measures_the_rest(tmp_path: Path) -> None:
    disk, report = tmp_path / "disk", tmp_path / "report.json"
    disk.mkdir()
    running = begin(disk, *SMALL, "--json", str(report), PATH=str(tmp_path))
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "fio is not installed" in errors
    assert "apt-get install fio" in out
    ratios = ratios_of(report)
    assert ratios >= OURS
    assert not ratios & AGAINST_FIO


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_filesystem_benchmark_that_is_stopped_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    running = begin(tmp_path, "--rounds", "20", "--round-mib", "16")
    end_s = time.monotonic() + 30
    while not list(tmp_path.rglob("*.kvb")):
        assert time.monotonic() < end_s, "it stores nothing"
        time.sleep(0.02)
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert not list(tmp_path.iterdir())
