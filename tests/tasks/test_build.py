import math
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_judge import TASK, decode, lookup, rollout, rollouts

from whet import config
from whet.config import Data, Eval, Reward
from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.build import (
    REWARDS,
    Rewards,
    boxed_term,
    build_task,
    format_term,
    import_judge,
    length_term,
    load_judge,
    name_task,
    repetition_term,
)
from whet.tasks.judge import Judge
from whet.types import Prompt, Rollout, Sampling

PROMPT = Prompt(id="a", text="?", answer="869", task="chain")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of the user's, with judges in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    (tmp_path / "my_judges.py").write_text(
        "answer = 42\n"
        "def exact(prompt, response): return response == prompt.answer\n"
        "def loose(prompt, response, *, margin=0.1): return 1.0\n"
        "def greedy(prompt, response, more): return 1.0\n"
        "def lonely(response): return 1.0\n"
        "class Judge:\n"
        "    def __call__(self, prompt, response): return 0.5\n"
        "judge = Judge()\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    yield tmp_path
    for name in ("my_judges", "broken", "needy"):
        sys.modules.pop(name, None)


def sentence(data: Data) -> str:
    with pytest.raises(WhetError) as error:
        load_judge(build_task(data), data)
    return str(error.value)


def test_chain() -> None:
    data = Data(task="chain", options={"train_count": 50})
    task = build_task(data)
    assert task.name == "chain" and len(task.prompts("train", 0)) == 50
    assert load_judge(task, data)(PROMPT, "#869") == 1.0


