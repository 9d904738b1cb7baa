"""Task "operations": word problems of arithmetic whose difficulty is the number of operations that the answer needs.

A problem tells how many things are in places, one sentence per quantity, and asks for one of them; docs/text.md shows
one. Each sentence holds one operation (+, - or *) on numbers or on quantities that other sentences tell. They are in
random order, and some that the answer does not need may stand among them. A worked solution has one line per operation,
each after the lines that it needs, and ends with the answer. The level of a problem is its number of needed operations;
each of their values changes the answer. Random graphs of quantities are the idea of iGSM (Ye et al. 2024, arXiv
2407.20311) and GSM-Infinite (Zhou et al. 2025, arXiv 2502.05252). All values are from 0 to 99 on every level, so that
longer problems need more steps but no harder ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetError
from whet.tasks.base import (
    PromptTable,
    check_range,
    is_held_out,
    parse_range,
    read_options,
    spread_levels,
)
from whet.types import Prompt

MOST = 20  # operations
LARGEST = 99  # value of a quantity
# the largest numbers that are added or taken away, and multiplied by; the smallest is 2
ADDEND, FACTOR = 20, 9
# chance that a sentence has numbers alone, where the problem has room for one more loose end
NEW_START = 0.25
TWO_INPUTS = 0.35  # chance that a sentence with inputs has two
AFTER = 1000  # characters that may follow "Answer:"; with more a response has no answer
TRIES = 1000  # problems drawn in place of one that is not wanted, before the options are refused

PLACES = "attic barn cabin cave cellar church farm garage hall hotel kitchen market mill office school shop tower yard"
THINGS = "bags balls bells books boxes cards chairs clocks coins cups hats keys lamps maps plates rings shoes toys"
NAMES = [{"place": place, "thing": thing} for place in PLACES.split() for thing in THINGS.split()]

SENTENCES = {  # by the number of quantities that the operation uses, {0} and {1}, and its sign
    "0+": "The {place} has {a} old and {b} new {thing}",
    "0-": "The {place} had {a} {thing} and lost {b}",
    "0*": "The {place} has {a} rows of {b} {thing}",
    "1+": "The {place} has {b} more {thing} than the {0[place]} has {0[thing]}",
    "1-": "The {place} has {b} fewer {thing} than the {0[place]} has {0[thing]}",
    "1*": "The {place} has {b} times as many {thing} as the {0[place]} has {0[thing]}",
    "2+": "There are as many {thing} in the {place} as {0[thing]} in the {0[place]} plus {1[thing]} in the {1[place]}",
    "2-": "There are as many {thing} in the {place} as {0[thing]} in the {0[place]} minus {1[thing]} in the {1[place]}",
    "2*": "There are as many {thing} in the {place} as {0[thing]} in the {0[place]} times {1[thing]} in the {1[place]}",
}
# The response is read from its end: the first hit is the last number, with all that belongs to it ("-7", "3.7", "x7").
_NUMBER_BACKWARDS = re.compile(r"[0-9][\w.,/+-]{0,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsOptions:
    train_count: int = 20_000
    # Share of the training prompts for each range of operations; inside a range the numbers get equal shares.
    mix: Mapping[str, float] = field(default_factory=lambda: {"1-3": 0.4, "4-8": 0.2, "9-14": 0.4})
    eval_count: int = 400
    eval_range: str = "1-10"
    distractors: float = 0.25  # sentences that the answer does not need, for each one that it needs

    def __post_init__(self) -> None:
        check_range("Task operations", "train_count", self.train_count, 1, 1_000_000)
        check_range("Task operations", "eval_count", self.eval_count, 1, 100_000)
        check_range("Task operations", "distractors", self.distractors, 0, 4)
        parse_range("Task operations", self.eval_range, 1, MOST)
        spread_levels("Task operations", self.mix, 1, 1, MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsSolutions:
    operations: str = "1-5"  # in equal shares

    def __post_init__(self) -> None:
        parse_range("The worked solutions of task operations", self.operations, 1, MOST)


class OperationsTask:
    alphabet = ascii_letters + digits + " .?:=+-*\n"

    def __init__(self, name: str = "operations", **options: Any) -> None:
        self.name = name
        self.options = read_options(OperationsOptions, options, "Task operations")

    def prompts(self, split: str, seed: int) -> PromptTable:
        held_out = split == "eval"
        rng = np.random.default_rng([seed, int(held_out)])
        options = self.options
        mix, count = (
            ({options.eval_range: 1.0}, options.eval_count)
            if held_out
            else (options.mix, options.train_count)
        )
        levels = rng.permutation(spread_levels("Task operations", mix, count, 1, MOST)).tolist()
        rows = self._draw(rng, levels, held_out)
        return PromptTable(
            [row.text for row in rows],
            [row.answer for row in rows],
            self.name,
            meta={"level": levels},
        )

    def judge(self, prompt: Prompt, response: str) -> float:
        """Exact: the final answer is written as the right one is."""
        return float(self.final(response) == prompt.answer)

    def final(self, response: str) -> str:
        """The last number after the last "Answer:", as it is written; "" for none."""
        _, mark, said = response.rpartition("Answer:")
        found = _NUMBER_BACKWARDS.search(said[::-1]) if mark and len(said) <= AFTER else None
        return found[0][::-1] if found else ""

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        """Worked solutions of new problems that are not held out; the options are `OperationsSolutions`."""
        chosen = read_options(
            OperationsSolutions, options, "The worked solutions of task operations"
        )
        low, high = parse_range("Task operations", chosen.operations, 1, MOST)
        rows = self._draw(rng, rng.integers(low, high + 1, size=count).tolist(), held_out=False)
        prompts = (
            Prompt(id=str(i), text=row.text, answer=row.answer, task=self.name)
            for i, row in enumerate(rows)
        )
        return [(prompt, row.work) for prompt, row in zip(prompts, rows, strict=True)]

    def _draw(
        self, rng: np.random.Generator, levels: Sequence[int], held_out: bool
    ) -> list[WordProblem]:
        """A problem per level; problems that are held out are all different."""
        # many times as fast as numpy for one number at a time
        draw = random.Random(int(rng.integers(2**63)))
        rows = list[WordProblem]()
        seen = set[str]()
        for level in levels:
            for _ in range(TRIES):
                row = draw_problem(
                    draw, level, int(level * self.options.distractors + draw.random())
                )
                if is_held_out(row.text) == held_out and row.text not in seen:
                    break
            else:
                raise WhetError(
                    f"Task operations: too few problems have level {level}; lower eval_count."
                )
            rows.append(row)
            if held_out:
                seen.add(row.text)
        return rows


class WordProblem(NamedTuple):
    text: str
    answer: str
    work: str


class Step(NamedTuple):
    sign: str
    a: int
    b: int
    value: int  # of "a sign b"
    # the steps whose values a and b are; where there are fewer than two, the rest is numbers
    inputs: list[int]


def draw_problem(rng: random.Random, level: int, extra: int) -> WordProblem:
    """A problem that needs `level` operations, with `extra` sentences that it does not need."""
    while not all_matter(steps := draw_steps(rng, level)):
        pass
    # a further step may use all others, and no needed one uses it
    for i in range(level, level + extra):
        steps.append(draw_step(rng, steps, rng.sample(range(i), rng.randint(0, min(i, 2)))))
    names = rng.sample(NAMES, level + extra)
    sentences = []
    lines = []
    for name, (sign, a, b, value, inputs) in zip(names, steps, strict=True):
        sentences.append(
            SENTENCES[f"{len(inputs)}{sign}"].format(*(names[j] for j in inputs), **name, a=a, b=b)
        )
        lines.append(f"{name['place']} {name['thing']} = {a} {sign} {b} = {value}\n")
    rng.shuffle(sentences)
    sentences.append("How many {thing} are in the {place}?".format(**names[level - 1]))
    answer = str(steps[level - 1].value)
    return WordProblem(". ".join(sentences), answer, f"{''.join(lines[:level])}Answer: {answer}")


def draw_steps(rng: random.Random, level: int) -> list[Step]:
    """Steps of which the last needs all others."""
    steps: list[Step] = []
    loose: list[int] = []  # steps that no other uses yet; in the end the last alone
    for i in range(level):
        inputs = draw_inputs(rng, i, loose, level - 1 - i)
        loose = [*(j for j in loose if j not in inputs), i]
        steps.append(draw_step(rng, steps, inputs))
    return steps


def draw_inputs(rng: random.Random, made: int, loose: list[int], left: int) -> list[int]:
    """The steps that the next one uses, where `made` exist and `left` follow it.

    A step joins at most two loose ends into one, so that at most left + 1 may remain after this one.
    """
    if len(loose) == left + 2:
        return rng.sample(loose, 2)
    if not loose or (len(loose) <= left and rng.random() < NEW_START):
        return []
    first = rng.choice(loose)
    if made > 1 and rng.random() < TWO_INPUTS:
        return [first, rng.choice([other for other in range(made) if other != first])]
    return [first]


def draw_step(rng: random.Random, steps: Sequence[Step], inputs: list[int]) -> Step:
    if not inputs:
        sign = rng.choice("+-*")
        most = FACTOR if sign == "*" else ADDEND
        a = rng.randint(2, most)
        b = rng.randint(2, most)
        a = a + b if sign == "-" else a
    elif len(inputs) == 1:
        a = steps[inputs[0]].value
        largest = {
            "+": min(ADDEND, LARGEST - a),
            "-": min(ADDEND, a),
            "*": min(FACTOR, LARGEST // a) if a else 0,
        }
        sign = rng.choice([sign for sign, most in largest.items() if most >= 2])
        b = rng.randint(2, largest[sign])
    else:
        inputs = sorted(inputs, key=lambda j: -steps[j].value)  # no difference is below 0
        a, b = (steps[j].value for j in inputs)
        fits = {"+": a + b <= LARGEST, "-": True, "*": b > 1 and a * b <= LARGEST}
        sign = rng.choice([sign for sign, fit in fits.items() if fit])
    return Step(sign, a, b, a + b if sign == "+" else a - b if sign == "-" else a * b, inputs)


def all_matter(steps: Sequence[Step]) -> bool:
    """Whether the last value changes with each other one: its derivatives, by the chain rule from the end, are not 0.
    With y = x + 3 and z = y - x the value of x does not matter, since z is 3 whatever x is.
    """
    slopes = [0] * (len(steps) - 1) + [1]
    for i, (sign, a, b, _, inputs) in reversed(list(enumerate(steps))):
        by_a_and_b = (b, a) if sign == "*" else (1, -1 if sign == "-" else 1)
        for j, by in zip(inputs, by_a_and_b, strict=False):
            slopes[j] += by * slopes[i]
    return 0 not in slopes
