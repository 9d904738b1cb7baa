"""Task "chain": arithmetic on digits, left to right, modulo 10. The built-in problem of the tiny model.

"3+5*2-7=" is worked as "+5=8*2=6-7=9#869": each operation with its running value, then "#" and the answer, the
last three running values (fewer where there are fewer). Asking for three leaves next to nothing to a guess; asking
for the last alone would pay one guess in ten. The level of a problem is its number of operations.

An eighth of all problems, told by a hash of the problem itself, is held out: eval draws from it alone, train and
worked solutions never do, whatever their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.tasks.base import read_options
from whet.tasks.prompts import PromptTable
from whet.types import Prompt

OPERATIONS = "+-*"
MAX_LEVEL = 64
ANSWER_VALUES = 3
LISTED_LEVEL = 3
"""Up to here the held-out problems are few enough to list (34 thousand); above, drawing finds new ones at once."""

_STREAMS = {"train": 0, "eval": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    train_count: int = 20_000
    mix: Mapping[str, float] = field(default_factory=lambda: {"1": 0.4, "3-7": 0.12, "9-12": 0.48})
    """Share of the training prompts for each range of levels; even inside a range."""
    eval_count: int = 400
    eval_range: str = "1-8"

    def __post_init__(self) -> None:
        _within("train_count", self.train_count, 1, 10_000_000)
        _within("eval_count", self.eval_count, 1, 100_000)
        parse_range(self.eval_range)
        for levels, share in self.mix.items():
            parse_range(levels)
            if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
                raise WhetError(f'Task chain: mix."{levels}" = {share!r} is wrong: a share is a number from 0 to 1.')
        if abs(sum(self.mix.values()) - 1) > 1e-6:
            raise WhetError(f"Task chain: the shares of mix must add up to 1, not to {sum(self.mix.values()):g}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolutions:
    direct: float = 0.0
    """Share that gives the answer without the work."""
    decay: float = 0.6
    """level = 1 + floor(Exp with rate decay): each further operation is exp(-decay) = 0.55 times as likely."""
    max_level: int = 12
    """Longer chains are cut to this level."""

    def __post_init__(self) -> None:
        _within("direct", self.direct, 0, 1)
        _within("decay", self.decay, 1e-3, 100)
        _within("max_level", self.max_level, 1, MAX_LEVEL)


class ChainTask:
    """
    >>> task = ChainTask(train_count=100, mix={"3": 1.0})
    >>> task.judge(Prompt(id="a", text="3+5*2-7=", answer="869", task="chain"), "+5=8*2=6-7=9#869")
    1.0
    """

    alphabet = "0123456789" + OPERATIONS + "=#"

    def __init__(self, name: str = "chain", **options: Any) -> None:
        self.name = name
        self.options = read_options(ChainOptions, options, "Task chain")

    def prompts(self, split: str, seed: int) -> PromptTable:
        rng = np.random.default_rng([seed, _STREAMS[split]])
        count = self.options.train_count if split == "train" else self.options.eval_count
        if split == "train":
            levels = rng.permutation(_spread(_level_shares(self.options.mix), count))
            problems = {int(k): _draw(rng, int((levels == k).sum()), int(k)) for k in np.unique(levels)}
        else:
            problems = _held_out_problems(rng, count, *parse_range(self.options.eval_range))
            levels = rng.permutation(np.repeat(list(problems), [len(chains) for chains in problems.values()]))
        texts = _scatter(levels, {k: _texts(chains) for k, chains in problems.items()})
        answers = _scatter(levels, {k: _answers(chains) for k, chains in problems.items()})
        return PromptTable(texts, answers, self.name, meta={"level": levels})

    def judge(self, prompt: Prompt, response: str) -> float:
        """Exact: what follows the last "#", to the very end, is the answer."""
        _, mark, answer = response.rpartition("#")
        return float(bool(mark) and answer == prompt.answer)

    def final(self, response: str) -> str:
        return response.rpartition("#")[2] if "#" in response else ""

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Worked (or direct) solutions of fresh problems outside the held-out part; options as in SolutionOptions."""
        if count == 0:
            return []
        chosen = read_options(ChainSolutions, options, "The worked solutions of task chain")
        levels = np.minimum(1 + rng.exponential(1 / chosen.decay, count).astype(int), chosen.max_level)
        problems = {int(k): _draw(rng, int((levels == k).sum()), int(k)) for k in np.unique(levels)}
        answers = _scatter(levels, {k: _answers(chains) for k, chains in problems.items()})
        worked = _scatter(levels, {k: _worked(chains) for k, chains in problems.items()})
        texts = _scatter(levels, {k: _texts(chains) for k, chains in problems.items()})
        table = PromptTable(texts, answers, self.name, meta={"level": levels})
        direct = (rng.random(count) < chosen.direct).tolist()
        return [
            (prompt, f"#{prompt.answer}" if short else long)
            for prompt, long, short in zip(table, worked, direct, strict=True)
        ]


def parse_range(text: str) -> tuple[int, int]:
    """
    >>> parse_range("3-7"), parse_range("5")
    ((3, 7), (5, 5))
    """
    first, dash, last = str(text).partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else True):
        low, high = int(first), int(last or first)
        if 1 <= low <= high <= MAX_LEVEL:
            return low, high
    raise WhetError(f'Task chain: "{text}" is no range of levels; write "3-7" or "5", within 1 to {MAX_LEVEL}.')


# A problem of level k is a row of k + 1 numbers: the first digit, then 10 * operation + digit for each operation.


