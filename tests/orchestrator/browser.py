"""Opens pages in Chromium without a window, and tells what it made of them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.rgw import is_required

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "no Chromium: install the system's package `chromium`"
TIMEOUT_S = 120.0

# Each page in a frame of its own width; what is seen of it is put into the outer page.
OUTER = """<!doctype html><meta charset="utf-8"><body><pre id="seen"></pre>{frames}<script>
onload = () => {{
  const seen = [...document.querySelectorAll('iframe')].map(frame => {{
    const inner = frame.contentDocument, root = inner.documentElement;
    const plot = inner.querySelector('.plot[data-at]'), box = plot && plot.getBoundingClientRect();
    if (plot) plot.dispatchEvent(new frame.contentWindow.PointerEvent(
      'pointermove', {{clientX: box.left + box.width / 2}}));
    const tip = inner.querySelector('.tip');
    return {{
      title: inner.title, text: inner.body.innerText, charts: inner.querySelectorAll('svg').length,
      reading: tip ? tip.textContent : '', wider_px: root.scrollWidth - root.clientWidth,
      loaded: frame.contentWindow.performance.getEntriesByType('resource').map(e => e.name),
    }};
  }});
  document.getElementById('seen').textContent = JSON.stringify(seen);
}};
</script></body>"""
FRAME = '<iframe src="{address}" style="width:{width}px;height:900px;border:0"></iframe>'


@dataclass(frozen=True)
class Seen:
    """A page at one width. `reading`: what a pointer over the middle of its first chart reads,
    `wider_px`: how far it reaches beyond the window, `loaded`: what it asked for besides itself."""

    title: str
    text: str
    charts: int
    reading: str
    wider_px: int
    loaded: list[str]


@dataclass(frozen=True)
class Look:
    """All pages, and what the browser wrote to its console on the way."""

    pages: list[Seen]
    console: list[str]


def chromium() -> str:
    """Skips where there is none, unless KVQUAY_TEST_REQUIRE says that there has to be one."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        if is_required("chromium"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return found


def look(home: Path, pages: Sequence[tuple[Path, int]]) -> Look:
    """Open each page at its width; `home` is an empty directory."""
    frames = "".join(
        FRAME.format(address=html.escape(path.absolute().as_uri()), width=width)
        for path, width in pages
    )
    outer = home / "outer.html"
    outer.write_text(OUTER.format(frames=frames))
    done = subprocess.run(
        [
            *(chromium(), "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"),
            f"--user-data-dir={home / 'profile'}",
            # So that the outer page may look into the frames; no name leads anywhere.
            *("--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *("--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"),
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    assert found[1], done.stderr
    seen = [Seen(**page) for page in json.loads(html.unescape(found[1]))]
    return Look(seen, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])
