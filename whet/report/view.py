"""Shows what the model wrote in the terminal: rollouts read from RUN/rollouts.

`whet view RUN` calls `view_run`, which starts at the newest step and takes a rollout of each prompt, wrong ones first,
before a second one of any; `rollouts` reads rows for the page by `read_excerpt`. Model output is hostile: it stays raw
in an excerpt, and the terminal receives it as printable plain text, never as markup or control sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from whet.errors import WhetError
from whet.report.arms import number
from whet.run import read_rollouts, rollout_files
from whet.text import printable

MARKS = {"right": "✓", "wrong": "✗", "unjudged": "?"}
FIRST = ("wrong", "unjudged", "right")  # the order of interest: a wrong answer says most
STYLES = {"right": "green", "wrong": "red", "unjudged": "yellow"}
TEXT_SHOWN = 2000  # characters of a prompt or response in the terminal

Excerpt = dict[str, Any]  # one rollout to show


def read_excerpt(row: Mapping[str, Any]) -> Excerpt:
    """Reads a row of any shape: whatever is missing or odd gets a default."""
    prompt = row.get("prompt", "")
    verdict = row.get("verdict")
    if isinstance(prompt, list):  # chat turns, each under its role
        turns = (turn if isinstance(turn, Mapping) else {} for turn in prompt)
        prompt = "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in turns)
    first = row.get("first_version", row.get("version", "?"))
    last = row.get("last_version", first)
    plain = ("prompt_id", "group_id", "phase", "response", "answer", "finish")
    return {
        "step": int(number(row, "step") or 0),
        "prompt": str(prompt),
        "verdict": verdict if verdict in MARKS else "unjudged",
        "reward": number(row, "reward"),
        "length": int(number(row, "length") or 0),
        "version": f"{first}" if first == last else f"{first}–{last}",
        "note": str(row.get("note") or ""),  # why it is unjudged
        **{key: "" if row.get(key) is None else str(row[key]) for key in plain},
    }


def shorten(text: str, most: int) -> str:
    """The beginning and the end, where answers stand.

    >>> shorten("abcdefghij" * 3, 20)
    'abcdefghijabcd … 10 characters left out … efghij'
    """
    if len(text) <= most:
        return text
    head = most * 7 // 10
    return f"{text[:head]} … {len(text) - most:,} characters left out … {text[head - most :]}"


# ---- in the terminal


def view_run(
    folder: Path,
    *,
    console: Console,
    step: int | None = None,
    verdict: str | None = None,
    phase: str | None = None,
    limit: int = 20,
) -> None:
    """Prints at most `limit` rollouts that match the filters, each group under its prompt."""
    if verdict is not None and verdict not in MARKS:
        raise WhetError(f'There is no verdict "{verdict}"; it is one of {", ".join(MARKS)}.')
    steps = sorted({step for step, _ in rollout_files(folder)})
    if not steps:
        raise WhetError(f"{folder} holds no rollouts.")
    if step is not None and step not in steps:
        known = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        raise WhetError(f"{folder} holds no rollouts of step {step}; it has {known}.")
    left = limit
    for chosen in [step] if step is not None else reversed(steps):
        groups = _read_groups(folder, chosen)
        for group, shown in _choose(groups, verdict, phase, left):
            _show_group(group, shown, console)
            left -= len(shown)
        if left <= 0:
            return
    if left == limit:
        filters = {"step": step, "verdict": verdict, "phase": phase}
        words = ", ".join(f"{name} {value}" for name, value in filters.items() if value is not None)
        raise WhetError(f"No rollout in {folder} fits {words}.")


def _read_groups(folder: Path, step: int) -> list[list[Excerpt]]:
    """The groups of one step in the order of their first rollout, evaluation after training."""
    groups: dict[tuple[str, str, bool], list[Excerpt]] = {}
    for row in read_rollouts(folder, step):
        excerpt = read_excerpt({"step": step, **row})
        # Evaluation numbers its groups from 0 each time, so a number may also belong to a training group.
        key = (excerpt["prompt_id"], excerpt["group_id"], excerpt["phase"] == "eval")
        groups.setdefault(key, []).append(excerpt)
    return sorted(groups.values(), key=lambda group: group[0]["phase"] == "eval")


def _choose(
    groups: Sequence[list[Excerpt]], verdict: str | None, phase: str | None, most: int
) -> list[tuple[list[Excerpt], list[Excerpt]]]:
    """Groups with those of their rollouts that are shown: one of each prompt, wrong ones first, before a second one."""
    fitting = [
        (place, excerpt)
        for place, group in enumerate(groups)
        for excerpt in group
        if verdict in (None, excerpt["verdict"]) and phase in (None, excerpt["phase"])
    ]
    fitting.sort(key=lambda entry: FIRST.index(entry[1]["verdict"]))
    taken: Counter[tuple[bool, str]] = Counter()  # rollouts by prompt, so far
    ranked = []
    for place, excerpt in fitting:
        prompt = excerpt["phase"] == "eval", excerpt["prompt_id"]
        ranked.append(((prompt[0], taken[prompt]), place, excerpt))
        taken[prompt] += 1
    ranked.sort(key=lambda entry: entry[0])
    chosen: dict[int, list[Excerpt]] = {}
    for _, place, excerpt in ranked[:most]:
        chosen.setdefault(place, []).append(excerpt)
    return [(groups[place], shown) for place, shown in chosen.items()]


def _show_group(group: Sequence[Excerpt], shown: Sequence[Excerpt], console: Console) -> None:
    def show(text: str, indent: int, style: str) -> None:
        visible = Text(printable(shorten(text, TEXT_SHOWN)), style=style, overflow="fold")
        console.print(Padding(visible, (0, 0, 0, indent)))

    first = group[0]
    right = sum(s["verdict"] == "right" for s in group)
    part = f", {len(shown)} shown" if len(shown) < len(group) else ""
    head = Text(f"step {first['step']}", style="bold")
    head.append(f"  {printable(first['prompt_id'], one_line=True)}", style="cyan")
    head.append(f"  {right} of {len(group)} right{part}", style="dim")
    console.print(head, soft_wrap=True)
    show(first["prompt"], 2, "")
    show(f"answer: {first['answer']}", 2, "dim")
    for excerpt in shown:
        style = STYLES[excerpt["verdict"]]
        reward = "–" if excerpt["reward"] is None else f"{excerpt['reward']:.2f}"
        numbers = (
            f"reward {reward}",
            f"{excerpt['length']} tokens",
            f"version {excerpt['version']}",
        )
        words = [
            printable(word, one_line=True)
            for word in (*numbers, excerpt["finish"], excerpt["phase"])
            if word
        ]
        facts = Text(f"{MARKS[excerpt['verdict']]} {excerpt['verdict']:<9}", style=f"bold {style}")
        console.print(Padding(facts.append("  ".join(words), style="dim"), (0, 0, 0, 2)))
        if excerpt["note"]:
            show(f"the judge {excerpt['note']}", 4, "bold")
        show(excerpt["response"] or "(nothing)", 4, style)
    console.print()
