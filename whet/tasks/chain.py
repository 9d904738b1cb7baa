"""Task "chain": arithmetic on digits, left to right, modulo 10. The built-in problem of the tiny model.

"3+5*2-7=" is worked as "+5=8*2=6-7=9#869": each operation with its running value, then "#" and the answer, which is
the last three running values (fewer where there are fewer). An answer of three digits is hardly ever guessed; an
answer of one digit would pay one guess in ten. The level of a problem is its number of operations.

One problem in eight, chosen by a hash of the problem itself, is held out: eval draws only from these, while train and
the worked solutions never do, whatever their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.tasks.base import PromptTable, check_range, parse_range, read_options, spread_levels
from whet.types import Prompt

OPERATIONS = "+-*"
MAX_LEVEL = 64
ANSWER_VALUES = 3
LISTED_LEVEL = 3  # up to this level the held-out problems are few enough to list: 34 thousand

_DIGITS = np.array(list("0123456789"), "S1")
_STEPS = np.array([operation + digit for operation in OPERATIONS for digit in "0123456789"], "S2")
_WORKED_STEPS = np.array(
    [[f"{step.decode()}={value}" for value in range(10)] for step in _STEPS], "S4"
)

# Shapes: `chains` is [problems, level + 1]: the first digit, then 10 * operation + digit for each operation.
Chains = np.ndarray
ByLevel = dict[int, Chains]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    train_count: int = 20_000
    # Share of the training prompts for each range of levels, by `spread_levels`.
    mix: Mapping[str, float] = field(default_factory=lambda: {"1": 0.4, "3-7": 0.12, "9-12": 0.48})
    eval_count: int = 400
    eval_range: str = "1-8"

    def __post_init__(self) -> None:
        check_range("Task chain", "train_count", self.train_count, 1, 10_000_000)
        check_range("Task chain", "eval_count", self.eval_count, 1, 100_000)
        parse_range("Task chain", self.eval_range, 1, MAX_LEVEL)
        # refuses a wrong mix before anything is drawn
        spread_levels("Task chain", self.mix, 0, 1, MAX_LEVEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolutions:
    direct: float = 0.0  # share of the solutions that give the answer without the work
    # level = 1 + floor(Exp with rate decay): each further operation is 0.55 times as likely
    decay: float = 0.6
    max_level: int = 12  # longer chains are cut to this level

    def __post_init__(self) -> None:
        check_range("Task chain", "direct", self.direct, 0, 1)
        check_range("Task chain", "decay", self.decay, 1e-3, 100)
        check_range("Task chain", "max_level", self.max_level, 1, MAX_LEVEL)


class ChainTask:
    alphabet = "0123456789" + OPERATIONS + "=#"

    def __init__(self, name: str = "chain", **options: Any) -> None:
        self.name = name
        self.options = read_options(ChainOptions, options, "Task chain")

    def prompts(self, split: str, seed: int) -> PromptTable:
        rng = np.random.default_rng([seed, int(split == "eval")])
        options = self.options
        if split == "train":
            levels = rng.permutation(
                spread_levels("Task chain", options.mix, options.train_count, 1, MAX_LEVEL)
            )
            problems = _draw_levels(rng, levels)
        else:
            wanted = parse_range("Task chain", options.eval_range, 1, MAX_LEVEL)
            problems = _draw_held_out(rng, options.eval_count, *wanted)
            levels = rng.permutation(
                np.repeat(list(problems), [len(chains) for chains in problems.values()])
            )
        return self._table(levels, _write(levels, problems))

    def judge(self, prompt: Prompt, response: str) -> float:
        """Exact: everything after the last "#" is the answer."""
        _, mark, answer = response.rpartition("#")
        return float(bool(mark) and answer == prompt.answer)

    def final(self, response: str) -> str:
        return response.rpartition("#")[2] if "#" in response else ""

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        """Worked (or direct) solutions of new problems that are not held out; the options are `ChainSolutions`."""
        if count == 0:
            return []
        chosen = read_options(ChainSolutions, options, "The worked solutions of task chain")
        levels = np.minimum(
            1 + rng.exponential(1 / chosen.decay, count).astype(int), chosen.max_level
        )
        rows = _write(levels, _draw_levels(rng, levels))
        direct = (rng.random(count) < chosen.direct).tolist()
        solved = zip(self._table(levels, rows), rows, direct, strict=True)
        return [
            (prompt, f"#{answer}" if short else f"{work}#{answer}")
            for prompt, (_, work, answer), short in solved
        ]

    def _table(self, levels: np.ndarray, rows: Sequence[tuple[str, str, str]]) -> PromptTable:
        texts = [text for text, _, _ in rows]
        answers = [answer for _, _, answer in rows]
        return PromptTable(texts, answers, self.name, meta={"level": levels.tolist()})


# ---- drawing problems


def _draw_levels(rng: np.random.Generator, levels: np.ndarray) -> ByLevel:
    """As many problems of each level as `levels` has entries of it, none held out."""
    return {
        int(level): _draw(rng, int((levels == level).sum()), int(level))
        for level in np.unique(levels)
    }


def _draw(rng: np.random.Generator, count: int, level: int, *, held_out: bool = False) -> Chains:
    """`count` problems, repeats allowed, all of them held out or none."""
    found = [np.empty((0, level + 1), int)]
    while (missing := count - sum(map(len, found))) > 0:
        size = missing * (9 if held_out else 2) + 16
        chains = np.column_stack(
            [rng.integers(10, size=size), rng.integers(30, size=(size, level))]
        )
        found.append(chains[is_held_out(chains) == held_out][:missing])
    return np.concatenate(found)


def _draw_held_out(rng: np.random.Generator, count: int, low: int, high: int) -> ByLevel:
    """`count` different held-out problems, as many of each level; what a level lacks is added to the next ones."""
    problems: ByLevel = {}
    missing = count
    for level in range(low, high + 1):
        share = missing // (high - level + 1)
        if level <= LISTED_LEVEL:
            grid = np.meshgrid(np.arange(10), *[np.arange(30)] * level, indexing="ij")
            every = np.stack([axis.ravel() for axis in grid], axis=1)
            problems[level] = rng.permutation(every[is_held_out(every)])[:share]
        else:  # so many problems that drawing finds new ones at once
            chains = np.empty((0, level + 1), int)
            new = share
            while new:
                chains = np.concatenate([chains, _draw(rng, new, level, held_out=True)])
                chains = chains[np.sort(np.unique(chains, axis=0, return_index=True)[1])]
                new = share - len(chains)
            problems[level] = chains
        missing -= len(problems[level])
    if missing:
        raise WhetError(
            f"Task chain holds out {count - missing} problems of levels {low} to {high}, "
            f"fewer than eval_count = {count}; lower it, or raise eval_range."
        )
    return problems


def is_held_out(chains: Chains) -> np.ndarray:
    """One problem in eight. A polynomial of the row modulo 2^64, mixed as in SplitMix64 (Steele et al. 2014)."""
    h = np.zeros(len(chains), np.uint64)
    for column in chains.T:
        h = h * np.uint64(31) + column.astype(np.uint64) + np.uint64(1)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (h ^ (h >> np.uint64(31))) % np.uint64(8) == 0


# ---- writing problems


def running_values(chains: Chains) -> np.ndarray:
    """The value after each operation. 3+5*2-7: 8, then 16 -> 6, then -1 -> 9."""
    value = chains[:, 0]
    values = np.empty_like(chains[:, 1:])
    for i, cell in enumerate(chains[:, 1:].T):
        operation = cell // 10
        digit = cell % 10
        value = np.choose(operation, [value + digit, value - digit, value * digit]) % 10
        values[:, i] = value
    return values


def _write(levels: np.ndarray, problems: ByLevel) -> list[tuple[str, str, str]]:
    """Problem, work and answer for each entry of `levels`; each level takes its problems in turn."""
    turns = {}
    for level, chains in problems.items():
        values = running_values(chains)
        texts = _join(
            _DIGITS[chains[:, :1]], _STEPS[chains[:, 1:]], np.full((len(chains), 1), "=", "S1")
        )
        work = _join(_WORKED_STEPS[chains[:, 1:], values])
        answers = _join(_DIGITS[values[:, -ANSWER_VALUES:]])
        turns[level] = zip(texts, work, answers, strict=True)
    return [next(turns[level]) for level in levels.tolist()]


def _join(*parts: np.ndarray) -> list[str]:
    """One string per problem, from arrays [problems, n] of short strings of equal length."""
    characters = np.hstack([part.view("S1") for part in parts])
    width = characters.shape[1]
    text = characters.tobytes().decode("ascii")
    return [text[i : i + width] for i in range(0, len(text), width)]
