"""The parts of a report page: tables, the time budget, rollouts.

Numbers and text in, markup out; `page` puts them together. All text goes through `markup`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from whet.report import formats
from whet.report.arms import Arm, settings_that_differ, show_setting
from whet.report.chart import COLOURS
from whet.report.compare import AXES, Cell, Comparison
from whet.report.curves import number
from whet.report.excerpts import MARKS, Excerpt, shorten
from whet.report.levels import LAST
from whet.report.markup import Html, escape, join, tag
from whet.report.status import TIMES

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


def cell_markup(cell: Cell) -> Html:
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


def _rows(labels: Sequence[Html], cells: Sequence[Sequence[Cell]]) -> list[list[str]]:
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
