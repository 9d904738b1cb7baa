"""What an evaluation measured, as a table: a line for each set and measure, with its 95% range. For `whet eval`.

Reads the metrics of `eval.eval_metrics`, whole or lean; what is not there gets no line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from whet.report import formats
from whet.text import printable

SHARES = {"truncated": "cut at the limit", "unjudged": "unjudged", "no_answer": "no answer"}


def eval_table(metrics: Mapping[str, float]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("set", overflow="fold", max_width=24)
    table.add_column("measure", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95% range")
    for name in set_names(metrics):
        lines = [
            *_lines({key.removeprefix(f"eval/{name}/"): value for key, value in metrics.items() if _of(key, name)})
        ]
        heads = [Text(printable(name, one_line=True), style="bold"), Text(_size(metrics, name), style="dim")]
        for number, (measure, value, spread) in enumerate(lines):
            head = heads[number] if number < len(heads) else Text("")
            last = number == len(lines) - 1
            table.add_row(
                head, Text(printable(measure, one_line=True)), value, Text(spread, style="dim"), end_section=last
            )
    return table


def set_names(metrics: Mapping[str, float]) -> list[str]:
    """
    >>> set_names({"eval/a/accuracy": 0.5, "eval/a/level/accuracy": 0.5, "eval/b c/accuracy": 0.1})
    ['a', 'b c']
    """
    ends = "/accuracy"
    found = [key[len("eval/") : -len(ends)] for key in metrics if key.startswith("eval/") and key.endswith(ends)]
    return [name for name in found if not name.endswith("/level")]


def _of(key: str, name: str) -> bool:
    return key.startswith(f"eval/{name}/")


def _size(metrics: Mapping[str, float], name: str) -> str:
    prompts, n = metrics.get(f"eval/{name}/prompts"), metrics.get(f"eval/{name}/n")
    return f"{prompts:.0f} prompts × {n:.0f}" if prompts is not None and n is not None else ""


def _lines(mine: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """(measure, value, range), in reading order."""
    yield "accuracy", formats.accuracy(mine["accuracy"]), _spread(mine, "accuracy")
    for key in mine:
        tried = key.startswith(("pass@", "maj@")) and not key.endswith(("_low", "_high"))
        if tried and key != "pass@1":  # which is the accuracy
            yield key, formats.accuracy(mine[key]), _spread(mine, key)
    if "length" in mine:
        spread = ", ".join(f"{p} {mine[f'length_{p}']:,.0f}" for p in ("p50", "p90", "p99") if f"length_{p}" in mine)
        yield "length", f"{mine['length']:,.0f}", spread
    for verdict in ("right", "wrong"):
        if f"length_{verdict}" in mine:
            yield f"length of {verdict} ones", f"{mine[f'length_{verdict}']:,.0f}", ""
    for key, label in SHARES.items():
        if key in mine:
            yield label, formats.share(mine[key]), ""
    for key in mine:
        if key.startswith("level/"):
            level = key.removeprefix("level/")
            low, high = mine.get(f"level_low/{level}"), mine.get(f"level_high/{level}")
            yield f"level {level}", formats.accuracy(mine[key]), _between(low, high)


def _spread(mine: Mapping[str, float], key: str) -> str:
    return _between(mine.get(f"{key}_low"), mine.get(f"{key}_high"))


def _between(low: float | None, high: float | None) -> str:
    return f"{formats.accuracy(low)}–{formats.accuracy(high)}" if low is not None and high is not None else ""
