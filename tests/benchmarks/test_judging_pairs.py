"""The pairs by which the matcher is judged: enough of them, both verdicts, some held out, and no pair of two minds."""

from judging_known import known
from judging_pairs import pairs

from whet.tasks.matcher import Matcher
from whet.types import Prompt


def test_the_set_is_large_and_the_same_each_time() -> None:
    some = pairs()
    assert some == pairs() and len(some) == len({(p.gold, p.response) for p in some})
    for part in (True, False):
        held = [p for p in some if p.held_out == part]
        assert min(sum(p.right for p in held), sum(not p.right for p in held)) > 500
    assert 0.25 < sum(p.held_out for p in some) / len(some) < 0.35


def test_hardly_any_wrong_pair_is_accepted() -> None:
    """Without formulas, which are slow and accept only more; the benchmark judges all pairs with them."""
    matcher = Matcher("exact")
    cases = [(p.gold, p.response, p.right, p.question) for p in pairs()] + [(*case, "?") for case in known()]
    wrong = [(gold, response, question) for gold, response, right, question in cases if not right]
    accepted = [
        (gold, response)
        for gold, response, question in wrong
        if matcher.judge(Prompt(id="a", text=question, answer=gold, task="text"), response) == 1.0
    ]
    assert len(accepted) <= len(wrong) // 500, accepted
