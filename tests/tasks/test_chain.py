from collections import Counter

import numpy as np
import pytest

from whet.errors import WhetError
from whet.tasks.base import parse_range
from whet.tasks.chain import MAX_LEVEL, ChainSolutions, ChainTask, is_held_out
from whet.types import Prompt

SMALL = {"train_count": 3000, "eval_count": 200}


def work(text: str) -> str:
    """The slow way, a character at a time."""
    value, steps, values = int(text[0]), "", ""
    for operation, digit in zip(text[1:-1:2], text[2:-1:2], strict=True):
        value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[
            operation
        ] % 10
        steps += f"{operation}{digit}={value}"
        values += str(value)
    return f"{steps}#{values[-3:]}"


def row(text: str) -> np.ndarray:
    steps = zip(text[1:-1:2], text[2:-1:2], strict=True)
    return np.array(
        [[int(text[0]), *("+-*".index(operation) * 10 + int(digit) for operation, digit in steps)]]
    )


def slow_held_out(text: str) -> bool:
    """The hash in whole numbers of any size."""
    h, word = 0, 2**64
    for cell in row(text)[0].tolist():
        h = (h * 31 + cell + 1) % word
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % word
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB % word
    return (h ^ (h >> 31)) % 8 == 0


def test_the_slow_way_by_hand() -> None:
    """3+5=8, 8*2=16 -> 6, 6-7=-1 -> 9."""
    assert work("3+5*2-7=") == "+5=8*2=6-7=9#869"
    assert work("3-7=") == "-7=6#6"
    assert work("9*9+9+9+9=") == "*9=1+9=0+9=9+9=8#098"


