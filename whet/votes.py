"""What n rollouts of one prompt say of fewer: pass@k and maj@k. Pure maths, exact, for `eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import fmean


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased chance that k of n rollouts hold a right one: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= right <= n and 1 <= k <= n
    return 1.0 - comb(n - right, k) / comb(n, k)


def maj_at_k(finals: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Chance that the answer most of k rollouts give is right, over all C(n, k) choices of k among these n.

    "" abstains; if all do, the vote is wrong. Tied answers share the win, so half counts for a right and a wrong
    answer with two votes each. Rollouts that give the same answer are all right or all wrong where the judge reads
    what is voted on; where not, an answer is worth the share of its rollouts that are right.

    >>> maj_at_k(["7", "7", "9", ""], [True, True, False, False], 4)
    1.0
    >>> maj_at_k(["7", "9"], [True, False], 2)
    0.5
    """
    assert len(finals) == len(right) and 1 <= k <= len(finals)
    votes, hits = Counter(finals), Counter(final for final, good in zip(finals, right, strict=True) if good)
    abstain = votes.pop("", 0)
    answers = tuple(sorted((count, hits[final]) for final, count in votes.items()))
    return _won(answers, abstain, k)


@lru_cache(maxsize=4096)
def _won(answers: tuple[tuple[int, int], ...], abstain: int, k: int) -> float:
    """`answers`: (rollouts, right ones among them) of each. Prompts with the same counts are the same sum."""
    if k == sum(count for count, _ in answers) + abstain:
        most = max((count for count, _ in answers), default=0)
        return fmean(hits / count for count, hits in answers if count == most) if most else 0.0
    won = 0.0
    for i, (count, hits) in enumerate(answers):
        if hits:
            rest = [other for j, (other, _) in enumerate(answers) if j != i]
            ways = sum(comb(count, v) * _beaten(rest, abstain, v, k - v) for v in range(1, min(count, k) + 1))
            won += hits / count * ways
    return won / comb(sum(count for count, _ in answers) + abstain, k)


def _beaten(rest: Sequence[int], abstain: int, votes: int, left: int) -> float:
    """Ways to take `left` of the other rollouts such that no other answer has more than `votes`.

    Each way counts 1 / (1 + answers that tie). Answers with fewer rollouts than `votes` can do no harm and are
    taken together with the abstentions.
    """
    harmless = abstain + sum(count for count in rest if count < votes)
    ways = {(0, 0): 1}  # (taken, tied) -> number of ways, over the answers that could tie
    for count in rest:
        if count >= votes:
            wider: Counter[tuple[int, int]] = Counter()
            for (taken, tied), number in ways.items():
                for more in range(min(votes, left - taken) + 1):
                    wider[taken + more, tied + (more == votes)] += number * comb(count, more)
            ways = wider
    return sum(number * comb(harmless, left - taken) / (1 + tied) for (taken, tied), number in ways.items())