def test_text(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    data = Eval(task="text", path=str(path))
    task = build_task(data)
    (prompt,) = task.prompts("eval", 0)
    assert (
        prompt.task == task.name == "text" and load_judge(task, data)(prompt, "\\boxed{b}") == 1.0
    )


def test_a_judge_from_the_current_directory(here) -> None:
    data = Data(task="chain", options={"train_count": 5}, reward="my_judges:exact")
    task = build_task(data)
    assert task.name == "chain:my_judges:exact" == task.prompts("train", 0).at(0).task
    assert load_judge(task, data)(PROMPT, "869") == 1.0
    assert load_judge(task, Data(reward="my_judges:judge"))(PROMPT, "") == 0.5
    assert load_judge(task, Data(reward="my_judges:loose"))(PROMPT, "") == 1.0


def test_a_judge_changes_no_id(here) -> None:
    plain, judged = (
        build_task(Data(reward=reward)).prompts("eval", 0).ids for reward in ("", "my_judges:exact")
    )
    assert list(plain) == list(judged)


def test_a_name_for_each_judge(here) -> None:
    """Two entries that judge differently must not be found under one name; equal ones share it."""
    taken: dict = {}
    boxed = {"answer": "boxed"}
    entries = [
        Data(path="a.jsonl"),
        Eval(path="b.jsonl", options=boxed),
        Data(path="c.jsonl", options=boxed),
        Data(path="d.jsonl", options={"answer": "tagged"}),
        Data(path="e.jsonl", reward="my_judges:exact"),
        Data(path="f.jsonl", reward="my_judges:exact", options=boxed),
        Eval(path="a.jsonl"),
        Data(),
    ]
    exact = "text:my_judges:exact"
    assert [name_task(e, taken) for e in entries] == [
        "text",
        "text:2",
        "text:2",
        "text:3",
        exact,
        f"{exact}:2",
        "text",
        "chain",
    ]


def test_a_second_name_changes_no_id(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    first, second = (
        build_task(Data(path=str(path)), name).prompts("train", 0) for name in ("text", "text:2")
    )
    assert first.ids == second.ids and second.at(0).task == "text:2"


def test_wrong_tasks(tmp_path) -> None:
    assert sentence(Data(task="chian")) == 'There is no task "chian"; did you mean "chain"?'
    assert (
        sentence(Data(task="zzz"))
        == 'There is no task "zzz"; there are chain, gym, maze, operations, text.'
    )
    assert sentence(Data(task="text")).startswith("Task text needs data.path")
    assert 'set task = "text"' in sentence(Data(task="chain", path="x.jsonl"))
    assert "has no use for where" in sentence(Data(task="chain", where={"level": 1}))
    assert 'has no option "train"; did you mean "train_count"?' in sentence(
        Data(options={"train": 3})
    )
    assert sentence(Data(options={"name": "x"})).startswith('"name" is no option of task chain')
    assert sentence(Data(task="text", options={"path": "x"})).startswith(
        '"path" is no option of task text'
    )


def test_wrong_judges(here) -> None:
    assert (
        sentence(Data(reward="my_judges"))
        == 'A reward is written "module:function", got "my_judges".'
    )
    assert sentence(Data(reward=":f")) == 'A reward is written "module:function", got ":f".'
    assert (
        sentence(Data(reward="nowhere:f"))
        == f'reward = "nowhere:f": there is no module "nowhere" in {here} or among the installed packages.'
    )
    assert 'there is no module "my_judges.deep"' in sentence(Data(reward="my_judges.deep:f"))
    assert sentence(Data(reward="my_judges:exat")).endswith(
        'has no function "exat"; did you mean "exact"?'
    )
    assert sentence(Data(reward="my_judges:answer")).endswith(
        "is a int, not a function of (prompt, response)."
    )
    assert sentence(Data(reward="my_judges:lonely")).endswith(
        "is called with (prompt, response), but takes (response)."
    )
    assert "but takes (prompt, response, more)" in sentence(Data(reward="my_judges:greedy"))
    assert sentence(Data(reward="broken:f")).endswith(
        "importing broken failed with ZeroDivisionError: division by zero."
    )
    assert sentence(Data(reward="needy:f")).endswith(
        'needy needs the module "no_such_package", which is not installed.'
    )


def test_functions_that_show_no_signature() -> None:
    assert import_judge("builtins:max") is max


def test_the_current_directory_shadows_nothing(here) -> None:
    """A judge there is found, but a file called like a module of Python or a package is not taken for it."""
    (here / "graphlib.py").write_text("raise SystemExit('the wrong one')\n")
    (here / "colorsys.py").write_text("def score(prompt, response): return 1.0\n")
    sys.modules.pop("graphlib", None)
    sys.modules.pop("colorsys", None)
    data = Data(task="chain", options={"train_count": 5}, reward="my_judges:exact")
    assert load_judge(build_task(data), data)(PROMPT, "869") == 1.0
    import graphlib

    assert not graphlib.__file__.startswith(str(here)) and sys.path[-1] == str(here)
    said = sentence(Data(reward="colorsys:score"))
    assert (
        "colorsys.py; packages go before the current directory) has no function" in said
        and str(here) not in said
    )


# ---- reward terms, by hand-computed numbers


def finished(
    length: int, verdict: str = "right", limit: int = 100, finish: str = "stop"
) -> Rollout:
    return Rollout(
        prompt_id="a",
        group_id=0,
        index=0,
        phase="train",
        sampling=Sampling(max_tokens=limit),
        length=length,
        finish=finish,  # type: ignore[arg-type]
        first_version=0,
        last_version=0,
        verdict=verdict,  # type: ignore[arg-type]
    )


def test_length_of_right_and_wrong() -> None:
    """At 0, half and all of the limit; a third of the way cos(pi/3) = 1/2, so three quarters of the way up."""
    options = {
        "right_short": 2.0,
        "right_long": 1.0,
        "wrong_short": -10.0,
        "wrong_long": 0.0,
        "cut": -10.0,
    }
    assert [length_term(finished(n), **options) for n in (0, 50, 100)] == pytest.approx(
        [2.0, 1.5, 1.0]
    )
    assert [length_term(finished(n, "wrong"), **options) for n in (0, 50, 100)] == pytest.approx(
        [-10.0, -5.0, 0.0]
    )
    assert length_term(finished(30, limit=90), **options) == pytest.approx(1.75)
    assert length_term(finished(30, "wrong", limit=90), **options) == pytest.approx(-7.5)
    assert length_term(finished(100, "right", finish="length"), **options) == -10.0


def test_length_by_default() -> None:
    assert length_term(finished(50)) == pytest.approx(0.75)
    assert length_term(finished(50, "wrong")) == pytest.approx(-0.75)
    assert length_term(finished(50), limit=50) == pytest.approx(0.5)
    assert length_term(finished(80), limit=50) == pytest.approx(0.5), "longer than its own limit"


def test_repetition() -> None:
    two = {"words": 2}
    assert (
        repetition_term("a b c d", **two) == 0.0
        and repetition_term("a", **two) == repetition_term("", **two) == 0.0
    )
    assert repetition_term("a b a b", **two) == pytest.approx(-1 / 3)  # ab ba ab
    assert repetition_term("a a a a a", **two) == pytest.approx(-3 / 4)  # aa four times
    assert repetition_term("loop " * 1_000_000) == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"<think>2+2</think>It is \boxed{4}.", 1.0),
        (r"2+2</think>It is \boxed{4}.", 1.0),
        ("<think>2+2</think><answer>4</answer>", 1.0),
        (r"It is \boxed{4}.", 0.0),
        (r"<think>\boxed{4}</think>", 0.0),
        (r"<think>\boxed{4}", 0.0),
        (r"<think>a</think><think>b</think>\boxed{4}", 0.0),
        (r"Well, <think>a</think>\boxed{4}", 0.0),
        ("", 0.0),
    ],
)
def test_format(response: str, value: float) -> None:
    assert format_term(response) == value


