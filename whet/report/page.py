"""Writes one static page for one run or for several side by side: curves, levels, settings, rollouts.

`whet train` at its end and `whet report` at any time write RUN/report.html; `whet compare --page` and `whet demo` write
a page for several runs. The file stands alone: styles inside, no script, nothing fetched, and a policy in its head
that forbids both. The markup cannot be broken into: all text, also what models wrote, is escaped on its way in unless
it is `Html` already, and `tag` closes what it opens, so that no text, however hostile, can open or close an element.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import fmean, median

from whet import files
from whet.report import formats
from whet.report.arms import Arm, Axis, Curve, Folders, median_curve, number, read_arms, series, smooth, thin
from whet.report.compare import Comparison, TableCell, compare, settings_that_differ
from whet.report.formats import LAST, final_accuracy
from whet.report.live import TIMES
from whet.report.view import MARKS, Excerpt, pick_excerpts, shorten
from whet.text import printable

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
EXCERPTS = 20
TEXT_SHOWN = 1200  # characters of a prompt or response
WORD_SHOWN = 120  # characters of a word about it
NOT_SPENT = ("total", "gpu_idle")  # the time/* metrics that are not a part of the total
LENGTHS = {"length/p50": "p50", "length/p90": "p90", "length/p99": "p99", "length/max": "longest"}
LEARNER = {  # the other charts of a single run with their notes, where the metric was recorded
    "reward/mean": ("Reward", "mean of the step"),
    "learn/entropy": ("Entropy", "nats per token"),
    "learn/grad_norm": ("Gradient norm", "before clipping"),
    "learn/mismatch": ("Mismatch", "recorded and recomputed log-probabilities"),
    "learn/kl": ("KL", "to the reference"),
}
COLOURS = 6  # colours of lines: the classes c0, c1, ... that page.css defines for light and dark
SIZE = 1000  # the coordinates of an SVG run from 0 to SIZE in both directions

Show = Callable[[float], str]


def write_page(out: Path, folders: Folders, *, title: str, note: str = "") -> None:
    """Writes run folders (or names with their folders) as one HTML file, whole or not at all."""
    files.write_text(out, _document(title, _comparison(read_arms(folders), title, note)))


def write_chapters(out: Path, chapters: Mapping[str, tuple[Folders, str]], *, title: str, note: str = "") -> None:
    """Writes several comparisons (title -> folders and note) on one page, each with all its sections."""
    sections = [tag("section", *_comparison(read_arms(of), name, text)) for name, (of, text) in chapters.items()]
    files.write_text(out, _document(title, [_header(title, note), *sections]))


def _document(title: str, parts: Sequence[Html]) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta HTTP-EQUIV="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(resources.files("whet.report").joinpath("page.css").read_text())),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", tag("main", *parts)), lang="en") + "\n"


def _header(title: str, note: str, *parts: Html) -> Html:
    notes = [tag("p", part, class_="lead") for part in note.split("\n\n") if part.strip()]
    return tag("header", tag("h1", title), *parts, *notes)


def _comparison(arms: Sequence[Arm], title: str, note: str) -> list[Html]:
    """The header and the sections of one comparison."""
    result, single = compare(arms), len(arms) == 1
    first = 1 if single else 0  # colour 0 is the grey of a baseline, and a single run is not a baseline
    labels = [tag("span", arm.name, class_=f"arm c{(i + first) % COLOURS}") for i, arm in enumerate(arms)]
    (_, ends, end_cells), *costs = result.tables()
    levels = [_table(["", *heads], _rows(labels, cells), name, "costs") for name, heads, cells in costs]
    by_level = _difficulty_table(arms, result.evaluation, labels)
    excerpts = pick_excerpts(arms, max(EXCERPTS, 4 * len(arms)))
    cards = tag("div", *(_card(excerpt, show_arm=not single) for excerpt in excerpts), class_="cards")
    selection = "From the first and the last steps, right and wrong as far as there are both; not selected by quality."
    sections = [
        _section("Accuracy", tag("div", *_accuracy_charts(arms, result.evaluation, first), class_="pair")),
        _section("What each level cost", *levels, note=" ".join(result.notes)) if levels else None,
        _section("How the runs ended", _table(["", *ends], _rows(labels, end_cells))),
        _section("Accuracy by difficulty of the prompt", by_level) if by_level else None,
        _section("Training", tag("div", *_training_charts(arms, first), class_="pair")),
        _section("Where the time went", _time_budget(arms, labels)),
        _section("Settings" if single else "Settings that differ", _settings_table(arms, labels)),
        _section("What the model wrote", cards, note=selection) if excerpts else None,
    ]
    header = _header(title, note, tag("p", _summary(arms, result), class_="what"))
    return [header, *(section for section in sections if section is not None)]


def _summary(arms: Sequence[Arm], result: Comparison) -> str:
    """What is shown, in one line, with the standard error of a single evaluation. That is sqrt(p (1 - p) / n) at the
    final accuracy p, where n is the largest number of prompts the recipe allows."""
    runs, evaluation, run = sum(result.seeds), result.evaluation, arms[0].runs[0]
    words = [f"{len(arms)} arms, {runs} runs" if len(arms) > 1 else f"{runs} run" + "s" * (runs > 1)]
    if evaluation is not None:
        words.append(f"evaluated on {evaluation}")
        names = (key for key, value in run.settings.items() if value == evaluation)
        name = next((key for key in names if key.startswith("eval.") and key.endswith(".name")), "")
        limit, p = run.settings.get(name.replace(".name", ".limit")), final_accuracy(run.points(evaluation))
        if isinstance(limit, int) and limit >= 1 and p is not None and 0 < p < 1:
            words.append(f"standard error of one evaluation about {math.sqrt(p * (1 - p) / limit):.3f}")
    return "; ".join([*words, *result.unfinished]) + "."


# ---- charts: inline SVG with HTML labels
#
# The SVG is stretched to its box (its strokes are not), and the labels are HTML placed in percent, so that text keeps
# its size on a phone. Dashes distinguish the lines without colour.


@dataclass(frozen=True, kw_only=True)
class Line:
    label: str
    colour: int
    curve: Curve  # the line in front
    behind: tuple[Curve, ...] = ()  # faint lines: single seeds, or the values before smoothing
    dots: Curve = field(default_factory=list)  # single measurements that get a mark and a tooltip

    @property
    def style(self) -> str:
        return f"c{self.colour % COLOURS}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span low..high, in steps of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0, 0.83)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0, 959_000)
    [0.0, 200000.0, 400000.0, 600000.0, 800000.0, 1000000.0]
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * m for m in (1, 2, 2.5, 5, 10, 20, 50)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def chart(
    lines: Sequence[Line], *, title: str, x_label: str, x_show: Show, y_show: Show,
    from_zero: bool = False, note: str = "",
) -> Html:  # fmt: skip
    """A figure with title, legend, grid and labels; a sentence if there is nothing to draw."""
    drawn = [line for line in lines if line.curve or any(line.behind)]
    heading = tag("figcaption", tag("b", title), *([tag("span", note)] if note else []))
    if not drawn:
        return tag("figure", heading, tag("p", "Nothing was recorded for this.", class_="empty"), class_="chart")
    points = [p for line in drawn for curve in (line.curve, *line.behind) for p in curve]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = ticks(min(0.0, *xs), max(xs))
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    # The y axis ends at a tick, the x axis at the last point: a curve fills its chart to the right edge.
    x_end = max(xs) or x_ticks[-1]
    x_ticks = [x for x in x_ticks if x <= x_end]

    def right(x: float) -> float:
        """Position from the left edge, 0..1."""
        return (x - x_ticks[0]) / (x_end - x_ticks[0])

    def up(y: float) -> float:
        """Position from the lower edge, 0..1."""
        return (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    def path(curve: Curve, style: str, end: str = "", *children: Html) -> Html:
        """A line through the points of the curve, in the SVG's coordinates, whose y axis points down."""
        places = (f"{SIZE * right(x):.1f} {SIZE * (1 - up(y)):.1f}" for x, y in curve)
        return tag("path", *children, d="M" + "L".join(places) + end, class_=style)

    shapes = [path([(x_ticks[0], y)], "grid", f"H{SIZE}") for y in y_ticks]
    shapes += [path([(x, y_ticks[-1])], "grid", f"V{SIZE}") for x in x_ticks]
    shapes += [path(thin(curve), f"behind {line.style}") for line in drawn for curve in line.behind if curve]
    shapes += [path(thin(line.curve), f"line {line.style}") for line in drawn if line.curve]
    for line in drawn:
        for x, y in line.dots:
            tooltip = tag("title", f"{line.label}: {y_show(y)} at {x_show(x)}")
            shapes.append(path([(x, y)], f"dot {line.style}", "h0", tooltip))
    plot = tag(
        "div",
        *(tag("span", y_show(y), class_="y", style=f"bottom:{100 * up(y):.2f}%") for y in y_ticks),
        *(tag("span", x_show(x), class_="x", style=f"left:{100 * right(x):.2f}%") for x in x_ticks),
        _svg(*shapes, role="img", aria_label=f"{title}: {', '.join(line.label for line in drawn)}"),
        class_="plot",
    )
    strokes = (tag("path", d=f"M0 {SIZE // 2}H{SIZE}", class_=f"line {line.style}") for line in drawn)
    keys = [tag("li", _svg(s, aria_hidden="true"), line.label) for s, line in zip(strokes, drawn, strict=True)]
    legend = [tag("ul", *keys, class_="legend")] if len(drawn) > 1 else []
    return tag("figure", heading, *legend, plot, tag("p", x_label, class_="axis"), class_="chart")


