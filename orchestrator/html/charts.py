"""Charts as inline SVG with labels in HTML.

The drawing is stretched to whatever place there is and its lines are not, so that text keeps its
size on a telephone and on paper. Colours are classes (`c-device`, `c-load`, ...) that the style
sheet knows. What a pointer reads from a chart stands in its `data-` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.html import figures
from orchestrator.html.figures import Format
from orchestrator.html.markup import Child, Html, tag, text

WIDTH: Final = 1000
HEIGHT: Final = 300
_SEPARATOR: Final = "|"


@dataclass(frozen=True, slots=True)
class Line:
    """One series. `colour` is a class of the style sheet; None among `values` is a gap."""

    name: str
    colour: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a scatter chart. `title` is what a pointer over it reads."""

    x: float
    y: float
    colour: str
    title: str
    label: str = ""


def chart(title: str, drawing: Html, *, keys: Sequence[Line] = (), note: Child = None) -> Html:
    """A drawing with its title, and a key where there is more than one line."""
    legend = [
        tag("li", tag("i", class_=f"swatch {line.colour}"), line.name)
        for line in keys
        if len(keys) > 1
    ]
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), tag("ul", legend, class_="key") if legend else ""),
        drawing,
        tag("p", note, class_="note") if note else "",
        class_="chart",
    )


def over_time(
    title: str,
    t_s: Sequence[float],
    lines: Sequence[Line],
    form: Format,
    *,
    stacked: bool = False,
    note: Child = None,
) -> Html:
    """Values over the seconds of a run, `form` writes them. `stacked` are areas upon each other."""
    if len(t_s) < 2:
        return chart(title, empty("too short to draw"), note=note)
    totals = [
        sum(line.values[n] or 0 for line in lines)
        if stacked
        else max((line.values[n] or 0 for line in lines), default=0)
        for n in range(len(t_s))
    ]
    marks = figures.ticks(max(totals))
    top, end_s = marks[-1], t_s[-1] or 1.0
    x = [WIDTH * t / end_s for t in t_s]
    shapes: list[Html] = []
    below = [0.0] * len(t_s)
    for line in lines:
        if stacked:
            above = [b + (v or 0.0) for b, v in zip(below, line.values, strict=True)]
            shapes.append(_area(x, below, above, top, line.colour))
            below = above
        else:
            shapes += _strokes(x, line, top)
    drawing = _plot(
        shapes,
        [(mark / top, form(mark)) for mark in marks],
        [(mark / end_s, figures.seconds(mark)) for mark in figures.ticks(end_s) if mark <= end_s],
        label=f"{title} over time",
        reading=_reading([(t / end_s, figures.seconds(t)) for t in t_s], lines, form),
    )
    return chart(title, drawing, keys=lines, note=note)


def within(
    title: str, curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], note: Child = None
) -> Html:
    """The share of things that took at most so long: curves of (name, colour, [(seconds, share)]),
    seconds on a logarithmic axis."""
    points = [point for _, _, curve in curves for point in curve]
    if not points:
        return chart(title, empty("nothing was loaded"), note=note)
    first = math.floor(math.log10(min(s for s, _ in points)))
    last = max(first + 1, math.ceil(math.log10(max(s for s, _ in points))))

    def place(s: float) -> float:
        return (math.log10(s) - first) / (last - first)

    shapes, lines = [], []
    for name, colour, curve in curves:
        before, steps = 0.0, []
        for s, part in curve:
            at = WIDTH * place(s)
            steps.append(f"L{at:.1f} {_y(before, 1.0)}L{at:.1f} {_y(part, 1.0)}")
            before = part
        start = WIDTH * place(curve[0][0]) if curve else 0
        path = f"M{start:.1f} {_y(0, 1.0)}{''.join(steps)}L{WIDTH} {_y(before, 1.0)}"
        shapes.append(tag("path", d=path, class_=f"line {colour}"))
        lines.append(Line(name, colour, ()))
    marks = [(n / 4, f"{n * 25}%") for n in range(5)]
    each = 1 if last - first < 5 else 2
    x = [(place(10.0**e), figures.seconds(10.0**e)) for e in range(first, last + 1, each)]
    drawing = _plot(shapes, marks, x, label=title, reading={})
    return chart(title, drawing, keys=lines, note=note)


