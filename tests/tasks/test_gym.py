"""reasoning-gym's problems as a task: what is drawn, what is held out, how it is scored, and what is never run."""

import inspect
import json
import pickle
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from whet import config
from whet.errors import WhetError
from whet.tasks.gym import GUARDS, GymTask, is_data, is_formula, is_held_out, is_sum
from whet.tasks.judge import Judge
from whet.types import Prompt, Rollout, Sampling, Trace

factory = pytest.importorskip("reasoning_gym.factory")

SMALL = {"train_count": 60, "eval_count": 20}


def one(dataset: str, **options) -> tuple[GymTask, Prompt]:
    task = GymTask(dataset=dataset, train_count=1, **options)
    return task, task.prompts("train", 0).at(0)


def test_same_seed_same_prompts() -> None:
    first, again, other = (list(GymTask(**SMALL).prompts("train", seed)) for seed in (3, 3, 4))
    assert first == again and len(first) == len({prompt.text for prompt in first}) == 60
    assert len({p.text for p in first} & {p.text for p in other}) < 10
    assert {prompt.task for prompt in first} == {"gym"}
    assert GymTask("gym:2", **SMALL).prompts("train", 3).ids == [prompt.id for prompt in first]


def test_train_and_eval_share_no_problem() -> None:
    """Two digits added or subtracted: 200 problems in all, each in one of the splits, whatever the seed."""
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = {
        p.text for seed in (0, 1) for p in GymTask(train_count=500, **sums).prompts("train", seed)
    }
    held = {
        p.text for seed in (0, 7) for p in GymTask(eval_count=500, **sums).prompts("eval", seed)
    }
    assert not train & held and len(train | held) == 200 and 30 <= len(held) <= 70
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))
    assert len(GymTask(**SMALL, **sums).prompts("eval", 0)) == 20


def test_settings_of_the_dataset() -> None:
    table = GymTask(**SMALL, min_terms=3, max_terms=3, min_digits=2, max_digits=2).prompts(
        "train", 0
    )
    assert {tuple(map(len, re.findall(r"\d+", text))) for text in table.problems} == {(2, 2, 2)}
    assert "level" not in table.meta


def test_levels() -> None:
    """num_terms counts from 2 and num_digits from 1: level 2 of the one is 4 terms, level 0 of the other 1 digit."""
    table = GymTask(**SMALL, levels={"num_terms": 2}).prompts("train", 0)
    assert {tuple(map(len, re.findall(r"\d+", text))) for text in table.problems} == {(1, 1, 1, 1)}
    assert set(table.meta["level"]) == {2}
    signed = GymTask(**SMALL, levels={"num_terms": 2}, max_digits=2, allow_negation=True).prompts(
        "train", 0
    )
    assert "- -" in " ".join(signed.problems)


def test_mixed_levels() -> None:
    table = GymTask(train_count=61, levels={"num_terms": [0, 3], "num_digits": [1, 2]}).prompts(
        "train", 0
    )
    shapes = Counter((len(re.findall(r"\d+", p.text)), p.meta["level"]) for p in table)
    assert shapes == {(2, 1): 16, (2, 2): 15, (5, 4): 15, (5, 5): 15}
    assert table.meta["level"] != sorted(table.meta["level"]), (
        "a limit takes the first, so they are shuffled"
    )


def test_levels_are_scored_by_their_own_settings() -> None:
    """decimal_arithmetic allows an error of the last digit its settings ask for: 2 places at level 0, 6 at level 2."""
    task = GymTask(
        dataset="decimal_arithmetic", train_count=8, levels={"decimal_places": [0, 1]}, precision=30
    )
    for prompt in task.prompts("train", 0):
        settings, _ = task._parts[prompt.meta["part"]]
        places = settings["max_num_decimal_places"]
        near = float(prompt.answer) + 0.9 * 10**-places
        assert task.judge(prompt, f"{near:.12f}") == 1.0
    assert len({settings["max_num_decimal_places"] for settings, _ in task._parts}) == 2


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("{}", 1.0),
        ("  {}\n", 1.0),
        ("3 and 5 make\n{}", 1.0),
        ("So it is {}.", 1.0),
        ("<think>99999</think>\nThe answer is **{}**.", 1.0),
        (r"\boxed{{{}}} as 3 is odd", 1.0),
        ("<answer> {} </answer> and not 77", 1.0),
        ("<answer>77</answer> and not {}", 0.0),
        ("{}\n77", 0.0),
        ("<think>{}", 0.0),
        ("<think>so</think>", 0.0),
        ("", 0.0),
    ],
)
def test_numbers(response: str, score: float) -> None:
    task, prompt = one("chain_sum", min_digits=3)
    assert task.judge(prompt, response.format(prompt.answer)) == score


