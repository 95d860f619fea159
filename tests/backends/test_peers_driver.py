"""The peers' benchmark: real processes measured, a peer that fails is a row, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import disk, page
from benchmarks.peers.catalogue import OURS, PEERS, WAYS, Peer, WaySpec, ways_of
from benchmarks.peers.child import Child, WayFailed
from benchmarks.peers.environments import EnvironmentFailed, ensure
from benchmarks.peers.results import LOAD, ON_DISK, STORE, Comparison, Figures, PartResult
from benchmarks.peers.rounds import Part, Plan
from tests.kit import REPO

RUN = REPO / "benchmarks" / "peers" / "run.py"
# A peer of the plainest kind. `option` says how it fails, if it does.
FILES_WAY = f"""
import sys
sys.path.insert(0, {str(RUN.parent)!r})
import numpy as np
from pathlib import Path
from peer_protocol import Way, serve

class FilesWay(Way):
    packages = ("numpy",)
    notes = ("plain files",)

    def __init__(self, work):
        super().__init__(work)
        self.fails = work.options.get("fails")
        if self.fails == "open":
            raise RuntimeError("no such device")
        print("said to nobody who listens for answers")

    def path(self, key):
        return Path(self.work.directory) / key

    def store(self, keys):
        if self.fails == "dies":
            print("the last words", file=sys.stderr, flush=True)
            import os
            os._exit(3)
        for row, key in enumerate(keys):
            self.path(key).write_bytes(self.source[row].tobytes())

    def load(self, keys):
        self.there = [self.path(key).exists() for key in keys]
        for row, key in enumerate(keys):
            if self.there[row]:
                self.target[row] = np.fromfile(self.path(key), np.uint8)
        if self.fails == "wrong":
            self.target[0, 4096 + 100] ^= 1

    def loaded(self, keys):
        return [self.target[row] if there else None for row, there in enumerate(self.there)]

