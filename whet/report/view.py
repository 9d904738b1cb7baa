"""What the model wrote, in the terminal, grouped by prompt. For `whet view RUN`.

Without a step the newest come first. Model output is hostile: it is made printable and goes to the
terminal as plain text, never as markup or control sequences.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from whet.errors import WhetError
from whet.report.arms import Arm
from whet.run import read_rollouts
from whet.text import printable

# ---- excerpts
#
# Rollouts as they are shown: read from RUN/rollouts, a few picked for a page, long ones shortened.
#
# `view` and `page` show them. What the model wrote stays raw here; whoever shows it makes it harmless.


VERDICTS = ("right", "wrong", "unjudged")
MARKS = {"right": "✓", "wrong": "✗", "unjudged": "?"}
FILE_NAME = re.compile(r"[a-z]+_(\d{8,})\.jsonl")
"""step_00000012.jsonl, eval_00000012.jsonl."""
STEPS_READ = 3
"""A page looks at so many steps from each end of a run: rollout files can be large."""
ROLLOUTS_READ = 2000
"""And at so many rollouts of each."""


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One rollout to show."""

    arm: str
    step: int
    prompt_id: str
    group_id: str
    phase: str
    prompt: str
    response: str
    answer: str
    verdict: str
    reward: float | None
    length: int
    finish: str
    version: str
    note: str = ""
    """Why it is unjudged."""

    @property
    def group(self) -> tuple[int, str, str, bool]:
        """Evaluation numbers its groups anew each time, so they may share a number with a training group."""
        return (self.step, self.prompt_id, self.group_id, self.phase == "eval")


def read_excerpt(row: Mapping[str, Any], arm: str = "") -> Excerpt:
    verdict = row.get("verdict")
    reward = row.get("reward")
    return Excerpt(
        arm=arm,
        step=int(row.get("step", 0)),
        prompt_id=str(row.get("prompt_id", "")),
        group_id=str(row.get("group_id", "")),
        phase=str(row.get("phase", "")),
        prompt=_prompt_text(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer=str(row.get("answer", "")),
        verdict=verdict if verdict in VERDICTS else "unjudged",
        reward=float(reward) if isinstance(reward, int | float) else None,
        length=int(row.get("length", 0)),
        finish=str(row.get("finish", "")),
        version=_version_text(row),
        note=str(row.get("note") or ""),
    )


def _prompt_text(prompt: Any) -> str:
    """Chat turns are shown one after the other, each under its role."""
    if isinstance(prompt, list):
        turns = (turn if isinstance(turn, Mapping) else {} for turn in prompt)
        return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in turns)
    return str(prompt)


def _version_text(row: Mapping[str, Any]) -> str:
    first = row.get("first_version", row.get("version", "?"))
    last = row.get("last_version", first)
    return f"{first}" if first == last else f"{first}–{last}"


def shorten(text: str, most: int) -> str:
    """The beginning and, since answers stand there, the end.

    >>> shorten("abcdefghij" * 3, 20)
    'abcdefghijabcd … 10 characters left out … efghij'
    >>> shorten("short", 20)
    'short'
    """
    if len(text) <= most:
        return text
    head = most * 7 // 10
    tail = most - head
    return f"{text[:head]} … {len(text) - most:,} characters left out … {text[-tail:]}"


def rollout_steps(folder: Path) -> list[int]:
    """The steps with recorded rollouts, rising."""
    names = (FILE_NAME.fullmatch(path.name) for path in (folder / "rollouts").glob("*.jsonl"))
    return sorted({int(name[1]) for name in names if name})


def pick_excerpts(arms: Sequence[Arm], count: int = 20, seed: int = 0) -> list[Excerpt]:
    """So many rollouts, as evenly as they go round over arm, early or late, right or wrong; early ones first.

    Deterministic. Of each arm the first run is read, and only its first and last steps.
    """
    rng = random.Random(seed)
    buckets: dict[tuple[bool, str, str], list[Excerpt]] = {}
    for arm in arms:
        for late, excerpt in _ends_of(arm):
            buckets.setdefault((late, excerpt.verdict, arm.name), []).append(excerpt)
    for key, excerpts in buckets.items():
        rng.shuffle(excerpts)
        buckets[key] = _distinct_first(excerpts)
    picked: list[tuple[bool, Excerpt]] = []
    for turn in range(count):
        for key, excerpts in buckets.items():
            if turn < len(excerpts) and len(picked) < count:
                picked.append((key[0], excerpts[turn]))
    picked.sort(key=lambda pair: (pair[0], pair[1].step))
    return [excerpt for _, excerpt in picked]


def _ends_of(arm: Arm) -> Iterator[tuple[bool, Excerpt]]:
    folder = arm.runs[0].folder
    steps = rollout_steps(folder)
    early = steps[: min(STEPS_READ, (len(steps) + 1) // 2)]
    late = steps[len(early) :][-STEPS_READ:]
    for is_late, chosen in ((False, early), (True, late)):
        for step in chosen:
            for row in islice(read_rollouts(folder, step), ROLLOUTS_READ):
                yield is_late, read_excerpt(row, arm.name)


def _distinct_first(excerpts: Sequence[Excerpt]) -> list[Excerpt]:
    """One of each prompt before a second of any."""
    seen: set[str] = set()
    fresh: list[Excerpt] = []
    repeats: list[Excerpt] = []
    for excerpt in excerpts:
        (repeats if excerpt.prompt_id in seen else fresh).append(excerpt)
        seen.add(excerpt.prompt_id)
    return fresh + repeats


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
