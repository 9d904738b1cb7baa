"""`whet data prepare`: from a problem set to the part of it that is worth training on, once, before any run.

The command calls `prepare_file`, which reads and writes the files around `prepare`. It leaves out answers that no
response could match, problems that contradict themselves, repeats, problems of an evaluation set, and problems that a
model always or never solves; then it takes a stratified sample. It loads no model: pass rates come from the file of a
probe. Whether a problem is clear, or needs a figure that is missing, is not checked.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from whet import config, files
from whet.curriculum.allocation import largest_remainder
from whet.errors import WhetError
from whet.tasks.answer_check import answer_score
from whet.tasks.answers import right_answers
from whet.tasks.base import PromptTable, problem_hash, problem_key
from whet.tasks.build import READS_DATA, TASKS, build_task
from whet.tasks.equality import same_answer
from whet.tasks.reading import read_file
from whet.tasks.text import TextTask
from whet.types import Prompt

Lines = list[tuple[str, str]]  # (what, value) pairs for the terminal

RESPONSES = "responses.jsonl"
BINS = 5  # bins of pass rates, where the data has no levels


def prepare_file(
    entry: config.ProblemSettings,
    out: Path,
    *,
    folder: str = "",
    against: Sequence[str] = (),
    pass_rates: Path | None = None,
    size: int = 0,
    seed: int = 0,
) -> Lines:
    """Write what is left of `entry` to `out`, which `[[data]] path` reads, and return what was left out, and why.

    folder: where short names are looked for first. against: evaluation sets whose problems must not be trained on.
    pass_rates: a probe's folder or its responses.jsonl, or JSON lines of {"id": ..., "pass_rate": ...}.
    size: most problems to keep, the levels (or pass rates) in the shares they have; 0 keeps all.
    """
    if out.suffix != ".jsonl":
        raise WhetError(f"{out} must end in .jsonl, so that [[data]] can read it.")
    if out.exists():
        raise WhetError(f"{out} is there already; remove it or name another file.")
    task = _read(entry, folder)
    table = task.prompts("train", 0)
    rates = read_pass_rates(pass_rates) if pass_rates else {}
    if pass_rates and not any(prompt_id in rates for prompt_id in table.ids):
        raise WhetError(
            f"None of the {len(rates):,} prompts of {pass_rates} is in {task.origin}; probe this data."
        )
    held_out = {
        name: _read(config.Eval(path=name), folder).prompts("eval", 0).problems for name in against
    }
    sets = {name: set(map(problem_key, problems)) for name, problems in held_out.items()}
    judged = not entry.reward and "answer" in task.columns

    def usable(prompt: Prompt) -> bool:
        """Whether a response that gives the data's own answer, where the task looks for it, would be right."""
        return not judged or answer_score(task, prompt) == 1.0

    rows, report = prepare(table, usable=usable, against=sets, rates=rates, size=size, seed=seed)
    files.write_text(
        out,
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _records(task, rows, rates)),
    )
    return [("from", task.origin), *report, ("written to", str(out))]


def prepare(
    table: PromptTable,
    *,
    usable: Callable[[Prompt], bool],
    against: Mapping[str, Set[int]],
    rates: Mapping[str, float],
    size: int = 0,
    seed: int = 0,
) -> tuple[list[int], Lines]:
    """The rows to keep, in order, and how many were left out by each rule; a row counts for the first that it meets.

    against: problem keys by evaluation set. rates: pass rates by prompt id; one without is neither easy nor hard.
    """
    keys = [problem_key(problem) for problem in table.problems]
    fit = [usable(prompt) for prompt in table]
    contradicted = _contradicted(
        (key, table.answers[row]) for row, key in enumerate(keys) if fit[row]
    )
    seen: set[int] = set()
    left_out: Counter[str] = Counter()
    kept = []
    for row, key in enumerate(keys):
        rate = rates.get(table.ids[row])
        held_in = next((name for name, held in against.items() if key in held), "")
        rules = {
            "answer that no response could match": not fit[row],
            "same problem with another answer": key in contradicted,
            "repeat": key in seen,
            f"in {held_in}": bool(held_in),
            "always solved": rate == 1.0,
            "never solved": rate == 0.0,
        }
        if why := next((rule for rule, broken in rules.items() if broken), ""):
            left_out[why] += 1
        else:
            kept.append(row)
        if fit[row]:
            seen.add(key)
    report = [
        ("problems", f"{len(table):,}"),
        *((f"left out: {why}", f"{n:,}") for why, n in left_out.most_common()),
    ]
    if not kept:
        raise WhetError(
            f"Nothing is left of {len(table):,} problems: {'; '.join(f'{n:,} {w}' for w, n in left_out.items())}."
        )
    if rates:
        report.append(
            ("kept without a pass rate", f"{sum(table.ids[row] not in rates for row in kept):,}")
        )
    strata = _strata(table, kept, rates)
    if 0 < size < len(kept):
        kept = stratified(kept, strata, size, seed)
        report.append(("left out: not in the sample", f"{len(strata) - size:,}"))
        strata = _strata(table, kept, rates)
    shares = [
        (f"kept: {stratum}", f"{n:,}")
        for stratum, n in sorted(Counter(strata).items())[:20]
        if stratum
    ]
    return kept, [*report, ("kept", f"{len(kept):,}"), *shares]


