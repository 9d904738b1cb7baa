"""Whether the data's own answers can be right at all, and a summary of a data entry for `whet data look`.

`resolve` checks a sample of the answers before a run, `whet data look` checks all. Each answer is judged as if a
response gave it, in killable processes as in a run, and the whole check ends when its time is up. Only task "text" is
checked: a user's judge may want more than an answer, and the other tasks make their answers themselves. A user's judge
is called three times instead (`try_judge`), and need not find anything right.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from whet import config
from whet.errors import WhetError
from whet.tasks.answers import read_json, right_answers, whole_answers
from whet.tasks.base import problem_key, problem_text
from whet.tasks.build import Grader, build_task
from whet.tasks.formulas import LONGEST
from whet.tasks.judge import Judge, judge_name
from whet.tasks.text import MOST_META, TextTask, short
from whet.types import Prompt, Request, Rollout, Sampling, Trace

SECONDS = 20.0  # for the whole check
SAMPLE = 2000  # answers of an entry that are checked before a run
LUMP = 2048  # answers sent to the judges at once
FEW = 0.05  # a larger share of bad answers means that the column is wrong, not single rows
KNOBS = (
    'name another column by columns = { answer = "..." }, say where a response gives its answer by options = '
    '{ answer = "whole" }, or bring your own judge by reward = "module:function"'
)
NOISE = "}{ \\boxed{ 0x~ \n<answer> --7,,.5e"  # a response that answers nothing
_TIMEOUT_S = 2.0
# The judge of a check reads only the prompt.
_ASKED = Request(prompt_id="", group_id=0, n=1, sampling=Sampling(max_tokens=1), phase="eval")
_NOTHING = Trace(
    ids=np.zeros(0, np.int32), log_probs=np.zeros(0, np.float32), versions=np.zeros(0, np.int32)
)
_EMPTY = Rollout.of(
    _ASKED, 0, length=0, finish="stop", first_version=0, last_version=0, trace=_NOTHING
)
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(?:/\d+)?|[-+]?\\[dt]?frac\{?\d+\}?\{?\d+\}?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """What a check found."""

    answers: int  # to be checked
    checked: int  # as many as there was time for
    unmatched: int
    example: str  # one of the unmatched answers, in words
    long: int = 0  # answers that match, but are texts of more than 300 characters

    @property
    def mostly_wrong(self) -> bool:
        return 2 * self.unmatched > self.checked

    def sentences(self) -> list[str]:
        """What is wrong, and which setting to change; nothing where all is well."""
        said = []
        if self.unmatched:
            few = self.unmatched <= FEW * self.checked
            said.append(
                f"{self.unmatched:,} of {self.checked:,} answers cannot be matched by this judge, such as "
                f"{self.example}; {'whet data prepare leaves such problems out' if few else KNOBS}."
            )
        if self.long > FEW * self.checked:
            said.append(
                f"{self.long:,} of {self.checked:,} answers are texts of more than {LONGEST} characters, which a "
                f"response must repeat word for word; {KNOBS}."
            )
        if self.checked < self.answers:
            said.append(
                f"The time was up when {self.checked:,} of {self.answers:,} answers were checked."
            )
        return said


def check(
    task: TextTask,
    rows: Sequence[int],
    prompt_at: Callable[[int], Prompt],
    *,
    sample: int = 0,
    seed: int = 0,
    seconds: float = SECONDS,
    workers: int = 1,
    memory_mb: int = 2048,
) -> AnswerCheck:
    """Judge the answers of `sample` rows, drawn by `seed`; 0 is all of them."""
    drawn = np.random.default_rng((seed, 7919)).permutation(rows)[: sample or None].tolist()
    until = time.monotonic() + seconds
    prompts: dict[str, Prompt] = {}
    wrong: list[int] = []
    checked = long = 0
    with Judge(
        prompts.__getitem__,
        {task.name: lambda prompt, _: answer_score(task, prompt)},
        config.JudgeSettings(workers=workers, timeout_s=_TIMEOUT_S, memory_mb=memory_mb),
        decode=lambda ids: "",
        ordered=False,
    ) as judge:
        for start in range(0, len(drawn), LUMP):
            prompts.clear()
            prompts.update((str(row), prompt_at(row)) for row in drawn[start : start + LUMP])
            judge.send(replace(_EMPTY, prompt_id=prompt_id) for prompt_id in prompts)
            while not judge.idle and time.monotonic() < until:
                for rollout in judge.receive(wait=True):
                    checked += 1
                    if rollout.verdict != "right":
                        wrong.append(int(rollout.prompt_id))
                    else:
                        golds = whole_answers(prompts[rollout.prompt_id].answer)
                        long += any(read_json(one) is None for one in golds)
            if time.monotonic() >= until:
                break
    example = ""
    if wrong:
        prompt = prompt_at(min(wrong))
        example = f"{short(prompt.answer)} of the problem {short(prompt.text or prompt.messages[-1]['content'])}"
    return AnswerCheck(
        answers=len(drawn), checked=checked, unmatched=len(wrong), example=example, long=long
    )


def answer_score(task: TextTask, prompt: Prompt) -> float:
    """The best score of a response that gives one of the right answers, where the task looks for it."""
    answers = (prompt.answer, *right_answers(prompt.answer))
    return max(task.judge(prompt, task.written(answer)) for answer in dict.fromkeys(answers))


def try_judge(judge: Grader, prompt: Prompt, settings: config.JudgeSettings) -> list[str]:
    """Call a judge with the limits of a run: with the right answer, with nothing and with noise. It is refused if it
    judges none of them; returned is a sentence on the first that it does not judge."""
    tried = {
        f"the answer of problem {prompt.id}": prompt.answer,
        "an empty response": "",
        "noise": NOISE,
    }
    texts = list(tried.values())
    # one each, so that a hang is waited for once
    limits = {"workers": len(texts), "truncated": "judge"}
    sent = [
        replace(_EMPTY, index=place, trace=replace(_NOTHING, ids=np.array([place])))
        for place in range(len(texts))
    ]
    with Judge(
        lambda _: prompt,
        {prompt.task: judge},
        settings.model_copy(update=limits),
        decode=lambda ids: texts[ids[0]],
    ) as trial:
        notes = [rollout.note for rollout in trial.judge(sent)]
    failed = [
        f"Called with {what}, {judge_name(prompt.task)} {note}"
        for what, note in zip(tried, notes, strict=True)
        if note
    ]
    if all(notes):
        cure = "raise judge.timeout_s" if "took longer" in notes[0] else "repair it"
        raise WhetError(f"{failed[0]}; an empty response and noise get no verdict either: {cure}.")
    return [
        f"{sentence}; such a response stays unjudged and trains nothing." for sentence in failed[:1]
    ]


# ---- the summary of a data entry


def describe_problems(entry: config.ProblemSettings, folder: str = "") -> list[tuple[str, str]]:
    """(what, value) pairs. folder: where short names are looked for first."""
    task = build_task(entry, folder=folder)
    table = task.prompts("eval" if isinstance(entry, config.Eval) else "train", 0)
    texts = [problem_text(problem) for problem in table.problems]
    lengths = [len(text) for text in texts]
    repeats = len(table) - len(
        {(problem_key(p), a) for p, a in zip(table.problems, table.answers, strict=True)}
    )
    kinds = Counter(map(answer_kind, table.answers)).most_common()
    lines = [("task", task.name)]
    if isinstance(task, TextTask):
        columns = ", ".join(f"{role} = {name}" for role, name in task.columns.items())
        lines = [("from", task.origin), ("rows", f"{task.rows:,}"), ("columns", columns)]
        lines += [("note", note) for note in task.notes]
        lines.append(("worked solutions", f"{task.worked:,}"))
    lines += [
        ("problems", f"{len(table):,}, {repeats:,} of them repeats"),
        ("length", f"{median(lengths):,.0f} characters in the middle, {max(lengths):,} at most"),
        ("answers", ", ".join(f"{kind} {count / len(table):.0%}" for kind, count in kinds)),
    ]
    if isinstance(task, TextTask) and "answer" in task.columns and not entry.reward:
        found = check(task, range(len(table)), table.at, workers=os.cpu_count() or 1)
        said = found.sentences() or [f"all {found.checked:,} answers can be matched by this judge"]
        if found.mostly_wrong:
            said.append("a run refuses answers of which more than half cannot be matched")
        lines += [("judged", line) for line in said]
    if "level" in table.meta:
        counts = Counter("none" if level is None else level for level in table.meta["level"])
        levels = sorted(counts.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        more = f" and {len(levels) - 20} more" if len(levels) > 20 else ""
        lines.append(
            ("levels", ", ".join(f"{level}: {count:,}" for level, count in levels[:20]) + more)
        )
    if further := [name for name in table.meta if name != "level"]:
        lines.append(("kept as meta", ", ".join(further)))
    if not_kept := getattr(task, "not_kept", ()):
        lines.append(
            ("not kept", f"{', '.join(not_kept)} (long texts, or beyond {MOST_META} columns)")
        )
    return [
        *lines,
        ("first problem", _cut(texts[0], 300)),
        ("its answer", _cut(table.answers[0], 100)),
    ]


def answer_kind(answer: str) -> str:
    r"""
    >>> [answer_kind(a) for a in ("-72", "1,200", "0.5", r"\frac{1}{2}", '["1", "2"]', r"2\pi", "x+1", "Evelyn")]
    ['whole number', 'whole number', 'number', 'number', 'several', 'formula', 'formula', 'text']
    """
    if answer.startswith('["'):
        return "several"
    bare = answer.strip("$ ")
    if bare.replace(",", "").lstrip("+-").isdigit():
        return "whole number"
    if _NUMBER.fullmatch(bare):
        return "number"
    return (
        "text"
        if bare.replace(" ", "").isalpha() and len(bare) > 1
        else "formula"
        if bare
        else "none"
    )


def _cut(text: str, most: int) -> str:
    """One line that a terminal shows as it is."""
    line = "".join(
        character if character.isprintable() else " " for character in " ".join(text[:most].split())
    )
    return line + " ..." if len(text) > most else line
