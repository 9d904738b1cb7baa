"""One static page for one run or for several side by side: curves, levels, settings, rollouts.

`whet train` at its end and `whet report` at any time write it to RUN/report.html, `whet compare --page` and `whet demo`
write one for several runs. The file stands alone: styles inside, no script, nothing fetched, and a policy in its head
that forbids both. What models wrote is escaped by `markup` like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean, median

from whet import files
from whet.report import formats
from whet.report.arms import Arm, Folders, read_arms, settings_that_differ, show_setting
from whet.report.chart import COLOURS, Html, Line, chart, escape, join, tag
from whet.report.compare import AXES, Comparison, TableCell, compare
from whet.report.curves import Axis, Curve, median_curve, number, series, smooth
from whet.report.formats import LAST, final_accuracy
from whet.report.live import TIMES
from whet.report.view import MARKS, Excerpt, pick_excerpts, shorten

# ---- sections
#
# The parts of a report page: tables, the time budget, rollouts.
#
# Numbers and text in, markup out; `page` puts them together. All text goes through `markup`, which escapes it.


TEXT_SHOWN = 1200
"""Characters of a prompt or response on a page."""
WORD_SHOWN = 120
"""And of a word about it."""
NOT_SPENT = ("total", "gpu_idle")
"""Of the time/* metrics, those that are no part of the whole."""


def section(title: str, *parts: str, note: str = "") -> Html:
    return tag("section", tag("h2", title), *([tag("p", note, class_="note")] if note else []), *parts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", style: str = "") -> Html:
    """The first cell of a row is its name."""
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    name = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *name, tag("thead", top), tag("tbody", *body), class_=style), class_="scroll")


def cell_markup(cell: TableCell) -> Html:
    parts = [escape(cell.value)]
    if cell.ratio:
        parts.append(tag("b", cell.ratio, class_="ratio"))
    if cell.range:
        parts.append(tag("small", cell.range))
    return join(parts, " ")


def arm_label(name: str, colour: int) -> Html:
    return tag("span", name, class_=f"arm c{colour % COLOURS}")


def level_tables(result: Comparison, labels: Sequence[Html]) -> Html:
    heads = ["", *(formats.level(x) for x in result.levels)]
    return join(
        table(heads, _rows(labels, result.costs[axis]), caption=title, style="costs")
        for axis, (title, _) in AXES.items()
    )


def end_table(result: Comparison, labels: Sequence[Html]) -> Html:
    return table(["", *result.ends[0]], _rows(labels, [[*end.values()] for end in result.ends]))


def _rows(labels: Sequence[Html], cells: Sequence[Sequence[TableCell]]) -> list[list[str]]:
    return [[label, *(cell_markup(cell) for cell in row)] for label, row in zip(labels, cells, strict=True)]


def difficulty_table(arms: Sequence[Arm], evaluation: str | None, labels: Sequence[Html]) -> Html | None:
    """Accuracy by the level of the prompts: before training, and at the end of each arm."""
    prefix = f"eval/{evaluation}/level/"
    found = dict.fromkeys(
        key for arm in arms for run in arm.runs for row in run.rows for key in row if key.startswith(prefix)
    )
    if not found:
        return None
    keys = sorted(found, key=lambda key: _natural(key.removeprefix(prefix)))
    first = [number(next((row for row in arms[0].runs[0].rows if key in row), {}), key) for key in keys]
    rows: list[list[str]] = [["at the start", *map(formats.accuracy, first)]]
    for arm, label in zip(arms, labels, strict=True):
        rows.append([label, *(formats.accuracy(_final(arm, key)) for key in keys)])
    return table(["", *(key.removeprefix(prefix) for key in keys)], rows)


def _final(arm: Arm, key: str) -> float | None:
    """Median over the seeds of the mean of the last evaluations."""
    ends = []
    for run in arm.runs:
        values = [v for row in run.rows if (v := number(row, key)) is not None]
        if values:
            ends.append(fmean(values[-LAST:]))
    return median(ends) if ends else None


def _natural(name: str) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    try:
        return (False, float(name), name)
    except ValueError:
        return (True, 0.0, name)


def settings_table(arms: Sequence[Arm], labels: Sequence[Html]) -> Html:
    """What the arms do not share; for one arm, its whole recipe, folded away."""
    if len(arms) == 1:
        settings = arms[0].runs[0].settings
        rows = [[key, show_setting(value)] for key, value in settings.items()]
        return tag("details", tag("summary", f"{len(rows)} settings"), table(["setting", "value"], rows))
    differ = settings_that_differ(arms)
    if not differ:
        return tag("p", "The arms have the same settings.")
    return table(["setting", *labels], [[key, *values] for key, values in differ])


def time_budget(arms: Sequence[Arm], labels: Sequence[Html]) -> Html:
    """A bar for each arm, as long as its time, and the seconds behind it (mean over the seeds)."""
    spent = [_seconds(arm) for arm in arms]
    names = [name for name in TIMES if any(name in seconds for seconds in spent)]
    names += sorted({name for seconds in spent for name in seconds} - set(TIMES))
    if not names:
        return tag("p", "No times were recorded.", class_="empty")
    longest = max(sum(seconds.values()) for seconds in spent) or 1.0
    colours = {name: f"t{i % len(TIMES)}" for i, name in enumerate(names)}
    bars = []
    for seconds in spent:
        pieces = [
            tag(
                "span",
                class_=colours[name],
                style=f"width:{100 * seconds.get(name, 0.0) / longest:.2f}%",
                title=f"{name} {formats.duration(seconds.get(name))}",
            )
            for name in names
        ]
        bars.append(tag("div", *pieces, class_="bar"))
    keys = [tag("span", name, class_=f"key {colours[name]}") for name in names]
    rows = []
    for label, seconds, bar in zip(labels, spent, bars, strict=True):
        total = sum(seconds.values())
        cells = [_time_cell(seconds.get(name), total) for name in names]
        rows.append([label, bar, *cells, formats.duration(total)])
    return table(["", "", *keys, "total"], rows)


def _time_cell(seconds: float | None, total: float) -> Html:
    if seconds is None or not total:
        return escape(formats.MISSING)
    return join([formats.duration(seconds), tag("small", formats.share(seconds / total))], " ")


def _seconds(arm: Arm) -> dict[str, float]:
    """Where the time went, by the name after "time/"; mean over the seeds."""
    total: dict[str, float] = {}
    for run in arm.runs:
        for row in run.rows:
            for key in row:
                name = key.removeprefix("time/")
                if name not in (key, *NOT_SPENT) and (value := number(row, key)) is not None:
                    total[name] = total.get(name, 0.0) + value / len(arm.runs)
    return total


def excerpt_cards(excerpts: Sequence[Excerpt], show_arm: bool) -> Html:
    return tag("div", *(_card(excerpt, show_arm) for excerpt in excerpts), class_="cards")


def _card(excerpt: Excerpt, show_arm: bool) -> Html:
    where = [f"step {excerpt.step}", f"{excerpt.length} tokens"]
    if show_arm:
        where.insert(0, excerpt.arm)
    if excerpt.finish and excerpt.finish != "stop":
        where.append({"length": "cut off at the limit", "cut": "cut by an update"}.get(excerpt.finish, excerpt.finish))
    if excerpt.phase:
        where.append(excerpt.phase)
    return tag(
        "article",
        tag(
            "header",
            tag("b", f"{MARKS[excerpt.verdict]} {excerpt.verdict}", class_="verdict"),
            tag("span", " · ".join(shorten(word, WORD_SHOWN) for word in where)),
        ),
        tag(
            "dl",
            *_text("prompt", excerpt.prompt),
            *_text("response", excerpt.response or "(nothing)"),
            *_text("answer", excerpt.answer),
        ),
        class_=f"excerpt {excerpt.verdict}",
    )


def _text(name: str, text: str) -> tuple[Html, Html]:
    return tag("dt", name), tag("dd", tag("pre", shorten(text, TEXT_SHOWN), dir="auto"))


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
EXCERPTS = 20
LEARNER = {
    "reward/mean": ("Reward", "mean of the step"),
    "learn/entropy": ("Entropy", "nats a token"),
    "learn/grad_norm": ("Gradient norm", "before clipping"),
    "learn/mismatch": ("Mismatch", "recorded and recomputed log-probabilities"),
    "learn/kl": ("KL", "to the reference"),
}
"""What else is drawn for a single run, with a note, where it was recorded."""


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One comparison among several on a page."""

    title: str
    folders: Folders
    note: str = ""


def write_page(out: Path, folders: Folders, *, title: str, note: str = "", evaluation: str | None = None) -> None:
    """Run folders (or names with their folders) as one HTML file, written whole or not at all."""
    arms = read_arms(folders)
    files.write_text(Path(out), page(arms, title=title, note=note, evaluation=evaluation))


def write_chapters(out: Path, chapters: Sequence[Chapter], *, title: str, note: str = "") -> None:
    """Several comparisons on one page, each with the sections that a page of its own would have."""
    parts = [tag("header", tag("h1", title), *_paragraphs(note))]
    for chapter in chapters:
        arms = read_arms(chapter.folders)
        parts.append(tag("section", *_comparison(arms, compare(arms), chapter.title, chapter.note)))
    files.write_text(Path(out), _document(title, parts))


def page(arms: Sequence[Arm], *, title: str, note: str = "", evaluation: str | None = None) -> str:
    return _document(title, _comparison(arms, compare(arms, evaluation), title, note))


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


def _comparison(arms: Sequence[Arm], result: Comparison, title: str, note: str) -> list[Html]:
    header = tag("header", tag("h1", title), tag("p", _what(arms, result), class_="what"), *_paragraphs(note))
    return [header, *_sections(arms, result)]


def _paragraphs(note: str) -> list[Html]:
    return [tag("p", part, class_="lead") for part in note.split("\n\n") if part.strip()]


def _sections(arms: Sequence[Arm], result: Comparison) -> list[Html]:
    single = len(arms) == 1
    first = 1 if single else 0  # colour 0 is the grey of a baseline, and one run alone is none
    labels = [arm_label(arm.name, i + first) for i, arm in enumerate(arms)]
    parts = [section("Accuracy", tag("div", *_accuracy_charts(arms, result.evaluation, first), class_="pair"))]
    if result.levels:
        notes = " ".join(result.notes)
        parts.append(section("What each level cost", level_tables(result, labels), note=notes))
    parts.append(section("How the runs ended", end_table(result, labels)))
    by_level = difficulty_table(arms, result.evaluation, labels)
    if by_level is not None:
        parts.append(section("Accuracy by difficulty of the prompt", by_level))
    charts = [_signal_chart(arms, first)]
    if single:
        charts += [_length_chart(arms[0]), *_learner_charts(arms[0])]
    parts.append(section("Training", tag("div", *charts, class_="pair")))
    parts.append(section("Where the time went", time_budget(arms, labels)))
    title = "Settings" if single else "Settings that differ"
    parts.append(section(title, settings_table(arms, labels)))
    excerpts = pick_excerpts(arms, max(EXCERPTS, 4 * len(arms)))
    if excerpts:
        cards = excerpt_cards(excerpts, show_arm=not single)
        note = "From the first and the last steps, right and wrong as far as there are both; not picked for beauty."
        parts.append(section("What the model wrote", cards, note=note))
    return parts


def _what(arms: Sequence[Arm], result: Comparison) -> str:
    """What is shown, in one line, with how far a single evaluation can be trusted."""
    runs = sum(result.seeds)
    words = [f"{len(arms)} arms, {runs} runs" if len(arms) > 1 else f"{runs} run" + "s" * (runs > 1)]
    if result.evaluation is not None:
        words.append(f"evaluated on {result.evaluation}")
        error = _standard_error(arms[0], result.evaluation)
        if error:
            words.append(f"standard error of one evaluation about {error:.3f}")
    words += result.unfinished
    return "; ".join(words) + "."


def _standard_error(arm: Arm, evaluation: str) -> float | None:
    """sqrt(p (1 - p) / n) at the final accuracy p, n the most prompts the recipe allows."""
    settings = arm.runs[0].settings
    names = [
        key
        for key, value in settings.items()
        if key.startswith("eval.") and key.endswith(".name") and value == evaluation
    ]
    limit = settings.get(names[0].replace(".name", ".limit")) if names else None
    final = final_accuracy(arm.runs[0].points(evaluation))
    if not isinstance(limit, int) or limit < 1 or final is None:
        return None
    return math.sqrt(final * (1 - final) / limit)


def _accuracy_charts(arms: Sequence[Arm], evaluation: str | None, first: int) -> list[Html]:
    def lines(axis: Axis) -> list[Line]:
        return [
            _line(
                arm,
                i + first,
                [[(float(getattr(p, axis)), p.accuracy) for p in run.points(evaluation)] for run in arm.runs],
            )
            for i, arm in enumerate(arms)
        ]

    return [
        chart(
            lines("tokens"),
            title="Accuracy by tokens",
            x_label="tokens generated for training",
            x_show=formats.count,
            y_show=lambda y: f"{y:g}",
        ),
        chart(
            lines("seconds"),
            title="Accuracy by time",
            x_label="time of training",
            x_show=formats.duration,
            y_show=lambda y: f"{y:g}",
        ),
    ]


def _line(arm: Arm, colour: int, curves: Sequence[Curve]) -> Line:
    """Several seeds: the median in front, each seed faintly behind. One: itself, each evaluation marked."""
    if len(curves) == 1:
        return Line(label=arm.name, colour=colour, curve=curves[0], dots=curves[0])
    return Line(label=arm.name, colour=colour, curve=median_curve(curves), behind=tuple(curves))


def _signal_chart(arms: Sequence[Arm], first: int) -> Html:
    """Single steps are noisy: the moving mean in front."""
    lines = []
    for i, arm in enumerate(arms):
        raw = [series(run.rows, "curriculum/signal_share") for run in arm.runs]
        even = [smooth(curve, _window(curve)) for curve in raw]
        behind = tuple(raw) if len(raw) == 1 else tuple(even)
        lines.append(Line(label=arm.name, colour=i + first, curve=median_curve(even), behind=behind))
    return chart(
        lines,
        title="Signal share",
        note="of judged groups, those with right and wrong answers",
        x_label="step",
        x_show=formats.count,
        y_show=formats.share,
        from_zero=True,
    )


def _window(curve: Curve) -> int:
    return max(1, len(curve) // 12)


def _length_chart(arm: Arm) -> Html:
    keys = {"length/p50": "p50", "length/p90": "p90", "length/p99": "p99", "length/max": "longest"}
    lines = [
        Line(label=label, colour=i + 1, curve=_median_series(arm, key)) for i, (key, label) in enumerate(keys.items())
    ]
    return chart(
        lines,
        title="Response length",
        note="tokens",
        x_label="step",
        x_show=formats.count,
        y_show=formats.count,
        from_zero=True,
    )


def _learner_charts(arm: Arm) -> list[Html]:
    drawn = []
    for key, (title, note) in LEARNER.items():
        curve = _median_series(arm, key)
        if curve:
            line = Line(label=title, colour=1, curve=smooth(curve, _window(curve)), behind=(curve,))
            drawn.append(
                chart(
                    [line],
                    title=title,
                    note=note,
                    x_label="step",
                    x_show=formats.count,
                    y_show=lambda y: f"{y:.3g}",
                    from_zero=True,
                )
            )
    return drawn


def _median_series(arm: Arm, key: str) -> Curve:
    return median_curve([series(run.rows, key) for run in arm.runs])