@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_are_right(split: str) -> None:
    for prompt in ChainTask(**SMALL).prompts(split, 3):
        assert prompt.answer == work(prompt.text).partition("#")[2]
        assert prompt.meta == {"level": (len(prompt.text) - 2) // 2} and prompt.task == "chain"
        assert type(prompt.meta["level"]) is int, "a scalar of numpy would not go into JSON"


def test_judge_is_exact() -> None:
    task, prompt = ChainTask(), Prompt(id="a", text="3+5*2-7=", answer="869", task="chain")
    for right in ("#869", "+5=8*2=6-7=9#869", "#123#869"):
        assert task.judge(prompt, right) == 1.0
    for wrong in ("869", "", "#", "#869 ", "# 869", "#0869", "#86", "#869#", "#869#1", "#869="):
        assert task.judge(prompt, wrong) == 0.0


def test_shares_are_exact() -> None:
    levels = Counter(ChainTask(train_count=1000).prompts("train", 0).meta["level"])
    assert levels == {1: 400, **dict.fromkeys(range(3, 8), 24), **dict.fromkeys(range(9, 13), 120)}
    odd = Counter(ChainTask(train_count=10, mix={"1-3": 1.0}).prompts("train", 0).meta["level"])
    assert odd == {1: 4, 2: 3, 3: 3}
    overlap = Counter(
        ChainTask(train_count=100, mix={"2": 0.5, "2-3": 0.5}).prompts("train", 0).meta["level"]
    )
    assert overlap == {2: 75, 3: 25}


def test_eval_is_distinct_and_even() -> None:
    table = ChainTask().prompts("eval", 0)
    levels = Counter(table.meta["level"])
    assert len(table) == 400 == len(set(table.problems))
    assert levels[1] == 37, "all that is held out of the 300 problems of level 1"
    assert {levels[k] for k in range(2, 9)} == {51, 52}


def test_rows_are_mixed() -> None:
    """The first so many rows are a fair sample, for evaluations with a limit."""
    levels = ChainTask().prompts("eval", 0).meta["level"]
    assert set(levels[:100]) == set(range(1, 9))


def test_splits_share_nothing_whatever_the_seeds() -> None:
    task = ChainTask(**SMALL, mix={"1-2": 1.0}, eval_range="1-2")
    held_out = {text for seed in range(5) for text in task.prompts("eval", seed).problems}
    trained = {text for seed in range(5) for text in task.prompts("train", seed).problems}
    solved = {prompt.text for prompt, _ in task.solutions(np.random.default_rng(0), 3000)}
    assert not held_out & trained and not held_out & solved
    assert all(map(slow_held_out, held_out)) and not any(map(slow_held_out, trained | solved))


def test_the_held_out_part_is_pinned() -> None:
    """A model trained yesterday must not have seen today's eval problems."""
    texts = [f"{a}{o}{b}=" for a in range(10) for o in "+-*" for b in range(10)]
    held = [text for text in texts if is_held_out(row(text))[0]]
    assert held[:6] == ["0+5=", "0-8=", "0*6=", "1+6=", "1-0=", "1-4="] and len(held) == 37


def test_deterministic() -> None:
    task = ChainTask(**SMALL)
    for split in ("train", "eval"):
        assert list(task.prompts(split, 1)) == list(ChainTask(**SMALL).prompts(split, 1))
        assert list(task.prompts(split, 1)) != list(task.prompts(split, 2))
    draws = [task.solutions(np.random.default_rng(5), 50, direct=0.5) for _ in range(2)]
    assert draws[0] == draws[1]


def test_solutions_are_worked() -> None:
    task = ChainTask()
    for prompt, solution in task.solutions(np.random.default_rng(0), 500):
        assert solution == work(prompt.text) and task.judge(prompt, solution) == 1.0
    assert task.solutions(np.random.default_rng(0), 0) == []


def test_direct_answers() -> None:
    pairs = ChainTask().solutions(np.random.default_rng(0), 4000, direct=0.8)
    direct = [text == f"#{prompt.answer}" for prompt, text in pairs]
    assert all(
        short or text == work(prompt.text)
        for (prompt, text), short in zip(pairs, direct, strict=True)
    )
    assert abs(np.mean(direct) - 0.8) < 0.03
    assert all(
        text[0] == "#" for _, text in ChainTask().solutions(np.random.default_rng(0), 50, direct=1)
    )


def test_levels_of_solutions_decay() -> None:
    """P(level 1) = 1 - exp(-0.6) = 0.451; each next one 0.549 times as likely; the tail gathers at the limit."""
    levels = Counter(
        p.meta["level"]
        for p, _ in ChainTask().solutions(np.random.default_rng(0), 20_000, max_level=4)
    )
    shares = [levels[k] / 20_000 for k in range(1, 5)]
    assert np.allclose(shares, [0.4512, 0.2476, 0.1359, 0.1653], atol=0.015)
    assert set(levels) == {1, 2, 3, 4} and ChainSolutions().max_level == 12


def test_alphabet_covers_everything() -> None:
    task = ChainTask(**SMALL)
    used = set("".join(p.text + text for p, text in task.solutions(np.random.default_rng(0), 500)))
    assert used == set(task.alphabet) and len(task.alphabet) == len(set(task.alphabet))


def test_ranges() -> None:
    assert [parse_range("Task chain", text, 1, MAX_LEVEL) for text in ("3-7", "12")] == [
        (3, 7),
        (12, 12),
    ]
    for bad in ("", "0", "7-3", "1-65", "a", "1-", "-3", "1-2-3", "1.5"):
        with pytest.raises(WhetError, match="is no range of levels; write"):
            parse_range("Task chain", bad, 1, MAX_LEVEL)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eval_cuont": 3}, 'Task chain has no option "eval_cuont"; did you mean "eval_count"?'),
        (
            {"train_count": 0},
            "Task chain: train_count = 0 is wrong: it should be from 1 to 10000000.",
        ),
        (
            {"train_count": "many"},
            "Task chain: train_count = 'many' is wrong: it should be a whole number.",
        ),
        (
            {"train_count": True},
            "Task chain: train_count = True is wrong: it should be a whole number.",
        ),
        (
            {"eval_count": 1.5},
            "Task chain: eval_count = 1.5 is wrong: it should be a whole number.",
        ),
        ({"mix": "1-3"}, "Task chain: mix = '1-3' is wrong: it should be a table."),
        ({"mix": {"1": 0.5}}, "Task chain: the shares of mix must add up to 1, not to 0.5."),
        ({"mix": {}}, "Task chain: the shares of mix must add up to 1, not to 0."),
        (
            {"mix": {"1": -1.0}},
            'Task chain: mix."1" = -1.0 is wrong: a share is a number from 0 to 1.',
        ),
        (
            {"mix": {"1": float("nan")}},
            'Task chain: mix."1" = nan is wrong: a share is a number from 0 to 1.',
        ),
        (
            {"mix": {"x": 1.0}},
            'Task chain: "x" is no range of levels; write "3-7" or "5", within 1 to 64.',
        ),
        (
            {"eval_range": "9-8"},
            'Task chain: "9-8" is no range of levels; write "3-7" or "5", within 1 to 64.',
        ),
    ],
)
def test_wrong_options(options: dict, sentence: str) -> None:
    with pytest.raises(WhetError) as error:
        ChainTask(**options)
    assert str(error.value) == sentence


def test_more_eval_than_there_is() -> None:
    with pytest.raises(
        WhetError,
        match="holds out 37 problems of levels 1 to 1, fewer than eval_count = 400; lower it",
    ):
        ChainTask(eval_range="1").prompts("eval", 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dierct": 0.5},
            'The worked solutions of task chain has no option "dierct"; did you mean "direct"?',
        ),
        ({"direct": 1.5}, "Task chain: direct = 1.5 is wrong: it should be from 0 to 1."),
        ({"decay": 0.0}, "Task chain: decay = 0.0 is wrong: it should be from 0.001 to 100."),
        ({"max_level": 65}, "Task chain: max_level = 65 is wrong: it should be from 1 to 64."),
    ],
)
def test_wrong_solution_options(options: dict, sentence: str) -> None:
    with pytest.raises(WhetError) as error:
        ChainTask().solutions(np.random.default_rng(0), 1, **options)
    assert str(error.value) == sentence


def test_long_chains() -> None:
    """Beyond twelve operations the hash wraps around; problems and answers stay right."""
    task = ChainTask(train_count=200, mix={"30-64": 1.0}, eval_count=50, eval_range="40-64")
    train, held = task.prompts("train", 0), task.prompts("eval", 0)
    assert all(p.answer == work(p.text)[-3:] for table in (train, held) for p in table)
    assert not any(slow_held_out(p.text) for p in train) and all(
        slow_held_out(p.text) for p in held
    )