def test_format_by_tags_and_pattern() -> None:
    tags = {"tags": "think answer"}
    assert format_term("<think>a</think>\n<answer>4</answer>\n", **tags) == 1.0
    for bad in (
        "<answer>4</answer><think>a</think>",
        "<think>a</think>4<answer>4</answer>",
        "<think>a</think><answer>4</answer> Done.",
        "<think>a<think></think><answer>4</answer>",
        "<think>a</think>",
    ):
        assert format_term(bad, **tags) == 0.0, bad
    pattern = {"pattern": r"Answer: \d+\n.*"}
    assert (
        format_term("Answer: 4\nSo\nit is.", **pattern) == 1.0
        and format_term("x Answer: 4\n", **pattern) == 0.0
    )


def test_boxed() -> None:
    for response, value in {
        r"\boxed{4}": 1.0,
        r"<think>\boxed{3}</think>\boxed{4}": 1.0,
        r"\boxed{4}\boxed{4}": 0.0,
        r"\boxed{}": 0.0,
        r"\boxed{4": 0.0,
        "4": 0.0,
    }.items():
        assert boxed_term(response) == value, response


def test_options_that_make_no_sense() -> None:
    with pytest.raises(WhetError, match="is no regular expression"):
        format_term("", pattern="(")
    with pytest.raises(WhetError, match="not both"):
        format_term("", pattern="a", tags="b")
    with pytest.raises(WhetError, match='got "<b>"'):
        format_term("", tags="<b>")
    with pytest.raises(WhetError, match="1 word or more"):
        repetition_term("", words=0)


@given(st.text(max_size=300))
def test_finite_for_any_text(text: str) -> None:
    for reads, term in REWARDS.values():
        if reads is str:
            assert math.isfinite(term(text))


# ---- several weighted rewards: what is computed where, and how they add up


def says_right(prompt: Prompt, response: str) -> float:
    return float("right" in response)


def first_word(response: str) -> str:
    return response.partition(" ")[0]


def pool(rewards: Rewards, judge=says_right) -> Judge:
    grader = rewards.grader(judge, first_word)
    return Judge(
        lookup, {TASK: grader}, config.JudgeSettings(workers=1), decode=decode, total=rewards.total
    )


def test_no_terms_is_the_score() -> None:
    with pool(Rewards(), lambda prompt, response: 0.3) as judge:
        (got,) = judge.judge(rollouts("x y"))
    assert (got.score, got.reward, got.terms, got.final, got.verdict) == (
        0.3,
        0.3,
        {},
        "x",
        "wrong",
    )


def test_terms_add_up() -> None:
    """Half the score, a tenth for the one box, and the length reward of 32 of 64 tokens: 0.5 + 0.1 + 0.75."""
    entries = [Reward(name="boxed", weight=0.1), Reward(name="length")]
    text = r"right \boxed{4}".ljust(32)
    with pool(Rewards(0.5, entries)) as judge:
        right, wrong = judge.judge([rollout(text, 0), rollout("wrong" + text[5:], 1)])
    assert right.reward == pytest.approx(0.5 + 0.1 + 0.75) and right.terms == {
        "boxed": 1.0,
        "length": pytest.approx(0.75),
    }
    assert wrong.reward == pytest.approx(0.0 + 0.1 - 0.75) and (wrong.verdict, wrong.score) == (
        "wrong",
        0.0,
    )