def _svg(*children: Html, **attributes: str) -> Html:
    return tag("svg", *children, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", **attributes)


def _accuracy_charts(arms: Sequence[Arm], evaluation: str | None, first: int) -> list[Html]:
    """Several seeds: the median in front, each seed faintly behind. One seed: itself, each evaluation marked."""

    def draw(axis: Axis, title: str, x_label: str, x_show: Show) -> Html:
        lines = []
        for colour, arm in enumerate(arms, first):
            curves = [[(float(getattr(p, axis)), p.accuracy) for p in run.points(evaluation)] for run in arm.runs]
            if len(curves) == 1:
                lines.append(Line(label=arm.name, colour=colour, curve=curves[0], dots=curves[0]))
            else:
                lines.append(Line(label=arm.name, colour=colour, curve=median_curve(curves), behind=tuple(curves)))
        return chart(lines, title=title, x_label=x_label, x_show=x_show, y_show="{:g}".format)

    return [
        draw("tokens", "Accuracy by tokens", "tokens generated for training", formats.count),
        draw("seconds", "Accuracy by time", "time of training", formats.duration),
    ]


def _training_charts(arms: Sequence[Arm], first: int) -> list[Html]:
    """The signal share of each arm; for a single arm also response lengths, and what was recorded of the learner."""

    def draw(lines: Sequence[Line], title: str, note: str, y_show: Show) -> Html:
        return chart(lines, title=title, note=note, x_label="step", x_show=formats.count, y_show=y_show, from_zero=True)

    def even(curve: Curve) -> Curve:
        """The moving mean, which stands in front because single steps are noisy."""
        return smooth(curve, max(1, len(curve) // 12))

    lines = []
    for colour, arm in enumerate(arms, first):
        raw = [series(run.rows, "curriculum/signal_share") for run in arm.runs]
        smoothed = [even(curve) for curve in raw]
        behind = tuple(raw if len(raw) == 1 else smoothed)
        lines.append(Line(label=arm.name, colour=colour, curve=median_curve(smoothed), behind=behind))
    charts = [draw(lines, "Signal share", "of judged groups, those with right and wrong answers", formats.share)]
    if len(arms) > 1:
        return charts
    curves = {key: median_curve([series(run.rows, key) for run in arms[0].runs]) for key in (*LENGTHS, *LEARNER)}
    lengths = [Line(label=label, colour=i, curve=curves[key]) for i, (key, label) in enumerate(LENGTHS.items(), 1)]
    charts.append(draw(lengths, "Response length", "tokens", formats.count))
    for key, (title, note) in LEARNER.items():
        if curve := curves[key]:
            line = Line(label=title, colour=1, curve=even(curve), behind=(curve,))
            charts.append(draw([line], title, note, "{:.3g}".format))
    return charts


# ---- tables


def _section(title: str, *parts: str, note: str = "") -> Html:
    return tag("section", tag("h2", title), *([tag("p", note, class_="note")] if note else []), *parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", style: str = "") -> Html:
    """The first cell of a row is its name."""
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    name = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *name, tag("thead", top), tag("tbody", *body), class_=style), class_="scroll")


def _rows(labels: Sequence[Html], rows: Sequence[Sequence[TableCell]]) -> list[list[Html]]:
    def markup(cell: TableCell) -> Html:
        ratio = [tag("b", cell.ratio, class_="ratio")] if cell.ratio else []
        spread = [tag("small", cell.range)] if cell.range else []
        return join([cell.value, *ratio, *spread], " ")

    return [[label, *map(markup, row)] for label, row in zip(labels, rows, strict=True)]


def _difficulty_table(arms: Sequence[Arm], evaluation: str | None, labels: Sequence[Html]) -> Html | None:
    """Accuracy by the level of the prompts: before training, and at the end of each arm."""
    prefix = f"eval/{evaluation}/level/"
    keys = {key for arm in arms for run in arm.runs for row in run.rows for key in row if key.startswith(prefix)}
    if not keys:
        return None

    def numbers_first(key: str) -> tuple[bool, float, str]:
        """Sorts numbers by size, then words."""
        name = key.removeprefix(prefix)
        try:
            return (False, float(name), name)
        except ValueError:
            return (True, 0.0, name)

    def final(arm: Arm, key: str) -> float | None:
        """Median over the seeds of the mean of the last evaluations."""
        seeds = [[v for row in run.rows if (v := number(row, key)) is not None] for run in arm.runs]
        ends = [fmean(values[-LAST:]) for values in seeds if values]
        return median(ends) if ends else None

    levels = sorted(keys, key=numbers_first)
    before = [number(next((row for row in arms[0].runs[0].rows if key in row), {}), key) for key in levels]
    rows: list[list[str]] = [["at the start", *map(formats.accuracy, before)]]
    for arm, label in zip(arms, labels, strict=True):
        rows.append([label, *(formats.accuracy(final(arm, key)) for key in levels)])
    return _table(["", *(key.removeprefix(prefix) for key in levels)], rows)


def _settings_table(arms: Sequence[Arm], labels: Sequence[Html]) -> Html:
    """The settings that the arms do not share; for one arm its whole recipe, folded away."""
    if len(arms) == 1:
        rows = [[key, formats.setting(value)] for key, value in arms[0].runs[0].settings.items()]
        return tag("details", tag("summary", f"{len(rows)} settings"), _table(["setting", "value"], rows))
    differ = settings_that_differ(arms)
    if not differ:
        return tag("p", "The arms have the same settings.")
    return _table(["setting", *labels], [[key, *values] for key, values in differ])


def _time_budget(arms: Sequence[Arm], labels: Sequence[Html]) -> Html:
    """A bar for each arm, as long as its time, and the seconds behind it (mean over the seeds)."""
    spent = [_seconds(arm) for arm in arms]
    found = {name for seconds in spent for name in seconds}
    names = [*(name for name in TIMES if name in found), *sorted(found - set(TIMES))]
    if not names:
        return tag("p", "No times were recorded.", class_="empty")
    longest = max(sum(seconds.values()) for seconds in spent) or 1.0
    colours = {name: f"t{i % len(TIMES)}" for i, name in enumerate(names)}
    rows = []
    for label, seconds in zip(labels, spent, strict=True):
        total, pieces, cells = sum(seconds.values()), [], []
        for name in names:
            length, words = f"width:{100 * seconds.get(name, 0.0) / longest:.2f}%", formats.duration(seconds.get(name))
            pieces.append(tag("span", class_=colours[name], style=length, title=f"{name} {words}"))
            share = [tag("small", formats.share(seconds[name] / total))] if name in seconds and total else []
            cells.append(join([words if share else formats.MISSING, *share], " "))
        rows.append([label, tag("div", *pieces, class_="bar"), *cells, formats.duration(total)])
    keys = [tag("span", name, class_=f"key {colours[name]}") for name in names]
    return _table(["", "", *keys, "total"], rows)


def _seconds(arm: Arm) -> dict[str, float]:
    """Where the time went, by the name after "time/"; mean over the seeds."""
    total: dict[str, float] = {}
    for row in (row for run in arm.runs for row in run.rows):
        for key in row:
            name = key.removeprefix("time/")
            if name not in (key, *NOT_SPENT) and (value := number(row, key)) is not None:
                total[name] = total.get(name, 0.0) + value / len(arm.runs)
    return total


def _card(excerpt: Excerpt, show_arm: bool) -> Html:
    ends = {"": [], "stop": [], "length": ["cut off at the limit"], "cut": ["cut by an update"]}
    where = [*([excerpt.arm] if show_arm else []), f"step {excerpt.step}", f"{excerpt.length} tokens"]
    where += [*ends.get(excerpt.finish, [excerpt.finish]), *([excerpt.phase] if excerpt.phase else [])]
    verdict = tag("b", f"{MARKS[excerpt.verdict]} {excerpt.verdict}", class_="verdict")
    header = tag("header", verdict, tag("span", " · ".join(shorten(word, WORD_SHOWN) for word in where)))
    texts = {"prompt": excerpt.prompt, "response": excerpt.response or "(nothing)", "answer": excerpt.answer}
    pairs = [
        tag("dt", name) + tag("dd", tag("pre", shorten(text, TEXT_SHOWN), dir="auto")) for name, text in texts.items()
    ]
    return tag("article", header, tag("dl", *map(Html, pairs)), class_=f"excerpt {excerpt.verdict}")


# ---- markup


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup, with control characters spelled out by `printable` first.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float) -> Html:
    """An element with its children.

    >>> tag("p", "a < b", class_="note", data_step=3)
    '<p class="note" data-step="3">a &lt; b</p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), str(value)) for key, value in attributes.items())
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    if name == "meta":  # the only element without content here
        assert not children
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")
