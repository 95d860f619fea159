"""A whole page: it may load nothing from anywhere, and run no script but its own.

`page.css` has colours for light and dark, chosen by the reader's setting, and light on paper; those
of the tiers stay apart for colour-blind readers in the order in which tiers stand.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Final

from orchestrator.html.markup import Child, Html, tag, text

_HERE: Final = Path(__file__).parent


def page(title: str, *content: Child) -> bytes:
    """The document as UTF-8."""
    style, script = ((_HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag("body", tag("main", *content), tag("script", Html(script)))
    return text(Html("<!doctype html>\n"), tag("html", head, body, lang="en")).encode()


def heading(title: str, *remarks: Child) -> Html:
    return tag("header", tag("h1", title), *(tag("p", remark) for remark in remarks if remark))


def verdict(kind: str, sign: str, words: str, *more: Child) -> Html:
    """What it all comes to. `kind`: good, bad or warn."""
    told = tag("div", tag("b", words), *(tag("p", one) for one in more if one))
    return tag("div", tag("span", sign, class_="sign"), told, class_=f"verdict {kind}")


def tiles(*facts: tuple[str, str]) -> Html:
    """(figure, what it is) side by side."""
    return tag(
        "div",
        [tag("div", tag("b", figure), tag("span", what), class_="tile") for figure, what in facts],
        class_="tiles",
    )


def card(*content: Child, class_: str = "") -> Html:
    return tag("section", *content, class_=f"card {class_}".strip())


def table(columns: tuple[str, ...], rows: list[list[Child]], left: tuple[int, ...] = (0,)) -> Html:
    """Rows under their columns; those numbered in `left` hold words. It scrolls where it must."""

    def row(kind: str, cells: list[Child]) -> Html:
        return tag(
            "tr",
            [tag(kind, cell, class_="left" if n in left else None) for n, cell in enumerate(cells)],
        )

    head = tag("thead", row("th", list(columns)))
    return tag(
        "div", tag("table", head, tag("tbody", [row("td", r) for r in rows])), class_="scroll"
    )


def facts(pairs: list[tuple[str, Child]]) -> Html:
    return tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in pairs])
