"""Rollouts as they are shown: read from RUN/rollouts, a few picked for a page, long ones shortened.

`view` and `page` show them. What the model wrote stays raw here; whoever shows it makes it harmless.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from whet.report.arms import Arm
from whet.run import read_rollouts

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
