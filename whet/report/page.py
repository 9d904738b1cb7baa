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

from whet import files
from whet.report import formats, sections
from whet.report.arms import Arm, Folders, read_arms
from whet.report.chart import Line, chart
from whet.report.compare import Comparison, compare
from whet.report.curves import Axis, Curve, median_curve, series, smooth
from whet.report.excerpts import pick_excerpts
from whet.report.levels import final_accuracy
from whet.report.markup import Html, tag

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
    labels = [sections.arm_label(arm.name, i + first) for i, arm in enumerate(arms)]
    parts = [sections.section("Accuracy", tag("div", *_accuracy_charts(arms, result.evaluation, first), class_="pair"))]
    if result.levels:
        notes = " ".join(result.notes)
        parts.append(sections.section("What each level cost", sections.level_tables(result, labels), note=notes))
    parts.append(sections.section("How the runs ended", sections.end_table(result, labels)))
    by_level = sections.difficulty_table(arms, result.evaluation, labels)
    if by_level is not None:
        parts.append(sections.section("Accuracy by difficulty of the prompt", by_level))
    charts = [_signal_chart(arms, first)]
    if single:
        charts += [_length_chart(arms[0]), *_learner_charts(arms[0])]
    parts.append(sections.section("Training", tag("div", *charts, class_="pair")))
    parts.append(sections.section("Where the time went", sections.time_budget(arms, labels)))
    title = "Settings" if single else "Settings that differ"
    parts.append(sections.section(title, sections.settings_table(arms, labels)))
    excerpts = pick_excerpts(arms, max(EXCERPTS, 4 * len(arms)))
    if excerpts:
        cards = sections.excerpt_cards(excerpts, show_arm=not single)
        note = "From the first and the last steps, right and wrong as far as there are both; not picked for beauty."
        parts.append(sections.section("What the model wrote", cards, note=note))
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
