"""Writes one page for one run or for several: a single file that opens offline, with its data and its script inside.

`whet train` at its end and `whet report` at any time write RUN/report.html; `whet compare --page` and `whet demo` write
a page for several runs; `server` sends the same page without its data. The data stands in the file as JSON in which no
character can end its element, scripts and styles are named by their hashes in a policy that allows nothing else, and
without a script the numbers are there as tables, whose text is escaped on its way in unless it is `Html` already.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from whet import files
from whet.report import formats
from whet.report.arms import Folders
from whet.report.data import FORMAT, Data, PageData
from whet.report.rollouts import to_json
from whet.text import printable

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "page.js")
PLACE = re.compile(r"<!--([A-Z]+)-->")
EVALUATIONS = 50  # of a run in the table without a script, evenly chosen


def write_page(out: Path, folders: Folders, *, title: str, note: str = "") -> None:
    """Writes run folders (or names with their folders) as one HTML file, whole or not at all."""
    files.write_text(out, document(PageData(folders, title=title, note=note).read()))


def write_chapters(
    out: Path, chapters: Mapping[str, tuple[Folders, str]], *, title: str, note: str = ""
) -> None:
    """Writes several comparisons (title -> folders and note) on one page, of which the reader sees one at a time."""
    parts = [PageData(of, title=name, note=text).read() for name, (of, text) in chapters.items()]
    page: Data = {"format": FORMAT, "title": title, "note": note, "live": False, "cursor": ""}
    files.write_text(
        out, document(page | {"runs": [], "arms": [], "compare": None, "chapters": parts})
    )


def asset(name: str) -> str:
    return resources.files("whet.report").joinpath("assets", name).read_text(encoding="utf-8")


def document(page: Data) -> str:
    """The page as one file."""
    styles = [asset(name) for name in STYLES]
    scripts = [asset(name) for name in SCRIPTS]
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src-attr 'unsafe-inline'; "
    policy += f"style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
    meta = Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    inside = [meta, *(tag("style", Html(text)) for text in styles)]
    return _fill(
        TITLE=escape(page["title"]),
        STYLE=join(inside, "\n"),
        NOSCRIPT=without_script(page),
        DATA=to_json(page),
        SCRIPT=join((tag("script", Html(text)) for text in scripts), "\n"),
    )


def served_document(title: str) -> str:
    """The page without its data, which its script asks for."""
    styles = [Html(f'<link rel="stylesheet" href="assets/{name}">') for name in STYLES]
    scripts = [Html(f'<script src="assets/{name}" defer></script>') for name in SCRIPTS]
    words = (
        "This page needs its script; `whet report RUN` writes a file with the numbers as tables."
    )
    nothing = tag("noscript", tag("p", words))
    return _fill(
        TITLE=escape(title), STYLE=join(styles), NOSCRIPT=nothing, DATA="", SCRIPT=join(scripts)
    )


def _fill(**parts: str) -> str:
    """All at once: what is put in at one place may hold the name of another."""
    return PLACE.sub(lambda place: parts[place[1]], asset("page.html"))


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# ---- the numbers as tables


def without_script(page: Data) -> Html:
    """What a browser without JavaScript shows: headlines, evaluations, and the tables of the comparison."""
    parts: list[Html] = []
    for chapter in page.get("chapters") or [page]:
        notes = dict.fromkeys((page["note"], chapter["note"]))
        parts += [tag("h2", chapter["title"]), *(tag("p", note) for note in notes if note)]
        parts += [_headlines(chapter["runs"]), *(_evaluations(run) for run in chapter["runs"])]
        for table in chapter["compare"]["tables"]:
            rows = [[row[0], *map(_cell_words, row[1:])] for row in table["rows"]]
            parts.append(_table(["", *table["heads"]], rows, table["title"]))
        parts += [
            tag("p", note) for note in chapter["compare"]["verdicts"] + chapter["compare"]["notes"]
        ]
    return tag("noscript", *parts)


def _cell_words(cell: Mapping[str, Any]) -> str:
    parts = (cell.get(name, "") for name in ("value", "ratio", "range", "ratio_range"))
    return " ".join(part for part in parts if part)


def _headlines(runs: Sequence[Data]) -> Html:
    rows = []
    for run in runs:
        head = run["headline"]
        spread = (
            f" ({formats.accuracy(head['low'])}–{formats.accuracy(head['high'])})"
            if head["low"] is not None
            else ""
        )
        accuracy = formats.accuracy(head["accuracy"]) + spread
        costs = [
            formats.count(head["steps"]),
            formats.count(head["tokens"]),
            formats.duration(head["seconds"]),
        ]
        words = [
            head["hardware"],
            head["recipe"],
            run["state"],
            " ".join(filter(None, (head["verdict"], run["note"]))),
        ]
        rows.append([run["name"], accuracy, *costs, *words])
    heads = [
        "run",
        "accuracy (95% range)",
        "steps",
        "tokens",
        "time",
        "hardware",
        "recipe",
        "state",
        "verdict",
    ]
    return _table(heads, rows, "Runs")


def _evaluations(run: Data) -> Html:
    """Accuracies by step, with what they had cost by then."""
    series = run["series"]
    names = run["evaluations"]
    found = [
        i
        for i in range(len(series["step"]))
        if any(series[f"eval/{n}/accuracy"][i] is not None for n in names)
    ]
    found = found[:: -(-len(found) // EVALUATIONS) or 1]
    rows = [
        [
            formats.count(series["step"][i]),
            formats.count(series["tokens_generated"][i]),
            formats.duration(series["time_s"][i]),
            *(formats.accuracy(series[f"eval/{name}/accuracy"][i]) for name in names),
        ]
        for i in found
    ]
    return (
        _table(["step", "tokens", "time", *names], rows, f"Accuracy of {run['name']}")
        if rows
        else Html()
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    """The first cell of a row is its name."""
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    return tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *body))


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


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """An element with its children.

    >>> tag("th", "a < b", scope="col")
    '<th scope="col">a &lt; b</th>'
    """
    opening = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{opening}>{join(children)}</{name}>")
