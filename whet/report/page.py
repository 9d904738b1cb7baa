"""Writes one static page for one run or for several side by side: curves, levels, settings, rollouts.

`whet train` at its end and `whet report` at any time write RUN/report.html; `whet compare --page` and `whet demo` write
a page for several runs. The file stands alone: styles inside, no script, nothing fetched, and a policy in its head
that forbids both. All text, also what models wrote, goes through `chart.tag`, which escapes it.
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
from whet.report.chart import COLOURS, Html, Line, Show, chart, join, tag
from whet.report.compare import Comparison, TableCell, compare
from whet.report.curves import Axis, Curve, median_curve, number, series, smooth
from whet.report.formats import LAST, final_accuracy
from whet.report.live import TIMES
from whet.report.view import MARKS, Excerpt, pick_excerpts, shorten

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


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """One comparison among several on a page."""

    title: str
    folders: Folders
    note: str = ""


def write_page(out: Path, folders: Folders, *, title: str, note: str = "") -> None:
    """Writes run folders (or names with their folders) as one HTML file, whole or not at all."""
    files.write_text(out, _document(title, _comparison(read_arms(folders), title, note)))


def write_chapters(out: Path, chapters: Sequence[Chapter], *, title: str, note: str = "") -> None:
    """Writes several comparisons on one page, each with the sections that its own page would have."""
    parts = [tag("header", tag("h1", title), *_paragraphs(note))]
    parts += [tag("section", *_comparison(read_arms(c.folders), c.title, c.note)) for c in chapters]
    files.write_text(out, _document(title, parts))


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


def _paragraphs(note: str) -> list[Html]:
    return [tag("p", part, class_="lead") for part in note.split("\n\n") if part.strip()]


def _comparison(arms: Sequence[Arm], title: str, note: str) -> list[Html]:
    """The header and the sections of one comparison."""
    result, single = compare(arms), len(arms) == 1
    first = 1 if single else 0  # colour 0 is the grey of a baseline, and a single run is not a baseline
    labels = [tag("span", arm.name, class_=f"arm c{(i + first) % COLOURS}") for i, arm in enumerate(arms)]
    (_, ends, end_cells), *costs = result.tables()
    levels = [_table(["", *heads], _rows(labels, cells), name, "costs") for name, heads, cells in costs]
    by_level = _difficulty_table(arms, result.evaluation, labels)
    charts = [_signal_chart(arms, first), *(_single_charts(arms[0]) if single else [])]
    excerpts = pick_excerpts(arms, max(EXCERPTS, 4 * len(arms)))
    cards = tag("div", *(_card(excerpt, show_arm=not single) for excerpt in excerpts), class_="cards")
    selection = "From the first and the last steps, right and wrong as far as there are both; not selected by quality."
    sections = [
        _section("Accuracy", tag("div", *_accuracy_charts(arms, result.evaluation, first), class_="pair")),
        _section("What each level cost", *levels, note=" ".join(result.notes)) if levels else None,
        _section("How the runs ended", _table(["", *ends], _rows(labels, end_cells))),
        _section("Accuracy by difficulty of the prompt", by_level) if by_level else None,
        _section("Training", tag("div", *charts, class_="pair")),
        _section("Where the time went", _time_budget(arms, labels)),
        _section("Settings" if single else "Settings that differ", _settings_table(arms, labels)),
        _section("What the model wrote", cards, note=selection) if excerpts else None,
    ]
    header = tag("header", tag("h1", title), tag("p", _summary(arms, result), class_="what"), *_paragraphs(note))
    return [header, *(section for section in sections if section is not None)]


def _summary(arms: Sequence[Arm], result: Comparison) -> str:
    """What is shown, in one line, with the standard error of a single evaluation."""
    runs = sum(result.seeds)
    words = [f"{len(arms)} arms, {runs} runs" if len(arms) > 1 else f"{runs} run" + "s" * (runs > 1)]
    if result.evaluation is not None:
        words.append(f"evaluated on {result.evaluation}")
        error = _standard_error(arms[0], result.evaluation)
        if error:
            words.append(f"standard error of one evaluation about {error:.3f}")
    return "; ".join([*words, *result.unfinished]) + "."


def _standard_error(arm: Arm, evaluation: str) -> float | None:
    """sqrt(p (1 - p) / n) at the final accuracy p, where n is the largest number of prompts that the recipe allows."""
    settings, final = arm.runs[0].settings, final_accuracy(arm.runs[0].points(evaluation))
    names = (key for key, value in settings.items() if value == evaluation)
    name = next((key for key in names if key.startswith("eval.") and key.endswith(".name")), "")
    limit = settings.get(name.replace(".name", ".limit"))
    if not isinstance(limit, int) or limit < 1 or final is None:
        return None
    return math.sqrt(final * (1 - final) / limit)


# ---- charts


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


def _step_chart(lines: Sequence[Line], title: str, note: str, y_show: Show) -> Html:
    return chart(lines, title=title, note=note, x_label="step", x_show=formats.count, y_show=y_show, from_zero=True)


def _signal_chart(arms: Sequence[Arm], first: int) -> Html:
    """The moving mean in front, because single steps are noisy."""
    lines = []
    for colour, arm in enumerate(arms, first):
        raw = [series(run.rows, "curriculum/signal_share") for run in arm.runs]
        even = [_smoothed(curve) for curve in raw]
        behind = tuple(raw) if len(raw) == 1 else tuple(even)
        lines.append(Line(label=arm.name, colour=colour, curve=median_curve(even), behind=behind))
    return _step_chart(lines, "Signal share", "of judged groups, those with right and wrong answers", formats.share)


def _single_charts(arm: Arm) -> list[Html]:
    """Response lengths, and what else was recorded of the learner."""
    curves = {key: median_curve([series(run.rows, key) for run in arm.runs]) for key in (*LENGTHS, *LEARNER)}
    lengths = [Line(label=label, colour=i, curve=curves[key]) for i, (key, label) in enumerate(LENGTHS.items(), 1)]
    charts = [_step_chart(lengths, "Response length", "tokens", formats.count)]
    for key, (title, note) in LEARNER.items():
        if curve := curves[key]:
            line = Line(label=title, colour=1, curve=_smoothed(curve), behind=(curve,))
            charts.append(_step_chart([line], title, note, "{:.3g}".format))
    return charts


def _smoothed(curve: Curve) -> Curve:
    return smooth(curve, max(1, len(curve) // 12))


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
    levels = sorted((key.removeprefix(prefix) for key in keys), key=_numbers_first)
    if not levels:
        return None
    rows_of_first = arms[0].runs[0].rows
    before = [number(next((row for row in rows_of_first if prefix + x in row), {}), prefix + x) for x in levels]
    rows: list[list[str]] = [["at the start", *map(formats.accuracy, before)]]
    for arm, label in zip(arms, labels, strict=True):
        rows.append([label, *(formats.accuracy(_final(arm, prefix + x)) for x in levels)])
    return _table(["", *levels], rows)


def _numbers_first(name: str) -> tuple[bool, float, str]:
    """Sorts numbers by size, then words."""
    try:
        return (False, float(name), name)
    except ValueError:
        return (True, 0.0, name)


def _final(arm: Arm, key: str) -> float | None:
    """Median over the seeds of the mean of the last evaluations."""
    seeds = [[v for row in run.rows if (v := number(row, key)) is not None] for run in arm.runs]
    ends = [fmean(values[-LAST:]) for values in seeds if values]
    return median(ends) if ends else None


def _settings_table(arms: Sequence[Arm], labels: Sequence[Html]) -> Html:
    """The settings that the arms do not share; for one arm its whole recipe, folded away."""
    if len(arms) == 1:
        rows = [[key, show_setting(value)] for key, value in arms[0].runs[0].settings.items()]
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
