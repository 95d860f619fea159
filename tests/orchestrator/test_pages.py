"""The pages of real jobs, opened in a real browser; and what a page does with hostile text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.html import figures
from orchestrator.html.charts import Line, over_time
from orchestrator.html.markup import Html, tag
from orchestrator.html.page import page
from orchestrator.html.report_page import invalid_page
from tests.kit import REPO
from tests.orchestrator.browser import look


@dataclass(frozen=True)
class Swept:
    """A sweep of two jobs, the first of which cannot work."""

    directory: Path
    command: list[str]
    status: int
    out: str

    def again(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *more], cwd=REPO, capture_output=True, text=True, timeout=200
        )

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "sweep.json").read_text())
        return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    home = tmp_path_factory.mktemp("pages")
    directory = home / "sweeps" / "first"
    command = [
        *(sys.executable, "launch.py", "-m", f"hydra.sweep.dir={directory}"),
        *("profile=ci", "spawn=inline", "parallel=dp1_tp1", "tiers=shm_fs"),
        *(f"tiers.stack.fs.paths=[{home / 'disk'}]", "tiers.stack.fs.capacity=256MiB"),
        *("region.size=1KiB,2MiB", "engine.device_cache_size=512KiB"),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    return Swept(directory, command, done.returncode, done.stdout + done.stderr)


@pytest.mark.multiproc
def test_a_bad_job_does_not_hide_the_others_and_comes_first(swept: Swept) -> None:
    assert swept.status == 2, swept.out
    assert "2 jobs, 1 failed" in swept.out
    first, second = swept.report()["jobs"]
    assert (first["number"], first["status"]) == (0, "invalid_configuration")
    assert "region.size is '1KiB'" in first["reason"]
    assert Path(first["log"]).is_file()
    assert (second["number"], second["status"]) == (1, "ok")
    assert second["settings"] == {"region.size": "2MiB"}
    assert second["values"]["hit_share"] > 0
    assert second["hit_tokens"] > 0
    assert swept.report()["best"]["ttft_s"] == 1
    assert swept.report()["pareto"] == [1]


@pytest.mark.multiproc
def test_a_run_records_how_it_went_over_time(swept: Swept) -> None:
    run = swept.directory / "1"
    result = json.loads((run / "replicas/dp0/result.json").read_text())
    report = json.loads((run / "report.json").read_text())
    history, replica = result["history"], report["replicas"][0]
    assert history["requests"][-1] == replica["requests"]
    assert history["prompt_tokens"][-1] == replica["prompt_tokens"]
    for source, tokens in replica["hit_tokens"].items():
        assert history[f"hit_tokens.{source}"][-1] == tokens
    for name in ("stored_bytes", "loaded_bytes", "evictions"):
        assert history[f"shm.{name}"][-1] == report["tiers"]["shm"][name]
        assert history[f"fs.{name}"][-1] == report["tiers"]["fs"][name]
    assert history["shm.evictions"][-1] > 0
    assert len(history["t_s"]) == len(history["fs.loading"]) > 2


@pytest.mark.multiproc
def test_every_page_opens_without_an_error_at_both_widths(swept: Swept, tmp_path: Path) -> None:
    paths = [swept.directory / name for name in ("sweep.html", "0/report.html", "1/report.html")]
    seen = look(tmp_path, [(path, width) for path in paths for width in (1280, 390)])
    assert seen.console == []
    assert [page.wider_px for page in seen.pages] == [0] * 6
    assert [page.loaded for page in seen.pages] == [[]] * 6
    sweep, _, invalid, _, report, narrow = seen.pages
    assert "1 of 2 jobs did not end well" in sweep.text
    assert sweep.text.index("region.size is '1KiB'") < sweep.text.index("Best settings")
    assert "Not started: the configuration is bad" in invalid.text
    assert "none wrong" in report.text
    assert report.charts >= 9
    for words in ("slot 0", "cpu:0", "Tier fs", "p99.9", "Blocks queued", "Evictions per second"):
        assert words in report.text
    assert narrow.charts == report.charts
    assert re.match(r"\d.*s\ndevice cache  \d.*\n", report.reading)


def test_the_browser_tells_of_a_page_that_is_not_right(tmp_path: Path) -> None:
    """What the test before goes by would be seen."""
    wrong = tmp_path / "wrong.html"
    wrong.write_bytes(
        page("wrong", Html('<img src="http://elsewhere.test/a.png"><p style="width:2000px">x</p>'))
    )
    (tmp_path / "home").mkdir()
    seen = look(tmp_path / "home", [(wrong, 390)])
    assert any("Content Security Policy" in line for line in seen.console)
    assert seen.pages[0].wider_px > 0


@pytest.mark.multiproc
def test_a_good_job_is_not_done_again_and_a_bad_one_is(swept: Swept) -> None:
    before = (swept.directory / "1/report.json").read_bytes()
    beside = swept.directory.parent / "second"
    done = swept.again(f"hydra.sweep.dir={beside}", "sweep.resume=true")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "2 jobs, 1 failed, 1 done before" in done.stdout
    bad, good = json.loads((beside / "sweep.json").read_text())["jobs"]
    assert (bad["number"], bad["resumed"]) == (0, False)
    assert (good["number"], good["resumed"]) == (1, True)
    assert good["values"] == swept.report()["jobs"][1]["values"]
    assert not (beside / "1/replicas").exists()
    assert (swept.directory / "1/report.json").read_bytes() == before


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text())
def test_text_never_becomes_markup(words: str) -> None:
    found = Tags(tag("p", words, title=words))
    assert [name for name, _ in found.tags] == ["p"]
    assert found.tags[0][1].keys() == {"title"}
    visible = "".join(c if c.isprintable() or c in "\n\t" else "" for c in words)
    assert visible == "" or all(c in found.text for c in visible)
    tag("p", words).encode()


def test_what_a_user_typed_is_shown_and_not_run() -> None:
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
    report = {
        "run_id": hostile,
        "reproduce": hostile,
        "problems": [{"key": hostile, "value": hostile, "limit": hostile, "fix": hostile}],
    }
    found = Tags(invalid_page(report).decode())
    assert [name for name, _ in found.tags].count("script") == 1
    assert "img" not in [name for name, _ in found.tags]
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert hostile in found.text


def test_a_page_allows_its_own_script_and_nothing_from_anywhere() -> None:
    source = page("t", tag("p", "x")).decode()
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = next(
        attributes["content"]
        for name, attributes in Tags(source).tags
        if name == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert f"'sha256-{digest}'" in policy
    assert re.findall(r"https?://", source) == []


@given(st.floats(1e-6, 1e12))
def test_ticks_are_few_and_hold_what_is_drawn(top: float) -> None:
    for form in (figures.size, figures.rate):
        marks = figures.ticks(top, form=form)
        assert marks[0] == 0
        assert marks[-1] >= top * (1 - 1e-9)
        assert 2 <= len(marks) <= 6
        assert marks == sorted(set(marks))


def test_a_line_is_broken_where_there_is_no_value() -> None:
    values = (1.0, 2.0, None, None, 3.0, None, 1.0)
    drawn = over_time("t", range(1, 8), [Line("a", "c-load", values)], figures.compact)
    path = next(a["d"] for n, a in Tags(drawn).tags if n == "path" and "line" in str(a["class"]))
    assert path is not None
    assert path.count("M") == 3  # two points, one alone, one alone at the end
    assert path.count("h0") == 2


def test_too_short_a_run_says_so_instead_of_drawing() -> None:
    drawn = over_time("t", [1.0], [Line("a", "c-load", [1.0])], figures.compact)
    assert "too short to draw" in drawn
    assert "<svg" not in drawn
