import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from whet.eval import maj_at_k, pass_at_k


@pytest.mark.parametrize(
    ("n", "right", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 4), (6, 6, 1), (5, 4, 2)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, right: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(
    ("finals", "expected"),
    [
        ("7 7 9", 1.0),
        ("7 9 9", 0.0),
        ("7 9", 0.5),  # a tie is shared
        ("7 8 9", 1 / 3),
        ("7 7 8 8 9", 0.5),  # only the tied winners share
        ("7 - - -", 1.0),  # an abstention is no vote
        ("- -", 0.0),
    ],
)
def test_vote_of_all(finals: str, expected: float) -> None:
    """7 is right; - is no answer."""
    answers = ["" if x == "-" else x for x in finals.split()]
    assert maj_at_k(answers, [x == "7" for x in answers], len(answers)) == pytest.approx(expected)


def test_vote_of_two_among_three_by_hand() -> None:
    """7, 7, 9: the pairs 77, 79, 79 win 1, 1/2, 1/2."""
    assert maj_at_k(["7", "7", "9"], [True, True, False], 2) == pytest.approx(2 / 3)


def test_an_answer_judged_both_ways_is_worth_its_share() -> None:
    assert maj_at_k(["7", "7", "9"], [True, False, False], 3) == 0.5


def by_enumeration(finals: Sequence[str], right: Sequence[bool], k: int) -> float:
    worth = {
        x: sum(good for y, good in zip(finals, right, strict=True) if y == x) / finals.count(x)
        for x in finals
    }
    won, subsets = 0.0, list(itertools.combinations(finals, k))
    for chosen in subsets:
        votes = Counter(x for x in chosen if x)
        winners = [x for x in votes if votes[x] == max(votes.values())]
        won += sum(worth[x] for x in winners) / len(winners) if winners else 0.0
    return won / len(subsets)


def test_maj_at_k_is_the_mean_over_all_subsets() -> None:
    rng = random.Random(3)
    for _ in range(200):
        n = rng.randint(1, 9)
        finals = [rng.choice(["", "a", "b", "c", "d"]) for _ in range(n)]
        right = [x == "a" or (x == "b" and rng.random() < 0.5) for x in finals]
        k = rng.randint(1, n)
        assert maj_at_k(finals, right, k) == pytest.approx(by_enumeration(finals, right, k))


def test_maj_at_1_is_accuracy_where_right_answers_have_a_name() -> None:
    assert maj_at_k(["7", "", "9", "7"], [True, False, False, True], 1) == pytest.approx(0.5)
