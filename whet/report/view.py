"""What the model wrote, in the terminal, grouped by prompt. For `whet view RUN`.

Without a step the newest come first. Model output is hostile: it is made printable and goes to the
terminal as plain text, never as markup or control sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from whet.errors import WhetError
from whet.report.excerpts import MARKS, VERDICTS, Excerpt, read_excerpt, rollout_steps, shorten
from whet.run import read_rollouts
from whet.text import printable

STYLES = {"right": "green", "wrong": "red", "unjudged": "yellow"}
TEXT_SHOWN = 2000
"""Characters of a prompt or response."""


def view_run(
    folder: Path,
    *,
    step: int | None = None,
    verdict: str | None = None,
    phase: str | None = None,
    limit: int = 20,
    console: Console | None = None,
) -> None:
    """At most `limit` rollouts that fit the wishes, each group under its prompt."""
    console = console or Console()
    if verdict is not None and verdict not in VERDICTS:
        raise WhetError(f'There is no verdict "{verdict}"; it is one of {", ".join(VERDICTS)}.')
    steps = rollout_steps(folder)
    if not steps:
        raise WhetError(f"{folder} holds no rollouts.")
    if step is not None and step not in steps:
        raise WhetError(
            f"{folder} holds no rollouts of step {step}; it has {len(steps)} steps from {steps[0]} to {steps[-1]}."
        )
    left = limit
    for chosen in [step] if step is not None else reversed(steps):
        for group in groups_of(folder, chosen):
            fitting = [s for s in group if verdict in (None, s.verdict) and phase in (None, s.phase)][:left]
            if fitting:
                show_group(group, fitting, console)
                left -= len(fitting)
            if left <= 0:
                return
    if left == limit:
        raise WhetError(f"No rollout in {folder} fits{_wishes(step, verdict, phase)}.")


def groups_of(folder: Path, step: int) -> Iterator[list[Excerpt]]:
    """In the order of their first rollout, evaluation after training; one step at a time is held in memory."""
    groups: dict[tuple[int, str, str, bool], list[Excerpt]] = {}
    for row in read_rollouts(folder, step):
        excerpt = read_excerpt({"step": step, **row})
        groups.setdefault(excerpt.group, []).append(excerpt)
    yield from sorted(groups.values(), key=lambda group: group[0].phase == "eval")


def show_group(group: Sequence[Excerpt], shown: Sequence[Excerpt], console: Console) -> None:
    first = group[0]
    right = sum(s.verdict == "right" for s in group)
    head = Text(f"step {first.step}", style="bold")
    head.append(f"  {printable(first.prompt_id, one_line=True)}", style="cyan")
    head.append(
        f"  {right} of {len(group)} right" + (f", {len(shown)} shown" if len(shown) < len(group) else ""), style="dim"
    )
    console.print(head, soft_wrap=True)
    _show_text(first.prompt, console, indent=2, style="")
    _show_text(f"answer: {first.answer}", console, indent=2, style="dim")
    for excerpt in shown:
        console.print(Padding(_facts(excerpt), (0, 0, 0, 2)))
        if excerpt.note:
            _show_text(f"the judge {excerpt.note}", console, indent=4, style="bold")
        _show_text(excerpt.response or "(nothing)", console, indent=4, style=STYLES[excerpt.verdict])
    console.print()


def _facts(excerpt: Excerpt) -> Text:
    facts = Text(f"{MARKS[excerpt.verdict]} {excerpt.verdict:<9}", style=f"bold {STYLES[excerpt.verdict]}")
    reward = "–" if excerpt.reward is None else f"{excerpt.reward:.2f}"
    words = [
        f"reward {reward}",
        f"{excerpt.length} tokens",
        f"version {excerpt.version}",
        excerpt.finish,
        excerpt.phase,
    ]
    return facts.append("  ".join(printable(word, one_line=True) for word in words if word), style="dim")


def _show_text(text: str, console: Console, indent: int, style: str) -> None:
    shown = Text(printable(shorten(text, TEXT_SHOWN)), style=style, overflow="fold")
    console.print(Padding(shown, (0, 0, 0, indent)))


def _wishes(step: int | None, verdict: str | None, phase: str | None) -> str:
    """
    >>> _wishes(3, "right", None)
    ' step 3, verdict right'
    """
    given = {"step": step, "verdict": verdict, "phase": phase}
    return " " + ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