def test_the_verdict_is_the_judges() -> None:
    with pool(Rewards(0.0, [Reward(name="boxed", weight=5.0)])) as judge:
        right, wrong = judge.judge(rollouts("right", r"\boxed{4}"))
    assert (right.verdict, right.reward) == ("right", 0.0) and (wrong.verdict, wrong.reward) == (
        "wrong",
        5.0,
    )


def test_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taste_of_mine.py").write_text(
        "def brief(prompt, response):\n    return -len(response)\n\n"
        "def picky(prompt, response):\n    return 1 / ('y' in response)\n\n"
        "def nothing(prompt, response):\n    return float('nan')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pool(Rewards(1.0, [Reward(name="taste_of_mine:brief", weight=0.5)])) as judge:
        (got,) = judge.judge(rollouts("right"))
        assert got.reward == 1.0 - 2.5 and got.terms == {"taste_of_mine:brief": -5.0}
    with pool(Rewards(1.0, [Reward(name="taste_of_mine:picky")])) as judge:
        yes, no = judge.judge(rollouts("right y", "right"))
        assert (yes.reward, no.verdict, no.reward) == (2.0, "unjudged", None), (
            "a term that raises costs its rollout"
        )
        assert judge.stats()["judge/errors"] == 1 and "ZeroDivisionError" in judge.complaint
    with pool(Rewards(1.0, [Reward(name="taste_of_mine:nothing")])) as judge:
        assert judge.judge(rollouts("right"))[0].verdict == "unjudged"
        assert "finite number" in judge.complaint


def test_a_judge_may_say_it_all_itself() -> None:
    def judge_all(prompt: Prompt, response: str) -> Judgement:
        return Judgement(score=1.0, final="mine", terms={"own": 2.0})

    with pool(Rewards(1.0, [Reward(name="boxed")]), judge_all) as judge:
        (got,) = judge.judge(rollouts("x"))
    assert (got.final, got.terms, got.reward) == ("mine", {"own": 2.0, "boxed": 0.0}, 1.0)


def test_twice_the_same_name() -> None:
    rewards = Rewards(
        1.0,
        [Reward(name="format"), Reward(name="format", options={"tags": "a"}), Reward(name="boxed")],
    )
    assert rewards.names == ("format", "format_2", "boxed")
    assert rewards.grader(says_right)(lookup("p"), "<a></a>").terms == {
        "format": 0.0,
        "format_2": 1.0,
        "boxed": 0.0,
    }


def test_mistakes_are_one_sentence() -> None:
    for name, options, sentence in (
        ("lenght", {}, 'no reward "lenght"; did you mean "length"'),
        ("zzz", {}, "module:function"),
        ("boxed", {"limit": 3}, 'The reward "boxed" has no option "limit"'),
        ("length", {"limit": "x"}, "limit = 'x' is wrong"),
        ("math:floor", {"a": 1}, "takes no options"),
        ("no_such_module:f", {}, "no module"),
    ):
        with pytest.raises(WhetError, match=sentence):
            Rewards(1.0, [Reward(name=name, options=options)])


def test_a_term_left_out_or_endless_is_no_reward() -> None:
    """What a judge process could only do if it were not ours any more; the run goes on all the same."""
    rewards = Rewards(1.0, [Reward(name="boxed", weight=1e300)])
    with pytest.raises(WhetError, match='said nothing of reward "boxed"'):
        rewards.total(rollout("x"), "right", Judgement(score=1.0))
    with pytest.raises(WhetError, match="add up to inf"):
        rewards.total(rollout("x"), "right", Judgement(score=1.0, terms={"boxed": 1e300}))
    with Judge(
        lookup,
        {TASK: says_right},
        config.JudgeSettings(workers=1),
        decode=decode,
        total=rewards.total,
    ) as judge:
        assert judge.judge(rollouts("right"))[0].verdict == "unjudged"
        assert judge.stats()["judge/errors"] == 1