def _draw(rng: np.random.Generator, count: int, level: int, *, held_out: bool = False) -> np.ndarray:
    """`count` problems, repeats allowed, all inside or all outside the held-out part."""
    found: list[np.ndarray] = []
    while (missing := count - sum(map(len, found))) > 0:
        size = missing * (9 if held_out else 2) + 16
        chains = np.column_stack([rng.integers(10, size=size), rng.integers(30, size=(size, level))])
        found.append(chains[is_held_out(chains) == held_out][:missing])
    return np.concatenate(found)


def _held_out_problems(rng: np.random.Generator, count: int, low: int, high: int) -> dict[int, np.ndarray]:
    """`count` different held-out problems, even over the levels; what a level lacks, the next ones give."""
    problems: dict[int, np.ndarray] = {}
    missing = count
    for level in range(low, high + 1):
        share = missing // (high - level + 1)
        if level <= LISTED_LEVEL:
            problems[level] = rng.permutation(_all_held_out(level))[:share]
        else:
            problems[level] = _draw_distinct(rng, share, level)
        missing -= len(problems[level])
    if missing:
        raise WhetError(
            f"Task chain holds out {count - missing} problems of levels {low} to {high}, "
            f"fewer than eval_count = {count}; lower it, or raise eval_range."
        )
    return problems


def _draw_distinct(rng: np.random.Generator, count: int, level: int) -> np.ndarray:
    chains = _draw(rng, count, level, held_out=True) if count else np.empty((0, level + 1), int)
    while True:
        _, first = np.unique(chains, axis=0, return_index=True)
        if len(first) == count:
            return chains
        chains = np.concatenate([chains[np.sort(first)], _draw(rng, count - len(first), level, held_out=True)])


def _all_held_out(level: int) -> np.ndarray:
    grid = np.meshgrid(np.arange(10), *[np.arange(30)] * level, indexing="ij")
    chains = np.stack([axis.ravel() for axis in grid], axis=1)
    return chains[is_held_out(chains)]


def is_held_out(chains: np.ndarray) -> np.ndarray:
    """One problem in eight. A polynomial of the row modulo 2^64, mixed as in SplitMix64 (Steele et al. 2014)."""
    h = np.zeros(len(chains), np.uint64)
    for column in chains.T:
        h = h * np.uint64(31) + column.astype(np.uint64) + np.uint64(1)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (h ^ (h >> np.uint64(31))) % np.uint64(8) == 0


def running_values(chains: np.ndarray) -> np.ndarray:
    """3+5*2-7: 8, then 16 -> 6, then -1 -> 9."""
    value, values = chains[:, 0], np.empty_like(chains[:, 1:])
    for i, cell in enumerate(chains[:, 1:].T):
        operation, digit = cell // 10, cell % 10
        value = np.choose(operation, [value + digit, value - digit, value * digit]) % 10
        values[:, i] = value
    return values


def _texts(chains: np.ndarray) -> list[str]:
    out = np.empty((len(chains), 2 * chains.shape[1]), np.uint8)
    out[:, 0] = _digit(chains[:, 0])
    out[:, 1:-1:2] = _operation(chains[:, 1:])
    out[:, 2:-1:2] = _digit(chains[:, 1:] % 10)
    out[:, -1] = ord("=")
    return _strings(out)


def _answers(chains: np.ndarray) -> list[str]:
    return _strings(_digit(running_values(chains)[:, -ANSWER_VALUES:]))


def _worked(chains: np.ndarray) -> list[str]:
    values = running_values(chains)
    steps = np.stack(
        [
            _operation(chains[:, 1:]),
            _digit(chains[:, 1:] % 10),
            np.full(values.shape, ord("="), np.uint8),
            _digit(values),
        ],
        axis=2,
    )
    mark = np.full((len(chains), 1), ord("#"), np.uint8)
    return _strings(np.hstack([steps.reshape(len(chains), -1), mark, _digit(values[:, -ANSWER_VALUES:])]))


def _digit(numbers: np.ndarray) -> np.ndarray:
    return (ord("0") + numbers).astype(np.uint8)


def _operation(cells: np.ndarray) -> np.ndarray:
    return np.frombuffer(OPERATIONS.encode(), np.uint8)[cells // 10]


def _strings(characters: np.ndarray) -> list[str]:
    width, text = characters.shape[1], np.ascontiguousarray(characters).tobytes().decode("ascii")
    return [text[i : i + width] for i in range(0, len(text), width)]


def _scatter(levels: np.ndarray, parts: Mapping[int, list[str]]) -> list[str]:
    """One column in the order of `levels`, each level taking its strings in turn."""
    turns = {level: iter(strings) for level, strings in parts.items()}
    return [next(turns[level]) for level in levels.tolist()]


def _level_shares(mix: Mapping[str, float]) -> dict[int, float]:
    shares: dict[int, float] = {}
    total = sum(mix.values())
    for levels, share in mix.items():
        low, high = parse_range(levels)
        for level in range(low, high + 1):
            shares[level] = shares.get(level, 0.0) + share / total / (high - low + 1)
    return shares


def _spread(shares: Mapping[int, float], count: int) -> np.ndarray:
    """`count` levels in these shares, exact by largest remainder (the lower level first among equals)."""
    levels = np.array(sorted(shares))
    exact = np.array([shares[int(k)] for k in levels]) * count
    whole = np.floor(exact + 1e-9).astype(int)  # 0.48 / 4 * 100 is 12, not 11.999...
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: count - whole.sum()]] += 1
    return np.repeat(levels, whole)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise WhetError(f"Task chain: {name} = {value} is wrong: it should be from {low} to {high}.")