def test_texts_and_grids() -> None:
    task, prompt = one("knights_knaves")
    said = prompt.answer
    assert (
        task.judge(prompt, f"Two are lying.\nSo {said}")
        == task.judge(prompt, f"<answer>{said}</answer>")
        == 1.0
    )
    task, prompt = one("mini_sudoku")
    assert prompt.answer.count("\n") == 3
    for response in (
        "{}",
        "The answer is:\n{}",
        "1 2 3 4\nNo:\n\n{}",
        "<answer>\n{}\n</answer> for sure",
    ):
        assert task.judge(prompt, response.format(prompt.answer)) == 1.0
    assert task.judge(prompt, f"{prompt.answer}\n1 2 3 4") < 0.99
    task, prompt = one("ab")
    assert "#" in prompt.answer and task.judge(prompt, prompt.answer) == 1.0


def test_a_score_is_passed_on_as_it_is() -> None:
    task, prompt = one("countdown")
    assert task.judge(prompt, prompt.answer) == 1.0
    assert task.judge(prompt, "1 + 1") == 0.05 and task.judge(prompt, "no idea") == 0.01


def test_final() -> None:
    task = GymTask()
    finals = [
        task.final(text)
        for text in ("<think>1</think>So 42.", r"\boxed{42} or 43", "Answer: 42", "x\n42")
    ]
    assert finals == ["42"] * 4
    assert (
        task.final("Well,\n Zoe  is a Knave.") == "zoe is a knave" and task.final("<think>42") == ""
    )


def test_problems_without_a_reference() -> None:
    task = GymTask(
        dataset="graph_color",
        train_count=9,
        min_num_vertices=4,
        max_num_vertices=4,
        edge_probability=0.5,
    )
    prompt = next(p for p in task.prompts("train", 0) if "(0, 1)" in p.text)
    assert prompt.answer == "" and prompt.meta["item"]["answer"] is None
    right = json.dumps(prompt.meta["item"]["metadata"]["possible_answer"], indent=2)
    assert (
        task.judge(prompt, right) == task.judge(prompt, f"I say <answer>{right}</answer>!") == 1.0
    )
    assert task.judge(prompt, '{"0": 1, "1": 1, "2": 1, "3": 1}') < 0.99


def test_judged_in_a_worker() -> None:
    task = GymTask(dataset="countdown", train_count=2)
    table = task.prompts("train", 0)
    assert pickle.loads(pickle.dumps(table.at(0))) == table.at(0)

    def rollout(text: str) -> Rollout:
        ids = np.array([ord(c) for c in text], np.int32)
        trace = Trace(
            ids=ids, log_probs=np.zeros(ids.size, np.float32), versions=np.zeros(ids.size, np.int32)
        )
        how = Sampling(max_tokens=99)
        fields = {
            "group_id": 0,
            "index": 0,
            "phase": "train",
            "finish": "stop",
            "first_version": 0,
            "last_version": 0,
        }
        return Rollout(prompt_id=table.ids[0], sampling=how, length=ids.size, trace=trace, **fields)

    judges = {task.name: task.judge}
    settings = config.JudgeSettings(workers=1, timeout_s=60)
    with Judge(
        table.__getitem__, judges, settings, decode=lambda ids: "".join(map(chr, ids))
    ) as judge:
        judged = judge.judge([rollout(table.answers[0]), rollout("1 + 1"), rollout("exit()")])
    assert [r.verdict for r in judged] == ["right", "wrong", "wrong"]


@pytest.mark.parametrize("dataset", sorted(GUARDS))
def test_no_response_is_run(dataset: str, tmp_path: Path) -> None:
    """What reasoning-gym would run if it were given it, is not given to it."""
    task, prompt = one(dataset)
    for quote in "'\"":
        attack = f"__import__({quote}os{quote}).mkdir({quote}{tmp_path}/MADE{quote})"
        for response in (
            attack,
            f"<answer>{attack}</answer>",
            f"\\boxed{{{attack}}}",
            f"[{attack}]",
            f"1 + {attack}",
        ):
            assert task.judge(prompt, response) < 0.99
    assert not list(tmp_path.iterdir())
    task._scorers[0].score_answer(attack, prompt.meta["item"])
    assert [path.name for path in tmp_path.iterdir()] == ["MADE"], "the guard has become needless"
    assert task.judge(prompt, prompt.answer) == 1.0


@pytest.mark.parametrize("dataset", [name for name, guard in GUARDS.items() if guard is is_data])
def test_no_response_is_run_without_a_call(dataset: str, tmp_path: Path) -> None:
    """A loop may assign to an attribute, and brackets call `__class_getitem__`: neither needs a parenthesis."""
    task, prompt = one(dataset)
    name = type(task._scorers[0]).__name__
    mkdir, made = "Random.seed.__globals__['_os'].mkdir", f"{tmp_path}/MADE"
    attack = f"[[0 for {name}.__class_getitem__ in [{mkdir}]], {name}['{made}']]"
    assert task.judge(prompt, f"<answer>{attack}</answer>") == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dataset", [name for name, guard in GUARDS.items() if guard is is_data])