serve(FilesWay)
"""


def way(script: Path, name: str, **options: object) -> WaySpec:
    return WaySpec(name, name, "filesystem", str(script), options)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "files_way.py"
    path.write_text(FILES_WAY, encoding="utf-8")
    return path


@pytest.mark.multiproc
def test_each_way_is_measured_tried_and_compared_and_those_that_fail_say_why(
    tmp_path: Path, script: Path
) -> None:
    ways = [
        way(script, "ours"),
        way(script, "twin"),
        way(script, "closed", fails="open"),
        way(script, "mortal", fails="dies"),
        way(script, "liar", fails="wrong"),
        way(script, "missing"),
    ]

    def find(spec: WaySpec) -> Path:
        if spec.name == "missing":
            raise EnvironmentFailed("not installed: nobody has it")
        return Path(sys.executable)

    root = tmp_path / "root"
    root.mkdir()
    plan = Plan({"64KiB": 64 << 10, "32KiB": 32 << 10}, 512 << 10, depth=2, rounds=2, rest_s=0)
    before = psutil.Process().children(recursive=True)
    result = Part("filesystem", ways, plan, root, find, lambda _: None).measure()

    assert psutil.Process().children(recursive=True) == before
    sizes = ("64KiB", "32KiB")
    whys = {
        "closed": "open: RuntimeError: no such device",
        "mortal": "store: it ended; the last words",
    }
    assert result.failures == {
        ("missing", ""): "not installed: nobody has it",
        ("liar", "64KiB"): "load: 8 of 8 blocks came, 1 of them wrong",
        ("liar", "32KiB"): "load: 16 of 16 blocks came, 1 of them wrong",
        **{(name, size): why for name, why in whys.items() for size in sizes},
    }
    assert {c.peer for c in result.comparisons()} == {"twin"}
    assert [c.what for c in result.comparisons()] == [STORE, ON_DISK, LOAD] * 2
    assert all(len(values) == 2 for values in result.figures["ours", "64KiB"].bytes_per_s.values())
    assert "numpy" in result.versions
    assert "ours: plain files" in result.notes

    text = page.section(result, "run it", "today", "a machine", "As it was.")
    assert "| missing | not installed: nobody has it |" in text
    assert "| mortal 64KiB 32KiB | store: it ended; the last words |" in text
    assert "| 64KiB | twin |" in text
    assert "| 64KiB | liar |" not in text


@pytest.mark.multiproc
def test_a_restart_and_damage_are_tried_and_told(tmp_path: Path, script: Path) -> None:
    ways = [way(script, "plain"), way(script, "mortal", fails="dies")]
    plan = Plan({"32KiB": 32 << 10}, 128 << 10, depth=2, rounds=1, rest_s=0)
    part = Part("filesystem", ways, plan, tmp_path, lambda _: Path(sys.executable), lambda _: None)
    before = psutil.Process().children(recursive=True)
    result = part.try_faults()
    assert result.traits["plain"].restart == "kept"
    assert result.traits["plain"].checksum == "none: 4 of 4 wrong blocks served"
    assert result.traits["mortal"].restart == "not tried"
    assert result.failures == {("mortal", ""): "store: it ended; the last words"}
    assert psutil.Process().children(recursive=True) == before


def test_a_child_that_says_nothing_is_given_up_and_gone(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    before = psutil.Process().children(recursive=True)
    child = Child(Path(sys.executable), script, tmp_path, tmp_path / "log.txt", {})
    with pytest.raises(WayFailed, match=r"open: no answer in 0 s"):
        child.ask("open", timeout_s=0.2)
    child.kill()
    assert psutil.Process().children(recursive=True) == before


def test_credentials_are_passed_on_only_where_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the caller's")
    script = tmp_path / "tell.py"
    script.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    names = [n for n in sorted(os.environ) if n.startswith(('AWS_', 'PYTHONPATH'))]\n"
        "    print(json.dumps({'names': names}), flush=True)\n",
        encoding="utf-8",
    )

    def told(more: Mapping[str, str]) -> list[str]:
        child = Child(Path(sys.executable), script, tmp_path, tmp_path / "log.txt", more)
        try:
            names: list[str] = child.ask("tell")["names"]
        finally:
            child.kill()
        return names

    assert told({}) == []
    assert told({"AWS_ACCESS_KEY_ID": "ours"}) == ["AWS_ACCESS_KEY_ID"]


def test_files_that_were_dropped_are_not_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "data"
    file.write_bytes(b"x" * (1 << 20))
    (tmp_path / "empty").touch()
    disk.flush(tmp_path)
    assert disk.resident_share(tmp_path) > 0.9
    disk.drop(tmp_path)
    assert disk.resident_share(tmp_path) < 0.1
    disk.damage(file, 256 << 10)
    assert file.read_bytes().count(b"x") == (1 << 20) - 4


def result_of(ours: list[float], theirs: list[float]) -> PartResult:
    result = PartResult("memory", "kvquay region", ["kvquay region", "peer"])
    for name, values in (("kvquay region", ours), ("peer", theirs)):
        figures = result.figures[name, "2MiB"] = Figures()
        for seconds in values:
            figures.add(LOAD, 1_000_000, seconds, 0.5)
    return result


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    result = result_of([0.1, 0.2, 0.4], [0.2, 0.1, 0.4])
    assert list(result.comparisons()) == [
        Comparison("memory", "peer", LOAD, "2MiB", "MB/s", 5.0, 5.0, 1.0)
    ]


def test_what_we_lose_is_told_first_the_worst() -> None:
    result = result_of([0.4, 0.4], [0.1, 0.1])
    result.given.append(Comparison("memory", "other", "lookup", "", "us/block", 2.0, 1.0, 0.5))
    text = page.section(result, "run it", "today", "a machine", "As it was.")
    assert "**Where we lose:** peer load 2MiB 0.25; other lookup 0.50." in text
    assert "**0.25**" in text


def test_a_failure_of_ours_leaves_no_ratio_to_it() -> None:
    result = result_of([0.1], [0.2])
    result.failures["kvquay region", "2MiB"] = "load: 3 of 4 blocks came, 0 of them wrong"
    assert list(result.comparisons()) == []
    assert "no figures of" in page.section(result, "run it", "today", "a machine", "As it was.")


def test_a_section_of_the_page_is_replaced_and_the_rest_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nBy hand.\n", encoding="utf-8")
    page.write(path, {"memory": "old figures"})
    with path.open("a", encoding="utf-8") as file:
        file.write("\nAlso by hand.\n")
    page.write(path, {"memory": r"new \1 figures", "object": "others"})
    text = path.read_text(encoding="utf-8")
    assert "old figures" not in text
    assert text.index("By hand.") < text.index(r"new \1 figures") < text.index("Also by hand.")
    assert text.count("<!-- peers memory: begin -->") == 1
    assert "<!-- peers object: begin -->\nothers\n<!-- peers object: end -->" in text


@pytest.mark.multiproc
def test_an_environment_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text(f"{tmp_path / 'not-there.whl'}\n", encoding="utf-8")

    class Local(Peer):
        requirements = pins  # type: ignore[assignment]

    with pytest.raises(EnvironmentFailed, match=r"not installed: .*not-there\.whl"):
        ensure(Local("local"), tmp_path / "envs", lambda _: None)
    assert [path.name for path in (tmp_path / "envs").iterdir()] == ["local.lock"]


def test_every_way_has_its_script_its_peer_and_its_pins() -> None:
    assert all(way.script.is_file() and way.peer in {OURS, *PEERS} for way in WAYS)
    for peer in PEERS.values():
        lines = peer.requirements.read_text(encoding="utf-8").splitlines()
        pinned = [line for line in lines if not line.startswith("#")]
        assert pinned
        assert all("==" in line for line in pinned)
    assert [way.peer for way in ways_of("memory", ["mooncake"])] == [OURS, "mooncake"]


@pytest.mark.multiproc
def test_a_run_that_is_stopped_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--directory", str(tmp_path), "--only", OURS]
    running = subprocess.Popen(
        [*command, "--parts", "filesystem", "--rounds", "50", "--step-mib", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    until_s = time.monotonic() + 60
    while not list(tmp_path.rglob("*.kvb")):
        assert time.monotonic() < until_s, "it stores nothing"
        assert running.poll() is None
        time.sleep(0.05)
    children = psutil.Process(running.pid).children(recursive=True)
    assert children
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert not list(tmp_path.iterdir())
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
