"""What speculation brought in an evaluation, as a table: for `whet eval --draft`.

Reads the eval/NAME/draft/MEASURE of `whet.drafted.evaluate_twice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from whet.report import formats
from whet.report.evaluation import set_names
from whet.text import printable


def draft_table(metrics: Mapping[str, float]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("set", overflow="fold", max_width=24)
    table.add_column("drafts", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for name in set_names(metrics):
        start = f"eval/{name}/draft/"
        mine = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
        lines = list(_lines(mine)) if mine else []
        for number, (measure, value) in enumerate(lines):
            head = Text("" if number else printable(name, one_line=True), style="bold")
            table.add_row(head, Text(measure), value, end_section=number == len(lines) - 1)
    return table


def _lines(mine: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    plain, drafted = mine["plain_tokens_per_s"], mine["tokens_per_s"]
    yield "tokens a second, plain", formats.count(plain)
    yield "tokens a second, drafted", f"{formats.count(drafted)} ({drafted / plain:.2f}x)"
    length = mine.get("accept_length")
    yield "accept length", formats.MISSING if length is None else f"{length:.2f}"
    yield "responses that differ", f"{mine['differ']:.0f} of {mine['rollouts']:.0f}"
    if mine.get("failures"):
        yield "drafts that failed", formats.count(mine["failures"])
    shares = {key.removeprefix("share_"): value for key, value in mine.items() if key.startswith("share_")}
    for arm, share in sorted(shares.items(), key=lambda item: -item[1]):
        yield f"time in {arm}", formats.share(share)