def test_no_response_reads_the_answer(dataset: str) -> None:
    """The answer is evaluated among the variables of the score, where the right one is."""
    task, prompt = one(dataset)
    for attack in (
        "oracle_answer",
        "[oracle_answer]",
        "[[oracle_answer]]",
        "[[valid_solutions[0]]]",
    ):
        assert task.judge(prompt, f"<answer>{attack}</answer>") == 0.0


def test_countdown_takes_the_given_numbers_alone() -> None:
    """x - x is 0 and x / x is 1, without a digit that would be counted."""
    task, prompt = one("countdown")
    given = prompt.meta["item"]["metadata"]
    attack = f"({' + '.join(map(str, given['numbers']))}) * (x - x)" + " + x / x" * given["target"]
    assert task.judge(prompt, f"<answer>{attack}</answer>") < 0.99
    assert task.judge(prompt, f"<answer>{prompt.answer}.</answer>") == 1.0


def test_every_score_that_runs_its_answer_is_guarded() -> None:
    """By their source: a new version of reasoning-gym may bring more."""
    runs = re.compile(r"\b(?<!literal_)(?:eval|exec|parse_expr|sympify|compile|simplify)\(")
    found = {
        n
        for n, (made, _) in factory.DATASETS.items()
        if runs.search(inspect.getsource(made.score_answer))
    }
    assert found - {"number_sorting"} == set(GUARDS), "number_sorting evaluates the reference alone"


def test_guards() -> None:
    for answer in ("Q _ _\n_ Q _", "[['A', 'B']]", "0 1 2", "[[0, 1], [-1, 0]]"):
        assert (
            is_data(answer)
            and not is_data(f"exit({answer})")
            and not is_data(f"[{answer} for x in y]")
        )
    for answer in ("(3 + 4) * 5 / 2 - 1", "5*7."):
        assert is_sum(answer)
    for answer in ("x/x", "1_0", "1e9", "2.5", "exp(1)", "5^2"):
        assert not is_sum(answer)
    for answer in (
        "(3 + 4) * 5 / 2.5 - 1",
        "-9*x**8/10 + C",
        "exp(x)*sin(2*x) + sqrt(x)",
        "2 x",
        "",
    ):
        assert is_formula(answer)
    for answer in (
        "eval(x)",
        "x.__class__",
        "'a'",
        "a if b else c",
        "[1]",
        "lambda: 1",
        "99!",
        "ｅｖａｌ(x)",
        "1e9",
        "x;y",
    ):
        assert not is_formula(answer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dataset": "chain_some"},
            'reasoning-gym has no dataset "chain_some"; did you mean "chain_sum"?',
        ),
        ({"dataset": "composite"}, r"takes one dataset per entry; write a \[\[data\]\] entry"),
        ({"dataset": 3}, "dataset = 3 is wrong: it should be a string"),
        ({"train_count": 0}, "train_count = 0 is wrong: it should be from 1 to 10000000"),
        ({"min_term": 2}, 'chain_sum has no setting "min_term"; did you mean "min_terms"?'),
        ({"seed": 2}, 'chain_sum has no setting "seed"'),
        ({"min_terms": 9}, "chain_sum refuses its settings: max_terms must be >= min_terms"),
        ({"min_terms": "two"}, "chain_sum refuses its settings: '>' not supported"),
        (
            {"dataset": "gsm_symbolic", "levels": {"x": 1}},
            "gsm_symbolic has no levels; use its own settings",
        ),
        ({"levels": {"terms": 1}}, 'chain_sum has no levels of "terms"; did you mean "num_terms"?'),
        (
            {"levels": {"num_terms": 11}},
            r"levels.num_terms = 11 is wrong: chain_sum has levels 0 to 10 of it, from 2 to",
        ),
        ({"levels": {"num_terms": [0, "1"]}}, r"levels.num_terms = \[0, '1'\] is wrong"),
        ({"levels": {"num_terms": []}}, r"levels.num_terms = \[\] is wrong"),
        ({"levels": {"num_terms": True}}, "levels.num_terms = True is wrong"),
        (
            {"levels": {"num_terms": 1}, "max_terms": 4},
            r"max_terms is set by levels.num_terms already; leave one",
        ),
    ],
)
def test_wrong_options(options: dict, sentence: str) -> None:
    with pytest.raises(WhetError, match=f"^Task gym.*{sentence}"):
        GymTask(**options)


def test_a_score_that_takes_anything() -> None:
    with pytest.raises(WhetError, match="takes any answer to game_of_life_halting for a right one"):
        one("game_of_life_halting")


def test_no_worked_solutions() -> None:
    with pytest.raises(WhetError, match="Task gym has no worked solutions to imitate"):
        GymTask().solutions(np.random.default_rng(0), 1)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(WhetError, match=r'pip install "whet\[gym\]"'):
        GymTask()