def stratified(rows: Sequence[int], strata: Sequence[Hashable], size: int, seed: int) -> list[int]:
    """`size` of the rows, drawn so that every stratum keeps its share to within one.

    >>> [sum(row < 60 for row in stratified(range(90), [row < 60 for row in range(90)], 30, seed)) for seed in range(3)]
    [20, 20, 20]
    """
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for row, stratum in zip(rows, strata, strict=True):
        members[stratum].append(row)
    shares = largest_remainder([len(some) for some in members.values()], size)
    rng = np.random.default_rng(seed)
    chosen = [
        rng.choice(some, n, replace=False) for some, n in zip(members.values(), shares, strict=True)
    ]
    return sorted(int(row) for some in chosen for row in some)


def read_pass_rates(path: Path) -> dict[str, float]:
    """Pass rates by prompt id: given, or counted from judged rollouts."""
    sheet = read_file(path / RESPONSES if path.is_dir() else path)
    names = next((name for name in ("prompt_id", "id") if name in sheet.names), "")
    if not names or not {"pass_rate", "verdict"} & set(sheet.names):
        raise WhetError(
            f'{sheet.origin} holds no pass rates: its rows should read {{"id": ..., "pass_rate": ...}}, '
            "or be the responses of a probe."
        )
    # An evaluation names its prompts eval:SET:ID.
    ids = [
        name.split(":", 2)[-1] if name.startswith("eval:") else name
        for name in map(str, sheet.column(names))
    ]
    if "pass_rate" in sheet.names:
        rates = sheet.column("pass_rate")
        for row, rate in enumerate(rates):
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
                raise WhetError(
                    f"{sheet.origin}, {sheet.place(row)}: pass_rate should be a number from 0 to 1, got {rate!r}."
                )
        return dict(zip(ids, map(float, rates), strict=True))
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for prompt_id, verdict in zip(ids, sheet.column("verdict"), strict=True):
        counts[prompt_id][0] += verdict == "right"
        counts[prompt_id][1] += verdict in ("right", "wrong")
    return {prompt_id: right / judged for prompt_id, (right, judged) in counts.items() if judged}


def _read(entry: config.ProblemSettings, folder: str) -> TextTask:
    """Build the task without math-verify: no formula is compared here."""
    if entry.kind in TASKS.keys() - READS_DATA:
        raise WhetError(
            f"Task {entry.kind} makes its own problems, so there is nothing to prepare; name data."
        )
    task = build_task(
        entry.model_copy(update={"options": {**entry.options, "matcher": "exact"}}), folder=folder
    )
    assert isinstance(task, TextTask)
    return task


def _contradicted(pairs: Iterable[tuple[int, str]]) -> set[int]:
    """Problems that occur with different answers: at least one is wrong, and it is unknown which."""

    def agree(answer: str, other: str) -> bool:
        both = product(right_answers(answer), right_answers(other))
        return answer == other or any(
            same_answer(a, b, formulas=False) or same_answer(b, a, formulas=False) for a, b in both
        )

    first: dict[int, str] = {}
    return {key for key, answer in pairs if not agree(answer, first.setdefault(key, answer))}


def _strata(table: PromptTable, rows: Sequence[int], rates: Mapping[str, float]) -> list[str]:
    """Levels where the data has them, else bins of pass rates, else one stratum."""
    if levels := table.meta.get("level"):
        return [f"level {levels[row]}" if levels[row] is not None else "no level" for row in rows]
    strata = []
    for rate in (rates.get(table.ids[row]) for row in rows):
        low = min(int((rate or 0.0) * BINS), BINS - 1)
        name = (
            "no pass rate" if rate is None else f"pass rate {low / BINS:.1f}-{(low + 1) / BINS:.1f}"
        )
        strata.append(name if rates else "")
    return strata


def _records(
    task: TextTask, rows: Sequence[int], rates: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Rows that read back as the same prompts: ids of the data are written, hashes are found again."""
    table = task.prompts("train", 0)
    worked = task.solutions(np.random.default_rng(0), task.worked) if task.worked else []
    solutions = {prompt.id: text for prompt, text in worked}
    for prompt in map(table.at, rows):
        problem = prompt.text or prompt.messages
        given = prompt.id.partition("#")[0] != problem_hash(prompt.task, problem, prompt.answer)
        answers = right_answers(prompt.answer)
        yield {
            **prompt.meta,
            **({"pass_rate": rates[prompt.id]} if prompt.id in rates else {}),
            **({"id": prompt.id} if given else {}),
            "prompt": problem,
            "answer": prompt.answer if len(answers) == 1 else list(answers),
            **({"solution": solutions[prompt.id]} if prompt.id in solutions else {}),
        }
