"""Several weighted rewards: what is computed where, and how they add up."""

from pathlib import Path

import pytest
from test_judge import TASK, decode, lookup, rollout, rollouts

from whet.config import Reward
from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.build import Rewards
from whet.tasks.judge import Judge
from whet.types import Prompt


def says_right(prompt: Prompt, response: str) -> float:
    return float("right" in response)


def first_word(response: str) -> str:
    return response.partition(" ")[0]


def pool(rewards: Rewards, judge=says_right) -> Judge:
    grader = rewards.grader(judge, first_word)
    return Judge(lookup, {TASK: grader}, decode=decode, total=rewards.total, timeout_s=5.0)


def test_no_terms_is_the_score() -> None:
    with pool(Rewards(), lambda prompt, response: 0.3) as judge:
        (got,) = judge.judge(rollouts("x y"))
    assert (got.score, got.reward, got.terms, got.final, got.verdict) == (0.3, 0.3, {}, "x", "wrong")


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
    assert wrong.reward == pytest.approx(0.0 + 0.1 - 0.75) and (wrong.verdict, wrong.score) == ("wrong", 0.0)


def test_the_verdict_is_the_judges() -> None:
    with pool(Rewards(0.0, [Reward(name="boxed", weight=5.0)])) as judge:
        right, wrong = judge.judge(rollouts("right", r"\boxed{4}"))
    assert (right.verdict, right.reward) == ("right", 0.0) and (wrong.verdict, wrong.reward) == ("wrong", 5.0)


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
        assert (yes.reward, no.verdict, no.reward) == (2.0, "unjudged", None), "a term that raises costs its rollout"
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
    rewards = Rewards(1.0, [Reward(name="format"), Reward(name="format", options={"tags": "a"}), Reward(name="boxed")])
    assert rewards.names == ("format", "format_2", "boxed")
    assert rewards.grader(says_right)(lookup("p"), "<a></a>").terms == {"format": 0.0, "format_2": 1.0, "boxed": 0.0}


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
        rewards.total(rollout("x"), Judgement(score=1.0))
    with pytest.raises(WhetError, match="add up to inf"):
        rewards.total(rollout("x"), Judgement(score=1.0, terms={"boxed": 1e300}))
    with Judge(lookup, {TASK: says_right}, decode=decode, total=rewards.total) as judge:
        assert judge.judge(rollouts("right"))[0].verdict == "unjudged"
        assert judge.stats()["judge/errors"] == 1