def scatter(
    title: str, dots: Sequence[Dot], x_form: Format, y_form: Format, *, x_name: str, y_name: str
) -> Html:
    """Points, with the best ones last, so that they lie on top."""
    if not dots:
        return chart(title, empty("nothing to compare"))
    x_marks = figures.ticks(max(dot.x for dot in dots), form=x_form)
    y_marks = figures.ticks(max(dot.y for dot in dots), form=y_form)
    shapes: list[Html] = []
    labels: list[Child] = []
    for dot in dots:
        x, y = dot.x / x_marks[-1], dot.y / y_marks[-1]
        shapes.append(
            tag(
                "path",
                tag("title", dot.title),
                d=f"M{WIDTH * x:.1f} {HEIGHT * (1 - y):.1f}h0",
                class_=f"dot {dot.colour}",
            )
        )
        if dot.label:
            place = f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"
            labels.append(tag("span", dot.label, class_="dot-label", style=place))
    drawing = _plot(
        shapes,
        [(mark / y_marks[-1], y_form(mark)) for mark in y_marks],
        [(mark / x_marks[-1], x_form(mark)) for mark in x_marks],
        label=title,
        reading={},
        over=labels,
    )
    axes = tag("p", f"up: {y_name}; right: {x_name}", class_="note")
    return chart(title, text(drawing, axes))


def share_bar(parts: Sequence[tuple[str, str, float]], form: Format) -> Html:
    """One whole as a bar of its parts, (name, colour, value), and their shares in words."""
    total = sum(value for _, _, value in parts) or 1.0
    cells, words = [], []
    for name, colour, value in parts:
        portion = value / total
        if value:
            cells.append(
                tag(
                    "i",
                    class_=f"part {colour}",
                    style=f"flex-grow:{portion:.6f}",
                    title=f"{name}: {form(value)}",
                )
            )
        words.append(
            tag(
                "li",
                tag("i", class_=f"swatch {colour}"),
                f"{name} ",
                tag("b", figures.share(portion)),
                tag("small", form(value)),
            )
        )
    return tag(
        "div",
        tag("div", cells, class_="bar", role="img", aria_label="shares, listed below"),
        tag("ul", words, class_="key"),
        class_="share",
    )


def empty(words: str) -> Html:
    return tag("div", tag("p", words), class_="plot empty")


def _plot(
    shapes: Sequence[Html],
    y: Sequence[tuple[float, str]],
    x: Sequence[tuple[float, str]],
    *,
    label: str,
    reading: dict[str, str],
    over: Child = None,
) -> Html:
    """Shapes over a grid. `y` and `x` are ticks as (share of the axis, words)."""
    grid = [
        tag("line", x1=0, x2=WIDTH, y1=_y(at, 1.0), y2=_y(at, 1.0), class_="grid") for at, _ in y
    ]
    words = [tag("span", word, class_="yt", style=f"bottom:{100 * at:.2f}%") for at, word in y]
    for at, word in x:
        side = " first" if at < 0.03 else " last" if at > 0.97 else ""
        words.append(tag("span", word, class_=f"xt{side}", style=f"left:{100 * at:.2f}%"))
    drawing = tag(
        "svg",
        grid,
        shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    return tag("div", drawing, words, over, class_="plot", **reading)


def _reading(x: Sequence[tuple[float, str]], lines: Sequence[Line], form: Format) -> dict[str, str]:
    """What a pointer over the chart reads: places, their words, and each line's values there."""

    def joined(words: Sequence[str]) -> str:
        return _SEPARATOR.join(word.replace(_SEPARATOR, "/") for word in words)

    values = [
        joined(["" if value is None else form(value) for value in line.values]) for line in lines
    ]
    return {
        "data_at": joined([f"{at:.4f}" for at, _ in x]),
        "data_x": joined([word for _, word in x]),
        "data_names": joined([line.name for line in lines]),
        "data_values": "\n".join(values),
    }


def _y(value: float, top: float) -> str:
    return f"{HEIGHT * (1 - value / top):.1f}"


def _area(
    x: Sequence[float], below: Sequence[float], above: Sequence[float], top: float, colour: str
) -> Html:
    there = "L".join(f"{at:.1f} {_y(value, top)}" for at, value in zip(x, above, strict=True))
    back = "L".join(
        f"{at:.1f} {_y(value, top)}" for at, value in reversed(list(zip(x, below, strict=True)))
    )
    return tag("path", d=f"M{there}L{back}Z", class_=f"area {colour}")


def _strokes(x: Sequence[float], line: Line, top: float) -> list[Html]:
    """A line, broken where there is no value; a value alone is a dot."""
    parts: list[str] = []
    run: list[str] = []
    for at, value in zip((*x, 0.0), (*line.values, None), strict=True):
        if value is not None:
            run.append(f"{at:.1f} {_y(value, top)}")
        elif run:
            parts.append(f"M{'L'.join(run)}" + ("h0" if len(run) == 1 else ""))
            run = []
    return [tag("path", d="".join(parts), class_=f"line {line.colour}")] if parts else []
